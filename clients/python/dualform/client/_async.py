"""The asyncio client: the methods of `Client`, awaited."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from dualform.client._arrays import query_matrix
from dualform.client._asking import Asking
from dualform.client._calls import checked_calls
from dualform.client._connection import Tls, connection_of
from dualform.client._driving import AsyncDriver
from dualform.client._local import AsyncLocalTransport
from dualform.client._results import WeightsChunk
from dualform.client._retry import DEFAULT_RETRY, Retry
from dualform.client._sync import Client
from dualform.client._transport import AsyncGrpcTransport
from dualform.questions import StreamWeightsQuestion
from dualform.questions.placement import GPU_MEMORY

P = ParamSpec("P")
T = TypeVar("T")


def awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The same method of `AsyncClient`: its parameters, types and docstring are written once.

    For methods that end in `return self._run(steps)`, which here gives what is to be awaited.
    """
    function: Callable[..., Any] = inspect.unwrap(method)

    @functools.wraps(function)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await function(self, *args, **kwargs)
        return result

    call.__qualname__ = f"AsyncClient.{function.__name__}"
    return call


@checked_calls
class AsyncClient(AsyncDriver):
    """`Client` for asyncio: same arguments, same answers, same errors.

    May be used from any number of event loops, one after the other or in several threads: each gets
    a connection of its own.

    It is made of what a `Client` is made of.

    Example:
        >>> async with AsyncClient("localhost:50051") as client:
        ...     hits = await client.top_k("0", queries, k=10)
    """

    def __init__(
        self,
        server: str,
        *,
        tls: Tls = False,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        token: str | None = None,
        retry: Retry | None = DEFAULT_RETRY,
        timeout: float | None = 60.0,
    ) -> None:
        connection = connection_of(server, tls, certificate, key, token)
        self._start(AsyncGrpcTransport(connection), Asking(retry, timeout))

    @classmethod
    def local(
        cls,
        path: str | Path,
        *,
        device: str | Sequence[str] = "auto",
        gpu_memory: float | str = GPU_MEMORY,
        timeout: float | None = None,
    ) -> AsyncClient:
        """As `Client.local`; scans run in threads, the loop stays free."""
        client = cls.__new__(cls)
        client._start(
            AsyncLocalTransport(path, device, gpu_memory), Asking(None, timeout, local=True)
        )
        return client

    indexes = awaited(Client.indexes)
    index = awaited(Client.index)
    top_k = awaited(Client.top_k)
    top_groups = awaited(Client.top_groups)
    attribute = awaited(Client.attribute)
    scores = awaited(Client.scores)
    attribute_text = awaited(Client.attribute_text)
    self_influence = awaited(Client.self_influence)
    sums = awaited(Client.sums)
    profile = awaited(Client.profile)
    dual_output = awaited(Client.dual_output)
    explain = awaited(Client.explain)
    examples = awaited(Client.examples)

    def stream_weights(
        self,
        layer: str,
        queries: object,
        *,
        index: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[WeightsChunk]:
        """As `Client.stream_weights`; take the chunks with `async for`."""
        question = StreamWeightsQuestion(layer, query_matrix(queries), index=index)
        return self._stream(self._asking.stream_weights(question, timeout))

    async def close(self) -> None:
        """Gives back the connection or the opened index; may be called twice."""
        if self._closed:
            return
        self._closed = True
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
