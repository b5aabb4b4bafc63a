"""What bounds the bytes of requests in memory: messages are read one after the other, and counted.

gRPC reads a unary request whole before its handler runs, whatever waits already. So handlers here
take a stream of one message, the same on the wire, and read it themselves: once it is their turn,
and no more at a time than a budget allows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from dualform.engine.errors import ResourceExhaustedError
from dualform.serve.budget import MemoryBudget
from dualform.serve.memory import heap
from dualform.serve.status import Refusal, busy
from dualform.serve.waiting import within

AT_ONCE = 4
"""Messages that are read at a time; each may turn out to be as large as allowed."""
OF_ONE_CONNECTION = 2
"""Of these, messages of one connection: a slow client leaves places to others."""
SMALL = 1 << 20
"""Messages up to here are bounded by the queue's length, and need no place in the budget."""
PATIENCE_S = 60.0
"""A message must be whole after this long."""


def compression(version: str) -> list[tuple[str, int]]:
    """Options by which a server of this grpcio takes no compressed messages where it must not.

    Before 1.84 gRPC expands them whole, and then holds them against the limit: of zeros, 60 MiB are
    60 GiB.
    """
    held_while_expanding = tuple(map(int, version.split(".")[:2])) >= (1, 84)
    return [] if held_while_expanding else [("grpc.compression_enabled_algorithms_bitset", 1)]


class RequestReader:
    """Reads requests within a budget of bytes. Belongs to one event loop.

    Args:
        budget: Bytes of requests above 1 MiB that may be in memory, waiting or worked on.
        patience: Seconds after which a message must be whole.
        memory: What these bytes count against; None for nothing.
    """

    def __init__(
        self, budget: int, patience: float = PATIENCE_S, memory: MemoryBudget | None = None
    ) -> None:
        self._budget = budget
        self._memory = memory or MemoryBudget(None)
        self._patience = patience
        self._held = 0
        self._streamed: Counter[str] = Counter()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._connections: Counter[str] = Counter()
        self._turn = asyncio.Condition()

    @property
    def held(self) -> int:
        """Bytes of requests above 1 MiB in memory."""
        return self._held

    @asynccontextmanager
    async def read(self, context: Any, stream: str | None = None) -> AsyncIterator[bytes | Refusal]:
        """The request's bytes, counted until the block ends, or why there are none.

        Args:
            context: gRPC's, of a handler that takes a stream.
            stream: The client to whom an answer in parts will go, which lasts as long as it reads.
                Such requests hold at most half of the budget, and one client's half of that; None
                for an answer that is one message.
        """
        data = await self._received(context)
        size = len(data) if isinstance(data, bytes) and len(data) > SMALL else 0
        large = bool(size)
        full = self._full(size, stream)
        if full is not None:
            data, size = full, 0
        # As it came, and decoded.
        taken = 2 * size
        try:
            self._memory.take(taken)
        except ResourceExhaustedError as error:
            data, size, taken = Refusal.of(error), 0, 0
        self._held += size
        if stream is not None:
            self._streamed[stream] += size
        try:
            yield data
        finally:
            self._held -= size
            if stream is not None:
                self._streamed[stream] -= size
                if not self._streamed[stream]:
                    del self._streamed[stream]
            self._memory.give(taken)
            if large:  # nobody waits for it, and where no scan ran nobody else does it
                with suppress(RuntimeError):  # the system has no thread left
                    asyncio.get_running_loop().run_in_executor(None, heap.give_back)

    def _full(self, size: int, stream: str | None) -> Refusal | None:
        """The refusal of a request that has no room; one always has it."""
        limits = [(self._held, self._budget, "requests")]
        if stream is not None:
            streamed, mine = self._streamed.total(), self._streamed[stream]
            limits.append((streamed, self._budget // 2, "requests whose answers are streams"))
            limits.append((mine, self._budget // 4, "this client's requests for streams"))
        for held, most, what in limits:
            if held and size and held + size > most:
                return busy(
                    f"{what} of {held >> 20} MiB are in memory, of {most >> 20} allowed "
                    "(limits.waiting_mib)"
                )
        return None

    async def _received(self, context: Any) -> bytes | Refusal:
        connection = context.peer()
        async with self._turn:
            await self._turn.wait_for(lambda: self._connections[connection] < OF_ONE_CONNECTION)
            self._connections[connection] += 1
        try:
            async with self._places:
                data = await within(self._patience, context.read())
        except TimeoutError:
            return Refusal(
                "DEADLINE_EXCEEDED",
                f"the request was not whole after {self._patience:g} s; send less at a time",
                "SLOW_REQUEST",
            )
        finally:
            self._connections[connection] -= 1
            if not self._connections[connection]:
                del self._connections[connection]
            async with self._turn:
                self._turn.notify_all()
        if data is grpc.aio.EOF:
            return Refusal("INVALID_ARGUMENT", "the call holds no message", "UNREADABLE")
        return bytes(data)
