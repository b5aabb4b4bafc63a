"""The server: its parts put together, started, and drained.

Order of a drain: health says NOT_SERVING, a short pause lets load balancers notice, no new calls
are taken, running ones finish within the grace, then the indexes are closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dualform.engine.errors import CancelledError
from dualform.engine.messages.catalog import Catalog, Limits
from dualform.engine.messages.opening import Opener
from dualform.engine.messages.versions import Change
from dualform.machines.spread import Machines
from dualform.questions.quoted import unicode
from dualform.serve import policy
from dualform.serve.access import Access, Client, TokenInterceptor
from dualform.serve.actors import machines
from dualform.serve.addresses import check_addresses
from dualform.serve.admin import AdminServer
from dualform.serve.budget import MemoryBudget
from dualform.serve.calls import Call, Calls
from dualform.serve.config import ConfigError, ServerConfig
from dualform.serve.handlers import SERVICE, attribution_handlers
from dualform.serve.health import HEALTH_SERVICE, HealthBoard
from dualform.serve.lasting import LastingServer
from dualform.serve.memory import heap
from dualform.serve.page import MetricsPage
from dualform.serve.reading import AT_ONCE, RequestReader, compression
from dualform.serve.reports import IndexState, Reports
from dualform.serve.scans import Asker, ScanQueue
from dualform.serve.status import Refusal
from dualform.serve.telemetry import Telemetry
from dualform.serve.tls import Certificates

NOTICE_S = 0.5
GRACE_S = 30.0
# For answers that are computed and on their way; open health watches never end by themselves.
LAST_WRITES_S = 2.0
LOOK_S = 1.0
"""How often folders are looked at that versions are published into as they come, and whether rows
that were there are nowhere."""
LOOKS_FOR_ROWS = 10
"""Once in so many looks those are looked for that are nowhere."""
QUIET_LOOKS = 5
"""After so many without a question all memory that is free goes back to the system."""
MOST_CALLS_OF_A_CONNECTION = 256
GREETING_MS = 20_000
"""Who connects has said by then what HTTP/2, and TLS, begin with, or is let go."""
# Health checks and reflection included; whatever is beyond is refused before it is read.
MOST_CALLS = 2048
_REFLECTED = (SERVICE.full_name, HEALTH_SERVICE, reflection.SERVICE_NAME)
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_BESIDE = frozenset(
    (
        *(f"{HEALTH_SERVICE}/{method}" for method in ("Check", "Watch", "List")),
        *(f"{name}/ServerReflectionInfo" for name in (reflection.SERVICE_NAME, _REFLECTION_V1)),
    )
)
# What a running server cannot take over.
_FIXED = (
    *("listen", "device", "gpu_memory", "limits", "insecure", "open_health", "metrics", "admin"),
    *("memory", "telemetry", "ray", "explore", "log"),
)
_LEVELS = {
    "opened": logging.INFO,
    "kept": logging.DEBUG,
    "refused": logging.ERROR,
    "removed": logging.INFO,
}

_LOG = logging.getLogger("dualform.serve")


def open_catalog(config: ServerConfig) -> Catalog:
    """Open the configured indexes, here or on the machines that are configured.

    Raises:
        ConfigError: No index is named, or a name is not allowed, or there are no such machines.
    """
    limits = config.limits
    opener: Opener | None = None
    try:
        if config.ray is not None:
            opener = machines(config, config.ray)
        return Catalog(
            config.indexes,
            limits=Limits(limits.max_k, limits.max_queries, limits.max_message_mib),
            device=config.device,
            gpu_memory=config.gpu_memory,
            opener=opener,
        )
    except ValueError as error:
        if opener is not None:
            opener.close()
        raise ConfigError(str(error)) from None


class Server:
    """`dualform.v1.AttributionService` with health and reflection, in the running event loop.

    Args:
        config: Where to listen, and the limits.
        catalog: Open indexes; `drain` closes them.
        again: Reads the configuration again; without it the same is taken.
    """

    def __init__(
        self,
        config: ServerConfig,
        catalog: Catalog,
        again: Callable[[], ServerConfig] | None = None,
    ) -> None:
        self._config = config
        self._again = again or (lambda: config)
        self._one_at_a_time = asyncio.Lock()
        self._catalog = catalog
        self._health = HealthBoard(catalog)
        self._scans = ScanQueue(
            config.limits.concurrent_scans, config.limits.queued_scans, policy.make_teams
        )
        message = self._message = config.limits.max_message_mib << 20
        # Messages on their way in, each there twice, are counted once they are whole.
        self._memory = MemoryBudget(config.memory, aside=2 * AT_ONCE * message)
        if config.memory is not None:
            catalog.limits = replace(catalog.limits, take=self._memory.take)
        self._reader = RequestReader(config.limits.waiting_mib << 20, memory=self._memory)
        self._access = Access(config.tokens)
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._telemetry = Telemetry() if config.telemetry else None
        self._reports = Reports(
            config.metrics is not None, self._scans, self._reader, self._memory, self._telemetry
        )
        if isinstance(catalog.opener, Machines):
            self._reports.add_machines(catalog.opener)
        self._calls = Calls(
            self._access,
            self._reader,
            self._memory,
            self._refresh,
            self._reports.ended,
            began=self._reports.began,
        )
        self._page = None
        if config.metrics is not None:
            self._page = MetricsPage(
                config.metrics, self._reports.page, self._access, self._certificates
            )
        self._admin = None
        if config.admin is not None:
            self._admin = AdminServer(config.admin, self.reload_again, self._health)
        self._stopping = threading.Event()
        # Why indexes are not served, as health and metrics say it.
        self._told: dict[str, str | None] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._server = LastingServer(self._make, self._listen)

    def _make(self) -> grpc.aio.Server:
        """With all that is answered."""
        exempt = [f"/{SERVICE.full_name}/"]
        if self._config.open_health:
            exempt.append(f"/{HEALTH_SERVICE}/")
        access = TokenInterceptor(self._access, tuple(exempt), self._refused, known=_BESIDE)
        traced = () if self._telemetry is None else self._telemetry.interceptors
        server = grpc.aio.server(
            interceptors=[*traced, access],
            options=[
                ("grpc.max_receive_message_length", self._message),
                ("grpc.max_send_message_length", self._message),
                # Two servers on one port would share its clients without a word.
                ("grpc.so_reuseport", 0),
                # Clients may ping each second, also while nothing is asked, and keep their calls.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                # Clients that vanished without a word are noticed.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.server_handshake_timeout_ms", GREETING_MS),
                *compression(grpc.__version__),
                # gRPC lets its windows grow, and takes megabytes of each call that waits its turn.
                *([] if self._config.memory is None else [("grpc.http2.bdp_probe", 0)]),
                ("grpc.max_concurrent_streams", MOST_CALLS_OF_A_CONNECTION),
            ],
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        server.add_generic_rpc_handlers(
            (attribution_handlers(self._catalog, self._scans, self._calls, self._memory),)
        )
        self._health.add_to(server, None if self._config.open_health else self._access)
        reflection.enable_server_reflection(_REFLECTED, server)
        server.add_generic_rpc_handlers((_reflection_v1(),))
        return server

    @property
    def lost(self) -> asyncio.Event:
        """Set where gRPC ended by itself and could not be started again."""
        return self._server.lost

    def check(self) -> list[str]:
        """Whether `start` would do.

        Returns:
            Keys of the configuration whose port somebody else has at this moment.

        Raises:
            ConfigError: An address cannot be listened on, or the memory is too little.
        """
        self._memory.check()
        return check_addresses(self._config)

    async def start(self) -> str:
        """Listen, answer, and check the indexes' files in the background.

        Returns:
            "HOST:PORT" with the port that was taken.

        Raises:
            ConfigError: An address cannot be listened on, or the memory is too little.
        """
        taken = self.check()
        await self._refresh()
        listen = self._config.listen
        port = 0 if "listen" in taken else self._server.listen(listen)
        if port == 0:
            raise ConfigError(
                f"cannot listen on {listen}: the port is taken or may not be; choose another "
                "with --port, 0 for any free one"
            )
        if self._page is not None:
            await self._page.start()
            _LOG.info("metrics are at %s", self._page.address)
        if self._admin is not None:
            await self._admin.start()
            _LOG.info("admin listens on %s", self._admin.address)
        await self._server.start()
        heap.give_back()  # what opening the indexes left
        self._sweeping = asyncio.create_task(self._sweep())
        self._looking = asyncio.create_task(self._look())
        return f"{listen.rpartition(':')[0]}:{port}"

    async def reload_again(self) -> list[Change] | Refusal:
        """Read the configuration again and `reload` it; what came of it, or why nothing did."""
        async with self._one_at_a_time:
            try:
                return await self.reload(await asyncio.to_thread(self._again))
            except Exception as error:
                _LOG.error("nothing was changed: %s", unicode(str(error)))
                message = f"nothing was changed: {error}"
                return Refusal("FAILED_PRECONDITION", message, "BAD_CONFIGURATION")

    async def reload(self, config: ServerConfig) -> list[Change]:
        """Take over what may change while serving: indexes, certificates and tokens.

        Calls go on meanwhile. What is wrong is logged and stays as it was.

        Args:
            config: As it is written now.

        Returns:
            What came of it.
        """
        changes = [
            Change(name, "refused", "", f"{name} has changed in the configuration: restart for it")
            for name in _FIXED
            if getattr(config, name) != getattr(self._config, name)
        ]
        changes += await asyncio.to_thread(self._reload_tokens, config)
        changes += await asyncio.to_thread(self._reload_tls, config)
        try:
            changes += await asyncio.to_thread(
                self._catalog.reload, config.indexes, self._stopping.is_set
            )
        except ValueError as error:
            changes.append(
                Change("indexes", "refused", "", f"the indexes stay as they were: {error}")
            )
        _LOG.info("the configuration was read again")
        await self._tell(changes)
        return changes

    def _refused(self, method: str, request_id: str, refusal: Refusal) -> None:
        call = Call(method, request_id, Client(), Asker(), time.monotonic(), code=refusal.code)
        call.facts["reason"] = refusal.reason
        self._reports.began(method)
        self._reports.ended(call)

    async def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            _LOG.log(_LEVELS[change.outcome], "%s", unicode(change.detail))
        await self._refresh()

    async def _look(self) -> None:
        """Take versions over as they are published, and return what memory nobody needs."""
        begun = quiet = 0
        for look in itertools.count():
            await asyncio.sleep(LOOK_S)
            at_work = self._scans.begun > begun or self._scans.running or self._scans.streams
            begun, quiet = self._scans.begun, 0 if at_work else quiet + 1
            catalog, stop = self._catalog, self._stopping.is_set
            try:
                if quiet == QUIET_LOOKS:
                    await asyncio.to_thread(heap.give_back, always=True)
                found = await asyncio.to_thread(catalog.take_newer, stop)
                if look % LOOKS_FOR_ROWS == 0:
                    await asyncio.to_thread(catalog.look_again, stop)
            except OSError as error:  # such as clients that have taken all descriptors
                _LOG.error("newer versions of indexes could not be looked for: %s", error)
                continue
            except Exception:
                _LOG.exception("newer versions of indexes could not be looked for")
                continue
            if found or self._reasons(catalog) != self._told:
                await self._tell(found)

    def _reload_tokens(self, config: ServerConfig) -> list[Change]:
        try:
            self._access.reload(config.tokens)
        except ConfigError as error:
            return [Change("tokens", "refused", "", f"the tokens stay as they were: {error}")]
        if config.tokens is None:
            return []
        return [Change("tokens", "opened", "", "tokens: read again, for new calls")]

    def _reload_tls(self, config: ServerConfig) -> list[Change]:
        if (config.tls is None) != (self._certificates is None):
            what = "tls was turned on or off in the configuration: restart for it"
            return [Change("tls", "refused", "", what)]
        if config.tls is None or self._certificates is None:
            return []
        try:
            self._certificates.reload(config.tls)
        except ConfigError as error:
            return [Change("tls", "refused", "", f"the certificate stays as it was: {error}")]
        what = "tls: certificate and key were read again, for new connections"
        return [Change("tls", "opened", "", what)]

    async def _refresh(self) -> None:
        """Health and metrics say what is known of the indexes now."""
        self._health.refresh()
        catalog = self._catalog
        self._told = self._reasons(catalog)
        self._reports.set_indexes(
            [
                IndexState(
                    name,
                    catalog.version(name),
                    catalog.reason(name) is None,
                    partial(catalog.resident, name),
                )
                for name in catalog.names
            ]
        )

    @staticmethod
    def _reasons(catalog: Catalog) -> dict[str, str | None]:
        return {name: catalog.reason(name) for name in catalog.names}

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        if self._certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self._certificates.credentials()))

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Stop in good order.

        Args:
            hurry: Once set, nothing is waited for any more.
        """
        hurry = hurry or asyncio.Event()
        self._health.drain()
        await _first(asyncio.sleep(NOTICE_S), hurry.wait())
        self._stopping.set()
        stopping = asyncio.create_task(self._server.stop(GRACE_S))
        await _first(self._scans.drain(), hurry.wait(), asyncio.sleep(GRACE_S))
        await self._server.stop(0 if hurry.is_set() else LAST_WRITES_S)
        await stopping
        if self._admin is not None:
            await self._admin.stop()
        if self._sweeping is not None:
            await self._sweeping
        if self._looking is not None:
            await _cancelled(self._looking)
        if self._page is not None:
            await self._page.stop()
        await asyncio.to_thread(self._reports.close)
        await asyncio.to_thread(self._scans.close)
        await asyncio.to_thread(self._catalog.close)

    async def _sweep(self) -> None:
        for name in self._catalog.names:
            wrong = None
            try:
                wrong = await asyncio.to_thread(self._catalog.verify, name, self._stopping.is_set)
            except CancelledError:
                return
            except Exception:
                _LOG.exception("the files of index %s could not be checked", name)
            damage = self._catalog.damage(name)
            if damage is not None:
                _LOG.error("index %s is damaged: %s", name, unicode(damage))
            elif wrong is None:
                _LOG.info("index %s: all files are as written", name)
            await self._refresh()


def _reflection_v1() -> grpc.GenericRpcHandler[Any, Any]:
    """grpc.reflection.v1: its messages are those of v1alpha, byte for byte, under another name."""
    module: Any = reflection
    servicer = module.aio.ReflectionServicer((*_REFLECTED, _REFLECTION_V1))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler})


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
