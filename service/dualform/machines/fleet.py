"""Machines by Ray: one actor for each seat, asked all at once, and replaced where one is lost.

A part of an index belongs to a seat. Where the seat's machine is lost, the part is opened on
another that is there, at once and within the question's own deadline; meanwhile a new machine is
started for the seat, on whatever node has room, and takes its parts over when they are next asked
about. No clocks are compared: a request ends when the server says so.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dualform import __version__
from dualform.engine.errors import (
    CancelledError,
    DataLossError,
    EngineError,
)
from dualform.machines.cluster import LOCAL, FleetError, connect, imported, nodes, seats
from dualform.machines.machine import (
    About,
    Machine,
    Refused,
    Settings,
    of_each,
    packed,
    unpacked,
)
from dualform.machines.parts import Part
from dualform.questions.placement import device_names

_LOOK_S = 0.05
_WATCH_S = 0.25
_SHARED_BYTES = 100_000

_LOG = logging.getLogger("dualform.machines")

__all__ = ["LOCAL", "Fleet", "FleetError", "Lost", "Patience", "Traffic"]


@dataclass(frozen=True)
class Patience:
    """How long is waited for what.

    Attributes:
        start: Seconds for all machines to be there at first.
        silent: Seconds after which a machine that does not even say that it is there is given up.
        replaced: Seconds that a question waits for a new machine where no other has the part.
    """

    start: float = 120.0
    silent: float = 20.0
    replaced: float = 30.0


@dataclass(frozen=True)
class Lost:
    """No machine has a part, or could be reached.

    Attributes:
        error: Why, for the caller.
    """

    error: EngineError


@dataclass
class Traffic:
    """What went between the server and its machines.

    Attributes:
        sent, received: Bytes of requests and replies.
        requests: How many.
        lost: Machines that were given up.
        moved: Requests that went to another machine than their part belongs to.
        seconds: By seat, from requests that were sent to their replies.
    """

    sent: int = 0
    received: int = 0
    requests: int = 0
    lost: int = 0
    moved: int = 0
    seconds: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Running:
    """A machine that was there when it was last heard of."""

    seat: int
    handle: Any
    about: About
    heard: float
    ping: Any = None
    lost: bool = False


@dataclass(eq=False)
class _Request:
    """A request on its way: where among the answers it belongs, and who has failed it."""

    place: int
    part: Part
    seat: int
    data: Any
    size: int
    ticket: int = 0
    at: _Running | None = None
    tried: tuple[_Running, ...] = ()
    refused: EngineError | None = None
    until: float = 0.0
    sent: float = 0.0


class Fleet:
    """So many machines; thread-safe.

    Args:
        address: Of a Ray cluster, "auto" for the one that this machine belongs to, or LOCAL.
        count: How many; None for one on each node, or of LOCAL one for each core; where there are
            GPUs to be used, for one for each of those.
        settings: How their processes are set up.
        threads: Requests that each works on at a time.
        patience: How long is waited.
        device: Which GPUs are used, as `Machines` takes it: each machine asks Ray for its own.

    Raises:
        FleetError: Ray is not installed, or not there, or has no room for so many.
    """

    def __init__(
        self,
        address: str = LOCAL,
        count: int | None = None,
        settings: Settings | None = None,
        threads: int = 3,
        patience: Patience | None = None,
        device: str | Sequence[str] = "cpu",
    ) -> None:
        self._ray = imported()
        self._patience = patience or Patience()
        self._settings = settings or Settings()
        self._threads = threads
        self._lock = threading.Lock()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._tickets = itertools.count(1)
        self.traffic = Traffic()
        there = connect(self._ray, address, count)
        self._gpus = seats(self._ray, there, device_names(device), fixed=count is not None)
        self.count = len(self._gpus)
        self._sharing = -(-self.count // max(1, len(nodes(self._ray))))
        self._actor = self._ray.remote(
            num_cpus=1,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=threads,
            # So that a machine can be told to stop, and can say that it is there, while it works.
            concurrency_groups={"control": 2},
        )(Machine)
        self._seats: list[_Running | None] = [None] * self.count
        self._coming: dict[int, tuple[Any, Any]] = {}
        self._start()
        self._watcher = threading.Thread(target=self._watch, name="machines", daemon=True)
        self._watcher.start()

    def machines(self) -> list[About | None]:
        """Who sits on each seat; None where nobody does."""
        return [None if seat is None or seat.lost else seat.about for seat in self._seats]

    def ask(
        self,
        parts: Sequence[tuple[int, Part]],
        function: Callable[..., Any],
        *arguments: Any,
        stop: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Ask for `function(here, *arguments)` of each part, all at once.

        Args:
            parts: With their seats.
            function: One of `dualform.machines.asked`.
            arguments: What it takes; the same of all parts, but for those that are `Each`.
            stop: Returns True once nobody waits; the machines are told.

        Returns:
            For each part what the function returned, or Lost.

        Raises:
            CancelledError: `stop` said so.
            EngineError: What a machine refused for another reason than that it has not the part.
        """
        waiting: dict[Any, _Request] = {}
        standing: list[_Request] = []
        found: list[Any] = [None] * len(parts)
        try:
            each, shared = of_each(arguments, len(parts)), None
            for place, (seat, part) in enumerate(parts):
                if each is not None or shared is None:
                    data = packed(function, *(arguments if each is None else each[place]))
                    shared = self._shared(data)
                size = len(data) + len(pickle.dumps(part))
                standing.append(_Request(place, part, seat, shared, size))
            while waiting or standing:
                standing = [each for each in standing if not self._sent(each, waiting, found)]
                self._take(waiting, standing, found)
                if stop is not None and stop():
                    raise CancelledError("the caller gave up; the machines were told to stop")
            return found
        finally:
            for request in waiting.values():
                self._tell(request.at, "stop", request.ticket)

    def forget(self, parts: Sequence[Part]) -> None:
        """Close parts wherever they are open; nothing is waited for."""
        for part in parts:
            for machine in self._there():
                self._tell(machine, "forget", part)

    def close(self) -> None:
        """End the machines, and Ray's connection."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        self._watcher.join()
        for machine in self._there():
            with suppress(Exception):
                self._ray.kill(machine.handle)
        self._ray.shutdown()

    def _start(self) -> None:
        """All machines at first; all of them must come."""
        until = time.monotonic() + self._patience.start
        while any(seat is None for seat in self._seats):
            self._fill()
            if time.monotonic() > until:
                there = sum(seat is not None for seat in self._seats)
                cores = self._ray.cluster_resources().get("CPU", 0)
                self._ray.shutdown()
                raise FleetError(
                    f"{there} of {self.count} actors came within {self._patience.start:g} s: each "
                    f"takes one of the cluster's {cores:g} CPUs{self._of_gpus()}; ask for fewer, "
                    "or add nodes"
                )
            time.sleep(_LOOK_S / 5)

    def _fill(self) -> None:
        """Start machines on empty seats, and seat those that have come."""
        for number, seat in enumerate(self._seats):
            if seat is not None and not seat.lost:
                continue
            if number not in self._coming:
                spread = self._actor.options(
                    scheduling_strategy="SPREAD", num_gpus=self._gpus[number]
                )
                handle = spread.remote(self._settings, self._sharing)
                self._coming[number] = handle, self._about(handle)
                continue
            handle, reply = self._coming[number]
            if not self._ray.wait([reply], timeout=0)[0]:
                continue
            del self._coming[number]
            try:
                about = self._ray.get(reply)
            except self._ray.exceptions.RayError as error:
                if seat is None:
                    raise FleetError(f"a machine did not start: {error}") from None
                _LOG.error("a machine in place of a lost one did not start: %s", error)
                continue
            if about.version != __version__:
                self._ray.kill(handle)
                raise FleetError(
                    f"{about.host} has dualform {about.version}, and the server {__version__}; "
                    "install the same on all"
                )
            self._seats[number] = _Running(number, handle, about, time.monotonic())
            _LOG.info(
                "machine %d is process %d on %s%s",
                number,
                about.process,
                about.host,
                f", with GPU {about.gpus}" if self._gpus[number] else "",
            )

    def _of_gpus(self) -> str:
        """What they take of GPUs, in words."""
        if not any(self._gpus):
            return ""
        there = self._ray.cluster_resources().get("GPU", 0)
        return f", and {sum(self._gpus)} of its {there:g} GPUs are asked for"

    def _watch(self) -> None:
        """Replace machines that are lost, and give up those that are silent."""
        while not self._closed.is_set():
            self._wake.wait(_WATCH_S)
            self._wake.clear()
            try:
                for machine in self._there():
                    self._listen(machine)
                if not self._closed.is_set():
                    self._fill()
            except Exception:
                _LOG.exception("the machines could not be looked after")

    def _listen(self, machine: _Running) -> None:
        if machine.ping is None:
            machine.ping = self._about(machine.handle)
        elif self._ray.wait([machine.ping], timeout=0)[0]:
            try:
                self._ray.get(machine.ping)
                machine.heard, machine.ping = time.monotonic(), None
            except self._ray.exceptions.RayError as error:
                self._give_up(machine, str(error).strip().splitlines()[0])
        elif time.monotonic() - machine.heard > self._patience.silent:
            self._give_up(machine, f"it has been silent for {self._patience.silent:g} s")

    def _give_up(self, machine: _Running, why: str) -> None:
        with self._lock:
            if machine.lost:
                return
            machine.lost = True
            self.traffic.lost += 1
        about = machine.about
        _LOG.error(
            "machine %d, process %d on %s, is lost: %s",
            machine.seat,
            about.process,
            about.host,
            why,
        )
        with suppress(Exception):
            self._ray.kill(machine.handle)
        self._wake.set()

    def _there(self) -> list[_Running]:
        return [seat for seat in self._seats if seat is not None and not seat.lost]

    def _sent(self, request: _Request, waiting: dict[Any, _Request], found: list[Any]) -> bool:
        """Send a request to whom has not failed it yet; False while there is nobody to wait for.

        Where nobody is left, the answer is that the part is lost.
        """
        there = [machine for machine in self._there() if machine not in request.tried]
        if there:
            after = [(machine.seat - request.seat) % self.count for machine in there]
            request.at = there[after.index(min(after))]
            request.ticket = next(self._tickets)
            reply = request.at.handle.ask.remote(request.ticket, request.part, request.data)
            waiting[reply] = request
            request.sent = time.monotonic()
            with self._lock:
                self.traffic.requests += 1
                self.traffic.sent += request.size
                self.traffic.moved += request.at.seat != request.seat
            return True
        now = time.monotonic()
        request.until = request.until or now + self._patience.replaced
        if now < request.until and len(self._there()) < self.count:
            time.sleep(_LOOK_S)
            return False
        why = request.refused or DataLossError(
            f"none of {self.count} machines is there for rows of {request.part.path}; see the "
            "server's log, and Ray's",
            reason="OUT_OF_REACH",
        )
        found[request.place] = Lost(why)
        return True

    def _take(
        self, waiting: dict[Any, _Request], standing: list[_Request], found: list[Any]
    ) -> None:
        """Take the replies that have come; what failed is to be sent again."""
        if not waiting:
            return
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_LOOK_S)
        for reply in ready:
            request = waiting.pop(reply)
            machine = request.at
            assert machine is not None
            try:
                data = self._ray.get(reply)
            except self._ray.exceptions.RayActorError as error:
                self._give_up(machine, str(error).strip().splitlines()[0])
                standing.append(request)
                continue
            with self._lock:
                self.traffic.received += len(data)
                seconds = self.traffic.seconds
                took = time.monotonic() - request.sent
                seconds[machine.seat] = seconds.get(machine.seat, 0.0) + took
            result = unpacked(data)
            if not isinstance(result, Refused):
                found[request.place] = result
            elif _has_not(result):
                request.refused = request.refused or result.error()
                request.tried = (*request.tried, machine)
                standing.append(request)
            else:
                raise result.error()

    def _shared(self, data: bytes) -> Any:
        """Large requests travel by the object store: once to each node."""
        return self._ray.put(data) if len(data) > _SHARED_BYTES else data

    def _about(self, handle: Any) -> Any:
        return handle.about.options(concurrency_group="control").remote()

    def _tell(self, machine: _Running | None, method: str, argument: Any) -> None:
        if machine is None or machine.lost:
            return
        with suppress(Exception):
            told = getattr(machine.handle, method).options(concurrency_group="control")
            told.remote(argument)


def _has_not(refused: Refused) -> bool:
    """Whether another machine may do what this one refused: it has not the files, or not whole."""
    if issubclass(refused.kind, DataLossError):
        return True
    return refused.opening and not issubclass(refused.kind, CancelledError)
