"""What a machine does when it is asked: it opens its part of an index, and computes with it.

Requests and replies are bytes, so that they can be counted. A request says which part it is about
and carries a function of that part, by its name in this package: a new question needs nothing here.
Only those who may run programs on the machines may talk to them: that is Ray's rule, and requests
are as trusted as Ray's own.
"""

from __future__ import annotations

import os
import pickle
import platform
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dualform import __version__

if TYPE_CHECKING:
    from dualform.engine.api.index import Index
    from dualform.engine.errors import EngineError
    from dualform.machines.parts import Part

_MOST_STOPPED = 1024


class Budget(Protocol):
    """Admits what takes memory; see `dualform.serve.budget`."""

    def lease(self) -> AbstractContextManager[None]:
        """What is taken meanwhile is given back."""

    def take(self, size: int) -> None:
        """Promise so many bytes, or raise ResourceExhaustedError."""


@dataclass(frozen=True)
class Settings:
    """How a machine's process is set up.

    Attributes:
        prepare: Called before torch is imported, with how many machines share the cores.
        budget: Makes its memory budget; None for no limit.
    """

    prepare: Callable[[int], None] | None = None
    budget: Callable[[], Budget] | None = None


@dataclass(frozen=True)
class About:
    """Who a machine is.

    Attributes:
        process: Its process id.
        host: What its system calls itself.
        version: Of dualform.
        gpus: The numbers of those that Ray lets it see, as CUDA_VISIBLE_DEVICES has them.
    """

    process: int
    host: str
    version: str
    gpus: str = ""


@dataclass(frozen=True)
class Refused:
    """An EngineError as plain values: exceptions keep frames, and do not travel well.

    Attributes:
        kind: The error's class.
        message, field, reason, retry_after: As the error has them.
        opening: The part could not even be opened.
    """

    kind: type[EngineError]
    message: str
    field: str | None
    reason: str
    retry_after: float | None
    opening: bool

    @classmethod
    def of(cls, error: EngineError, *, opening: bool = False) -> Refused:
        """Of an error."""
        return cls(type(error), str(error), error.field, error.reason, error.retry_after, opening)

    def error(self) -> EngineError:
        """The error again."""
        return self.kind(
            self.message, field=self.field, reason=self.reason, retry_after=self.retry_after
        )


@dataclass(frozen=True)
class Here:
    """What a function that is asked of a part works with.

    Attributes:
        index: The part, opened.
        stop: True once nobody waits for the reply.
        take: Admits so many bytes of memory, or raises ResourceExhaustedError.
    """

    index: Index
    stop: Callable[[], bool]
    take: Callable[[int], None]


@dataclass(frozen=True)
class Each:
    """An argument that is another one for each part.

    Attributes:
        values: In the order of the parts.
    """

    values: Sequence[Any]


def of_each(arguments: Sequence[Any], parts: int) -> list[tuple[Any, ...]] | None:
    """The arguments of each of so many parts; None where they are the same to all."""
    if not any(isinstance(each, Each) for each in arguments):
        return None
    return [
        tuple(each.values[part] if isinstance(each, Each) else each for each in arguments)
        for part in range(parts)
    ]


def packed(function: Callable[..., Any], *arguments: Any) -> bytes:
    """A request: call `function(here, *arguments)`."""
    return pickle.dumps((function, arguments), protocol=5)


def unpacked(reply: bytes) -> Any:
    """What a request came to: what the function returned, or Refused."""
    return pickle.loads(reply)


class Machine:
    """Answers about the parts that it is asked about, in threads that others choose.

    Args:
        settings: How this process is set up.
        sharing: How many machines share the cores that it may use.
    """

    def __init__(self, settings: Settings, sharing: int) -> None:
        if settings.prepare is not None:
            settings.prepare(sharing)
        self._budget = None if settings.budget is None else settings.budget()
        self._lock = threading.Lock()
        self._opening: dict[Part, threading.Lock] = {}
        self._open: dict[Part, Index] = {}
        self._stops: OrderedDict[int, threading.Event] = OrderedDict()

    def about(self) -> About:
        """Who this is; also shows that it is there."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return About(os.getpid(), platform.node(), __version__, gpus)

    def ask(self, ticket: int, part: Part, request: bytes) -> bytes:
        """Do what a request says.

        Args:
            ticket: A number by which `stop` can end it.
            part: About which; it is opened where it is not.
            request: As `packed` makes it.

        Returns:
            A reply for `unpacked`.
        """
        from dualform.engine.errors import DataLossError, EngineError
        from dualform.engine.messages.opening import errors_translated

        function, arguments = pickle.loads(request)
        opened = False
        try:
            with self._stoppable(ticket) as stop, errors_translated():
                index = self._index(part)
                opened = True
                budget = self._budget
                with nullcontext() if budget is None else budget.lease():
                    found = function(Here(index, stop, self._take), *arguments)
        except EngineError as error:
            if isinstance(error, DataLossError):
                self.forget(part)  # another look at the files, when asked again
            found = Refused.of(error, opening=not opened)
        return pickle.dumps(found, protocol=5)

    def stop(self, ticket: int) -> None:
        """Nobody waits for the reply to this request any more."""
        self._event(ticket).set()

    def forget(self, part: Part) -> None:
        """Close a part; what is being computed with it ends first."""
        with self._lock:
            self._open.pop(part, None)
            self._opening.pop(part, None)

    def _take(self, size: int) -> None:
        if self._budget is not None:
            self._budget.take(size)

    def _index(self, part: Part) -> Index:
        with self._lock:
            opening = self._opening.setdefault(part, threading.Lock())
        with opening:
            with self._lock:
                index = self._open.get(part)
            if index is None:
                index = part.open()
                with self._lock:
                    self._open[part] = index
            return index

    @contextmanager
    def _stoppable(self, ticket: int) -> Iterator[Callable[[], bool]]:
        event = self._event(ticket)
        try:
            yield event.is_set
        finally:
            with self._lock:
                self._stops.pop(ticket, None)

    def _event(self, ticket: int) -> threading.Event:
        """Also of a request that has not come yet, or has been done; the oldest are forgotten."""
        with self._lock:
            while len(self._stops) >= _MOST_STOPPED:
                self._stops.popitem(last=False)
            return self._stops.setdefault(ticket, threading.Event())
