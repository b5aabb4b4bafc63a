"""What the clients do with the steps of `_asking`: take them, blocking or in an event loop."""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing, suppress
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from dualform.client._answers import WeightsReader
from dualform.client._asking import Asking, Pause, Steps
from dualform.client._results import WeightsChunk
from dualform.client._transport import AsyncTransport, Transport
from dualform.client.errors import CallError, DualformError, FailedPreconditionError

T = TypeVar("T")
_OPEN: WeakSet[Generator[Any, None, None]] = WeakSet()


class _Unpicklable:
    """What holds connections or maps, which belong to their process."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise CallError(
            f"{name} can be neither pickled nor copied: its connection, or the index that it has "
            f"open, belongs to this process; make one where it is needed, in each worker"
        )


class Driver(_Unpicklable):
    """Takes steps one after the other, and blocks meanwhile."""

    def _start(self, transport: Transport, asking: Asking) -> None:
        self._transport = transport
        self._asking = asking
        self._closed = False

    def _stream(self, steps: Steps[tuple[Any, WeightsReader]]) -> Iterator[WeightsChunk]:
        messages, reader = self._run(steps)
        with closing(messages):
            for message in messages:
                yield reader(message)
        reader.end()

    def _opened(self, request: Any, timeout: float | None) -> Generator[Any, None, None]:
        """An answer in parts whose first part is there, so that it can still be asked again."""
        messages = self._transport.stream(request, timeout)
        first = next(messages, None)

        def all_of_them() -> Generator[Any, None, None]:
            with closing(messages):
                if first is not None:
                    yield first
                    yield from messages

        parts = all_of_them()
        _OPEN.add(parts)
        return parts

    def _run(self, steps: Steps[T]) -> T:
        _check_open(self._closed)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    ask = self._opened if step.parts else self._transport.call
                    response = ask(step.request, step.timeout)
                except DualformError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as done:
            result: T = done.value
            return result


class AsyncDriver(_Unpicklable):
    """As `Driver`; the loop runs on meanwhile."""

    def _start(self, transport: AsyncTransport, asking: Asking) -> None:
        self._transport = transport
        self._asking = asking
        self._closed = False

    async def _stream(self, steps: Steps[tuple[Any, WeightsReader]]) -> AsyncIterator[WeightsChunk]:
        messages, reader = await self._run(steps)
        async with aclosing(messages):
            async for message in messages:
                yield reader(message)
        reader.end()

    async def _opened(self, request: Any, timeout: float | None) -> AsyncGenerator[Any, None]:
        """As `Driver._opened`."""
        messages = self._transport.stream(request, timeout)
        first = await anext(messages, None)

        async def all_of_them() -> AsyncGenerator[Any, None]:
            async with aclosing(messages):
                if first is not None:
                    yield first
                    async for message in messages:
                        yield message

        return all_of_them()

    async def _run(self, steps: Steps[T]) -> T:
        _check_open(self._closed)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    ask = self._opened if step.parts else self._transport.call
                    response = await ask(step.request, step.timeout)
                except DualformError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as done:
            result: T = done.value
            return result


@atexit.register
def _end_streams() -> None:
    """Give up what is open at the interpreter's end, while gRPC still has what that takes."""
    for parts in list(_OPEN):
        with suppress(ValueError):  # a thread takes it just now
            parts.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_OPEN.clear)  # they are the parent's


def _check_open(closed: bool) -> None:
    if closed:
        raise FailedPreconditionError("this client is closed; make a new one", reason="CLOSED")
