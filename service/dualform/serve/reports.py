"""What the operator is told: one line of log for each call, and metrics for Prometheus.

Neither ever holds a query or a token. The names of gRPC's own metrics are those of gRFC A66.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualform._install import pip_install
from dualform.serve.access import OTHER
from dualform.serve.budget import MemoryBudget
from dualform.serve.calls import Call
from dualform.serve.config import ConfigError
from dualform.serve.memory import anonymous_bytes
from dualform.serve.reading import RequestReader
from dualform.serve.scans import ScanQueue
from dualform.serve.telemetry import Telemetry

if TYPE_CHECKING:
    from dualform.machines.spread import Machines

SERVICE_NAME = "dualform.v1.AttributionService"
_IO = Path("/proc/self/io")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@+-]*")
_CALLS = logging.getLogger("dualform.calls")
# gRFC A66's buckets, seconds.
_BUCKETS = (
    *(0.00001, 0.00005, 0.0001, 0.0003, 0.0006, 0.0008, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006),
    *(0.008, 0.01, 0.013, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16),
    *(0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1, 2, 5, 10, 20, 50, 100),
)


# Bytes.
_SIZES = (0, *(1024 * 2**n for n in (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22)))


class IndexState(NamedTuple):
    """What metrics tell of an index.

    Attributes:
        name: It is served under.
        version: Which.
        healthy: Whether it is served.
        resident: Gives the share of its keys that is in the page cache.
    """

    name: str
    version: str
    healthy: bool
    resident: Callable[[], float]


class Reports:
    """Counts and logs the calls that ended.

    Args:
        metrics: Whether to count.
        scans: Whose queue is shown.
        reader: Whose bytes are shown.
        memory: Whose promises are shown.
        telemetry: Traces; None without.

    Raises:
        ConfigError: Metrics are wanted and prometheus-client is not installed.
    """

    def __init__(
        self,
        metrics: bool,
        scans: ScanQueue,
        reader: RequestReader,
        memory: MemoryBudget,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._metrics = _Metrics(scans, reader, memory) if metrics else None

    def began(self, method: str) -> None:
        """A call of this method began."""
        if self._metrics is not None:
            self._metrics.count_begun(method)

    def ended(self, call: Call) -> None:
        """One call ended: a line, and the counts."""
        facts = facts_of(call)
        text = " ".join(f"{name}={_word(value)}" for name, value in facts.items())
        _CALLS.info("%s", text, extra={"facts": facts})
        if self._telemetry is not None:
            self._telemetry.ended(facts)
        if self._metrics is not None:
            self._metrics.count(call)

    def set_indexes(self, states: Sequence[IndexState]) -> None:
        """All indexes that are served now."""
        if self._metrics is not None:
            self._metrics.set_indexes(states)

    def add_machines(self, machines: Machines) -> None:
        """Count what machines do that open shards."""
        if self._metrics is not None:
            self._metrics.add_machines(machines)

    def page(self, accept: str) -> tuple[str, bytes]:
        """The metrics, for who accepts this: content type and text."""
        assert self._metrics is not None
        return self._metrics.page(accept)

    def close(self) -> None:
        """Send what is left of the traces."""
        if self._telemetry is not None:
            self._telemetry.close()


def facts_of(call: Call) -> dict[str, Any]:
    """What the log says of a call."""
    asker = call.asker
    head = {"call": call.method, "id": call.request_id, "code": call.code}
    if call.client.name:
        head["client"] = call.client.name
    return {
        **head,
        **call.facts,
        "queued_ms": round(asker.queued_s * 1000, 1),
        "computed_ms": round(asker.computed_s * 1000, 1),
        "ms": round((time.monotonic() - call.began) * 1000, 1),
    }


def _full(method: str) -> str:
    """As gRPC's metrics call it: with its service, and "other" where there is none such."""
    return method if "/" in method or method == OTHER else f"{SERVICE_NAME}/{method}"


def _word(value: Any) -> str:
    """As it is, or in quotes where it could be taken for more than one word."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class _Counted:
    """What somebody else counts: read when it is asked for."""

    def __init__(self, prometheus: Any, scans: ScanQueue) -> None:
        self._metric = prometheus.core.CounterMetricFamily
        self._scans = scans

    def collect(self) -> Iterator[Any]:
        yield self._metric("dualform_scans", "Scans that began.", self._scans.begun)
        # What the system read for this process, mapped files included; what the page cache had
        # is not in it.
        with suppress(OSError, StopIteration):
            told = (line.split() for line in _IO.read_text().splitlines())
            read = next(int(number) for name, number in told if name == "read_bytes:")
            yield self._metric(
                "dualform_storage_read_bytes", "Bytes read from storage, mapped files too.", read
            )
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        yield self._metric(
            "dualform_major_page_faults", "Pages read from disk as they were needed.", faults
        )


class _OfMachines:
    """What the machines do that open shards, read when it is asked for."""

    def __init__(self, prometheus: Any, machines: Machines) -> None:
        self._core, self._machines = prometheus.core, machines

    def collect(self) -> Iterator[Any]:
        fleet = self._machines.fleet
        there = fleet.machines()
        gauge, counter = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        yield gauge("dualform_machines", "Actors that are to be there.", len(there))
        up = gauge("dualform_machine_up", "1 while the actor is there.", labels=["machine"])
        for seat, about in enumerate(there):
            up.add_metric([str(seat)], about is not None)
        yield up
        traffic = fleet.traffic
        for name, text, value in (
            ("dualform_machines_lost", "Actors that were given up.", traffic.lost),
            ("dualform_machines_requests", "Requests to actors.", traffic.requests),
            (
                "dualform_machines_moved",
                "Requests that went to another actor than their shards belong to.",
                traffic.moved,
            ),
            ("dualform_machines_sent_bytes", "Bytes of requests to actors.", traffic.sent),
            ("dualform_machines_received_bytes", "Bytes of their replies.", traffic.received),
        ):
            yield counter(name, text, value)
        took = counter(
            "dualform_machine_seconds", "From requests to their replies.", labels=["machine"]
        )
        for seat, seconds in sorted(traffic.seconds.items()):
            took.add_metric([str(seat)], seconds)
        yield took
        shards = gauge("dualform_machine_shards", "Shards by place.", labels=["version", "machine"])
        nowhere = gauge("dualform_rows_nowhere", "Rows that no actor has.", labels=["version"])
        for index in self._machines.indexes:
            for seat, count in index.seats():
                shards.add_metric([index.version, str(seat)], count)
            nowhere.add_metric([index.version], index.nowhere())
        yield shards
        yield nowhere


class _Metrics:
    """The counters; prometheus-client is imported here alone."""

    def __init__(self, scans: ScanQueue, reader: RequestReader, memory: MemoryBudget) -> None:
        try:
            import prometheus_client as prometheus
            import prometheus_client.core
            import prometheus_client.exposition
        except ImportError:
            raise ConfigError(f"metrics need prometheus-client: {pip_install('metrics')}") from None
        self._prometheus = prometheus
        registry = self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        method = ("grpc_method",)
        self._duration = prometheus.Histogram(
            "grpc_server_call_duration_seconds",
            "From the first byte of a call to its end.",
            (*method, "grpc_status"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._started = prometheus.Counter(
            "grpc_server_call_started", "Calls that began.", method, registry=registry
        )
        self._sent, self._received = (
            prometheus.Histogram(
                f"grpc_server_call_{way}_total_compressed_message_size_bytes",
                f"Bytes of a call's messages that were {way}.".replace("rcvd", "received"),
                (*method, "grpc_status"),
                buckets=_SIZES,
                registry=registry,
            )
            for way in ("sent", "rcvd")
        )
        self._queued = prometheus.Histogram(
            "dualform_queued_seconds",
            "How long a question waited for its scan.",
            method,
            buckets=_BUCKETS,
            registry=registry,
        )
        self._computed = prometheus.Histogram(
            "dualform_computed_seconds",
            "How long a question's scans took.",
            method,
            buckets=_BUCKETS,
            registry=registry,
        )
        self._stopped = prometheus.Histogram(
            "dualform_stopped_seconds",
            "How long a scan went on after its callers had given up.",
            method,
            buckets=_BUCKETS,
            registry=registry,
        )
        scans.stopped = self._went_on
        self._rows = prometheus.Counter(
            "dualform_rows_covered", "Rows that answers covered.", ("index",), registry=registry
        )
        self._strategies = prometheus.Counter(
            "dualform_strategy", "Answers by strategy.", (*method, "strategy"), registry=registry
        )
        self._joined = prometheus.Counter(
            "dualform_joined",
            "Questions that another's scan answered along with its own.",
            method,
            registry=registry,
        )
        registry.register(_Counted(prometheus, scans))
        self._resident = prometheus.Gauge(
            "dualform_index_resident_ratio",
            "Share of the index's keys in the page cache.",
            ("index",),
            registry=registry,
        )
        self._indexes = prometheus.Gauge(
            "dualform_index_serving",
            "1 while the index is served, 0 while it is damaged.",
            ("index", "version"),
            registry=registry,
        )
        self._versions: dict[str, str] = {}
        shown = {
            "dualform_scans_running": ("Scans that run.", lambda: scans.running),
            "dualform_scans_waiting": ("Questions that wait.", lambda: scans.waiting),
            "dualform_streams": ("Answers that are sent in parts.", lambda: scans.streams),
            "dualform_request_bytes": ("Requests above 1 MiB in memory.", lambda: reader.held),
            "dualform_memory_anonymous_bytes": (
                "Memory that no file backs.",
                anonymous_bytes,
            ),
            "dualform_memory_promised_bytes": (
                "Memory promised to questions, requests and answers.",
                lambda: memory.promised,
            ),
            "dualform_memory_limit_bytes": (
                "What `memory` allows; 0 for no limit.",
                lambda: memory.limit or 0,
            ),
        }
        for name, (text, value) in shown.items():
            prometheus.Gauge(name, text, registry=registry).set_function(value)
        self._server: Any = None

    def _went_on(self, what: str, seconds: float) -> None:
        self._stopped.labels(_full(what)).observe(seconds)

    def count_begun(self, method: str) -> None:
        self._started.labels(_full(method)).inc()

    def count(self, call: Call) -> None:
        method = _full(call.method)
        self._duration.labels(method, call.code).observe(time.monotonic() - call.began)
        self._sent.labels(method, call.code).observe(call.sent)
        self._received.labels(method, call.code).observe(call.received)
        if call.asker.computed_s:
            self._queued.labels(method).observe(call.asker.queued_s)
            self._computed.labels(method).observe(call.asker.computed_s)
        if call.asker.joined:
            self._joined.labels(method).inc()
        if call.code == "OK" and "rows" in call.facts:
            self._rows.labels(call.facts["index"]).inc(call.facts["rows"])
        if "strategy" in call.facts:
            self._strategies.labels(method, call.facts["strategy"]).inc()

    def set_indexes(self, states: Sequence[IndexState]) -> None:
        now = {state.name: state.version for state in states}
        for name, version in self._versions.items():
            if now.get(name) != version:
                self._indexes.remove(name, version)
            if name not in now:
                self._resident.remove(name)
        self._versions = now
        for state in states:
            self._indexes.labels(state.name, state.version).set(state.healthy)
            self._resident.labels(state.name).set_function(state.resident)

    def add_machines(self, machines: Machines) -> None:
        self._registry.register(_OfMachines(self._prometheus, machines))

    def page(self, accept: str) -> tuple[str, bytes]:
        exposition = self._prometheus.exposition
        try:
            encode, kind = exposition.choose_encoder(accept)
        except (TypeError, ValueError):  # what it can't read
            encode, kind = exposition.choose_encoder("")
        return kind, encode(self._registry)
