"""Whether a server that is busy stops what nobody waits for, and says that it lives (Linux).

    python -m benchmarks busy --index INDEX --layer LAYER [--seconds 20] [--clients 16]

Stops, one question at a time: each kind of question is given up at a random moment, by its deadline
and by its client's going away, in turn; then the server's processor time is read every two
milliseconds until it stands still. What is reported is the time from giving up to the last
processor time used for it, as seen from outside, network and event loop included.

Health: a process of its own asks every 20 ms, at rest and while so many clients ask expensive
questions of all kinds and give up each third one, over and over; and how long scans went on in that
time, by the server's own metric.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.server import serving
from dualform.client import Client
from dualform.client.errors import DualformError

_LOOK_S = 0.002
# Of a core: what a server at rest uses less of.
_AT_REST = 0.25
_QUIET_LOOKS = 25
_EVERY_S = 0.02

Ask = Callable[[Client, float], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", type=Path)
    parser.add_argument("--layer")
    parser.add_argument("--rounds", type=int, default=6, help="each kind given up so often")
    parser.add_argument("--seconds", type=float, default=20, help="of health checks, each time")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--only", default="", help="kinds with this in their names")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        address, seconds = arguments.probe
        print(json.dumps(health_of(address, float(seconds))))
        return
    metrics = _free_port()
    with serving(arguments.index, f"metrics: 127.0.0.1:{metrics}\n") as server:
        with Client(server.address, timeout=300, retry=None) as client:
            layer = arguments.layer or next(iter(client.index().layers))
            kinds = _kinds(client, layer, arguments.only)
            load, _, _ = os.getloadavg()
            print(f"load {load:.1f}; milliseconds, whole and after giving up\n")
            print("| question | takes | median | most | of a processor, most |")
            print("|---|---:|---:|---:|---:|", flush=True)
            stops = stop_seconds(client, server.pid, kinds, arguments.rounds)
        rest = _probe(server.address, arguments.seconds)
        before = _stopped(metrics)
        with _Load(server.address, kinds, arguments.clients) as asked:
            time.sleep(2)
            busy = _probe(server.address, arguments.seconds)
        after = _stopped(metrics)
        again = _probe(server.address, arguments.seconds)
    print("\n| health | checks | p50 ms | p99 ms | most ms |\n|---|---:|---:|---:|---:|")
    for name, each in (("at rest", rest), ("busy", busy), ("at rest again", again)):
        p50, p99, most = np.percentile(np.array(each) * 1e3, [50, 99, 100])
        print(f"| {name} | {len(each)} | {p50:.1f} | {p99:.1f} | {most:.1f} |")
    print(f"\n{arguments.clients} clients: {asked.answered} answered, {asked.given_up} given up")
    counts = {bound: after.get(bound, 0) - before.get(bound, 0) for bound in after}
    for line in _within(counts):
        print(line)
    if arguments.json:
        kept = {"load": load, "stops": stops, "rest": rest, "busy": busy, "again": again}
        arguments.json.write_text(json.dumps({**kept, "stopped": counts}) + "\n")


def _kinds(client: Client, layer: str, only: str) -> dict[str, Ask]:
    """Expensive questions: each takes as long as it is let."""
    info = client.index().layers[layer]
    rng = np.random.default_rng(0)
    many, few = (rng.standard_normal((n, info.d_in)).astype(np.float32) for n in (256, 64))
    numbers = ", ".join(map(str, range(20_000)))
    label = "label" if "label" in info.columns else "step"

    def top_k(queries: np.ndarray = many, **options: Any) -> Ask:
        return lambda c, s: c.top_k(layer, queries, **{"k": 100, "timeout": s, **options})

    def outputs(queries: np.ndarray = many, **options: Any) -> Ask:
        options = {"max_residual": np.inf, "where": "step <> 1", **options}
        return lambda c, s: c.dual_output(layer, queries, timeout=s, **options)

    found: dict[str, Ask] = {
        "top-k": top_k(),
        "top-k, 64 queries": top_k(few),
        "top-k, k = 3000": top_k(few, k=3000),
        "top-k by group": top_k(few, k=20, group_by=label),
        "top-k, distinct": top_k(few, distinct="step"),
        "top-k, absolute": top_k(order="absolute"),
        "top-k, filtered": top_k(where=f"step in ({numbers}) and not step in ({numbers}, -1)"),
        "top-k by contribution": top_k(few, rank_by="contribution", unit=0, max_residual=np.inf),
        "sums": lambda c, s: c.sums(layer, many, group_by=label, absolute=True, timeout=s),
        "sums by step": lambda c, s: c.sums(layer, few, group_by="step", absolute=True, timeout=s),
        "best groups": lambda c, s: c.top_groups(layer, many, by="step", k=10, timeout=s),
        "best groups by contribution": lambda c, s: c.top_groups(
            layer, few, by="step", rank_by="contribution", unit=0, max_residual=np.inf, timeout=s
        ),
        "output, masked": outputs(),
        "output by group": outputs(group_by=label),
        "explain": lambda c, s: c.explain(
            {layer: many}, k=50, group_by=label, absolute=True, timeout=s
        ),
        "weights": lambda c, s: [None for _ in c.stream_weights(layer, many, timeout=s)],
    }
    return {name: ask for name, ask in found.items() if only in name}


def stop_seconds(
    client: Client, pid: int, kinds: dict[str, Ask], rounds: int
) -> dict[str, tuple[float, list[tuple[float, float]]]]:
    """For each kind how long it takes, and each time it was given up how long it went on, in
    seconds and in seconds of a processor."""
    chance = random.Random(0)
    found: dict[str, tuple[float, list[tuple[float, float]]]] = {}
    for name, ask in kinds.items():
        begin = time.monotonic()
        ask(client, 300.0)
        whole = time.monotonic() - begin
        each: list[tuple[float, float]] = []
        for _ in range(rounds):
            with suppress(DualformError):
                ask(client, max(0.02, chance.uniform(0.05, 0.8) * whole))
                continue  # answered: it was quicker this time
            each.append(_until_at_rest(pid))
        found[name] = whole, each or [(0.0, 0.0)]
        ms = np.array(found[name][1]) * 1e3
        cells = [np.median(ms[:, 0]), *ms.max(axis=0)]
        print(
            f"| {name} | {whole * 1e3:,.0f} | {' | '.join(f'{x:.0f}' for x in cells)} |", flush=True
        )
    return found


def _until_at_rest(pid: int) -> tuple[float, float]:
    """Seconds from now to the last processor time before a while without any, and how much that
    was in all."""
    begin = last = time.monotonic()
    used, quiet = _processor_s(pid), 0
    first = used
    while quiet < _QUIET_LOOKS:
        time.sleep(_LOOK_S)
        now, more = time.monotonic(), _processor_s(pid)
        if more - used > _AT_REST * _LOOK_S:
            last, quiet = now, 0
        else:
            quiet += 1
        used = more
    return last - begin, used - first


def _processor_s(pid: int) -> float:
    """Of all threads, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


class _Load:
    """Clients that ask everything, over and over; each third question they give up."""

    def __init__(self, address: str, kinds: dict[str, Ask], clients: int) -> None:
        self._address, self._kinds = address, list(kinds.values())
        self._stop = threading.Event()
        self.answered = self.given_up = 0
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(clients)
        ]

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with Client(self._address, retry=None) as client:
            while not self._stop.is_set():
                try:
                    chance.choice(self._kinds)(client, chance.choice((1.0, 4.0, 4.0)))
                    self.answered += 1
                except DualformError:
                    self.given_up += 1


def health_of(address: str, seconds: float) -> list[float]:
    """How long each check took, in seconds, one every 20 ms over a connection of its own."""
    found = []
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        stub.Check(request, timeout=60)
        end = time.monotonic() + seconds
        while (begin := time.perf_counter()) and time.monotonic() < end:
            answer = stub.Check(request, timeout=60)
            found.append(time.perf_counter() - begin)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            time.sleep(max(0.0, _EVERY_S - found[-1]))
    return found


def _probe(address: str, seconds: float) -> list[float]:
    command = [sys.executable, "-m", "benchmarks", "busy", "--probe", address, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def _stopped(port: int) -> dict[str, float]:
    """The metric's counts by bucket, of all methods."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    counts: dict[str, float] = {}
    for bound, value in re.findall(r'dualform_stopped_seconds_bucket{.*le="(.*?)"} (\S+)', text):
        counts[bound] = counts.get(bound, 0.0) + float(value)
    return counts


def _within(counts: dict[str, float]) -> Sequence[str]:
    total = counts.get("+Inf", 0.0)
    if not total:
        return ["no scan was given up"]
    bounds = sorted((float(bound), count) for bound, count in counts.items())
    tenth = next(count for bound, count in bounds if bound >= 0.1)
    all_by = next(bound for bound, count in bounds if count >= total)
    half = next(bound for bound, count in bounds if count >= total / 2)
    return [
        f"{total:.0f} scans given up while busy: half went on for {half:g} s at most, "
        f"{tenth / total:.1%} for 0.1 s at most, all for {all_by:g} s at most"
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
