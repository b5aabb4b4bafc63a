"""One call from beginning to end: read, answered, or refused with a word on why, and reported.

What is the same for every method is here, whatever it answers; `handlers` holds what differs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from dualform.engine.errors import DataLossError
from dualform.questions.quoted import unicode
from dualform.serve.access import Access, Client, request_id_of
from dualform.serve.budget import MemoryBudget
from dualform.serve.reading import RequestReader
from dualform.serve.scans import Asker
from dualform.serve.status import REQUEST_ID, Refusal, bug, refuse
from dualform.serve.waiting import within

UNREAD_S = 60.0
"""An answer in parts ends where its client takes none for this long."""

_LOG = logging.getLogger("dualform.serve")
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class Call:
    """One call, and what is known of it when it ends.

    Attributes:
        method: The rpc's name.
        request_id: A word that the answer, its errors and the log share.
        client: Who asks.
        asker: Whom its scans are for.
        began: Monotonic seconds.
        facts: What the report tells beside: index, layer, queries, k, rows, strategy, reason.
        code: Canonical, once it has ended.
        received, sent: Bytes of its messages.
    """

    method: str
    request_id: str
    client: Client
    asker: Asker
    began: float
    facts: dict[str, Any] = field(default_factory=dict)
    code: str = "OK"
    received: int = 0
    sent: int = 0


Answer = Callable[[Call, bytes], Awaitable["bytes | Refusal"]]
Parts = Callable[[Call, bytes], AsyncGenerator["bytes | Refusal", None]]


class Calls:
    """Makes gRPC's handlers of functions that answer.

    Args:
        access: Tells who may ask.
        reader: Reads the requests.
        memory: Counts answers until they are sent.
        damage_found: Awaited after an answer failed because of a damaged file.
        ended: Told of every call that ended.
        began: Told of every call that began, by its method.
        unread: Seconds after which a stream ends that its client does not read; UNREAD_S if None.
    """

    def __init__(
        self,
        access: Access,
        reader: RequestReader,
        memory: MemoryBudget,
        damage_found: Callable[[], Awaitable[None]],
        ended: Callable[[Call], None] = lambda call: None,
        unread: float | None = None,
        began: Callable[[str], None] = lambda method: None,
    ) -> None:
        self._access = access
        self._reader = reader
        self._memory = memory
        self._damage_found = damage_found
        self._ended = ended
        self._began = began
        self._unread = UNREAD_S if unread is None else unread

    def unary(self, method: str, answer: Answer) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler of one message in, one out."""

        async def handle(_: Any, context: Context) -> bytes:
            with self._reported(method, context) as call:
                async with self._read(call, context) as data:
                    found = data if isinstance(data, Refusal) else await answer(call, data)
                if isinstance(found, Refusal):
                    await self._refuse(call, found, context)
                    return b""
                context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
                call.sent = len(found)
                # Once more in gRPC, until the client has taken it.
                held = 2 * len(found)
                self._memory.hold(held)
                context.add_done_callback(lambda _: self._memory.give(held))
                return found

        return grpc.stream_unary_rpc_method_handler(handle)

    def stream(self, method: str, parts: Parts) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler of one message in, many out: each computed once those before are taken."""

        async def handle(_: Any, context: Context) -> None:
            with self._reported(method, context) as call:
                async with self._read(call, context, stream=True) as data:
                    refused = data if isinstance(data, Refusal) else None
                    if isinstance(data, bytes):
                        refused = await self._send(call, parts(call, data), context)
                if refused is not None:
                    await self._refuse(call, refused, context)
                else:
                    context.set_trailing_metadata(((REQUEST_ID, call.request_id),))

        return grpc.stream_stream_rpc_method_handler(handle)

    @asynccontextmanager
    async def _read(
        self, call: Call, context: Context, stream: bool = False
    ) -> AsyncGenerator[bytes | Refusal, None]:
        found = self._access.client(context.invocation_metadata())
        if isinstance(found, Refusal):
            yield found  # before anything is read
            return
        call.client = found
        if found.name:
            call.asker.client = f"token {found.name}"
        async with self._reader.read(context, call.asker.client if stream else None) as data:
            call.received = len(data) if isinstance(data, bytes) else 0
            yield data

    async def _send(
        self, call: Call, parts: AsyncGenerator[bytes | Refusal, None], context: Context
    ) -> Refusal | None:
        # Closed at once, also where the call is cancelled between two parts.
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Refusal):
                    return part
                try:
                    await within(self._unread, context.write(part))
                    call.sent += len(part)
                except (grpc.aio.UsageError, grpc.aio.InternalError):
                    # The client has gone, and gRPC has not got round to cancelling this call.
                    call.code = "CANCELLED"
                    return None
                except TimeoutError:
                    return Refusal(
                        "DEADLINE_EXCEEDED",
                        f"the client took no part of the answer for {self._unread:g} s; read on, "
                        "or ask again",
                        "UNREAD_STREAM",
                    )
        return None

    @contextmanager
    def _reported(self, method: str, context: Context) -> Iterator[Call]:
        peer = context.peer()
        request_id = request_id_of(context.invocation_metadata())
        call = Call(method, request_id, Client(), Asker(peer, peer), time.monotonic())
        self._began(method)
        try:
            yield call
        except Exception:
            # gRPC would tell the caller the exception's own words.
            found = bug(method)
            _note(call, found)
            refuse(context, found, request_id)
        except asyncio.CancelledError:
            left = context.time_remaining()
            call.code = "CANCELLED" if left is None or left > 0 else "DEADLINE_EXCEEDED"
            raise
        finally:
            self._ended(call)

    async def _refuse(self, call: Call, refusal: Refusal, context: Context) -> None:
        _note(call, refusal)
        if refusal.code == DataLossError.code:
            _LOG.error("%s met a damaged index: %s", call.method, unicode(refusal.message))
            await self._damage_found()
        refuse(context, refusal, call.request_id)


def _note(call: Call, refusal: Refusal) -> None:
    call.code = refusal.code
    call.facts["reason"] = refusal.reason
    if refusal.ticket is not None:
        call.facts["ticket"] = refusal.ticket
