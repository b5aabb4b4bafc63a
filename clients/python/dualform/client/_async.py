"""The asyncio client: the methods of `Client`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dualform.client._arrays import query_matrices, query_matrix
from dualform.client._asking import Asking, Pause, Steps
from dualform.client._calls import checked_calls
from dualform.client._connection import Tls, connection_of
from dualform.client._filters import filter_of
from dualform.client._info import IndexInfo, IndexSummary
from dualform.client._local import AsyncLocalTransport
from dualform.client._results import (
    DualOutputResult,
    Explanation,
    SumsResult,
    TopKResult,
    WeightsChunk,
    dual_output_of,
    sums_of,
    top_k_of,
    weights_of,
)
from dualform.client._retry import DEFAULT_RETRY, Retry
from dualform.client._transport import AsyncGrpcTransport, AsyncTransport
from dualform.client.errors import DualformError, FailedPreconditionError
from dualform.questions import (
    ExplainQuestion,
    IndexQuestion,
    OutputQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopKQuestion,
)
from dualform.questions.questions import (
    Order,
    OutputStrategy,
    RankBy,
    SumsStrategy,
    TopKStrategy,
)
from dualform.v1.attribution_pb2 import Filter

T = TypeVar("T")


@checked_calls
class AsyncClient:
    """`Client` for asyncio: same arguments, same answers, same errors.

    May be used from any number of event loops, one after the other or in several threads: each gets
    a connection of its own.

    Args:
        server, tls, certificate, key, token, retry, timeout: As for `Client`.

    Example:
        >>> async with AsyncClient("localhost:50051") as client:
        ...     hits = await client.top_k("0", queries, k=10)
    """

    _closed: bool

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
        cls, path: str | Path, *, device: str = "auto", timeout: float | None = None
    ) -> AsyncClient:
        """As `Client.local`; scans run in threads, the loop stays free."""
        client = cls.__new__(cls)
        client._start(AsyncLocalTransport(path, device), Asking(None, timeout, local=True))
        return client

    async def indexes(self, *, timeout: float | None = None) -> list[IndexSummary]:
        """As `Client.indexes`."""
        return await self._run(self._asking.indexes(timeout))

    async def index(self, name: str | None = None, *, timeout: float | None = None) -> IndexInfo:
        """As `Client.index`."""
        return await self._run(self._asking.index(IndexQuestion(index=name), timeout))

    async def top_k(
        self,
        layer: str,
        queries: object,
        *,
        k: int = 10,
        where: str | Filter | None = None,
        group_by: str | None = None,
        order: Order = "largest",
        rank_by: RankBy = "weight",
        unit: int | None = None,
        at_step: int | None = None,
        distinct: str | None = None,
        max_residual: float | None = None,
        strategy: TopKStrategy = "auto",
        explain_plan: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> TopKResult:
        """As `Client.top_k`."""
        question = TopKQuestion(
            layer=layer,
            queries=query_matrix(queries),
            k=k,
            where=filter_of(where),
            group_by=group_by,
            order=order,
            rank_by=rank_by,
            unit=unit,
            at_step=at_step,
            distinct=distinct,
            max_residual=max_residual,
            strategy=strategy,
            explain_plan=explain_plan,
            index=index,
        )
        return await self._run(self._asking.rows(question, where, timeout, top_k_of))

    async def sums(
        self,
        layer: str,
        queries: object,
        *,
        group_by: str,
        absolute: bool = False,
        where: str | Filter | None = None,
        bins: Iterable[float] | None = None,
        strategy: SumsStrategy = "auto",
        explain_plan: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> SumsResult:
        """As `Client.sums`."""
        question = SumsQuestion(
            layer=layer,
            queries=query_matrix(queries),
            group_by=group_by,
            absolute=absolute,
            where=filter_of(where),
            bins=bins,  # type: ignore[arg-type]
            strategy=strategy,
            explain_plan=explain_plan,
            index=index,
        )
        return await self._run(self._asking.rows(question, where, timeout, sums_of))

    async def profile(
        self,
        layer: str,
        queries: object,
        *,
        bins: int = 50,
        absolute: bool = False,
        where: str | Filter | None = None,
        index: str | None = None,
        timeout: float | None = None,
    ) -> SumsResult:
        """As `Client.profile`."""
        question = SumsQuestion(
            layer=layer,
            queries=query_matrix(queries),
            group_by="step",
            absolute=absolute,
            where=filter_of(where),
            index=index,
        )
        return await self._run(self._asking.profile(question, bins, where, timeout))

    async def dual_output(
        self,
        layer: str,
        queries: object,
        *,
        where: str | Filter | None = None,
        at_step: int | None = None,
        group_by: str | None = None,
        max_residual: float | None = None,
        strategy: OutputStrategy = "auto",
        explain_plan: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> DualOutputResult:
        """As `Client.dual_output`."""
        question = OutputQuestion(
            layer=layer,
            queries=query_matrix(queries),
            where=filter_of(where),
            at_step=at_step,
            group_by=group_by,
            max_residual=max_residual,
            strategy=strategy,
            explain_plan=explain_plan,
            index=index,
        )
        return await self._run(self._asking.rows(question, where, timeout, dual_output_of))

    async def explain(
        self,
        queries: Mapping[str, object],
        *,
        k: int | None = 10,
        order: Order = "largest",
        where: str | Filter | None = None,
        group_by: str | None = None,
        absolute: bool = False,
        output: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Explanation]:
        """As `Client.explain`."""
        question = ExplainQuestion(
            layers=query_matrices(queries),
            k=k,
            order=order,
            where=filter_of(where),
            group_by=group_by,
            absolute=absolute,
            output=output,
            index=index,
        )
        return await self._run(self._asking.explain(question, where, timeout))

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
        steps = self._asking.stream_weights(question, timeout)

        async def chunks() -> AsyncIterator[WeightsChunk]:
            messages = await self._run(steps, self._opened)
            async with aclosing(messages):
                async for message in messages:
                    yield weights_of(message)

        return chunks()

    async def examples(
        self, ids: Iterable[object], *, index: str | None = None, timeout: float | None = None
    ) -> list[bytes | str | None]:
        """As `Client.examples`."""
        return await self._run(self._asking.examples(ids, index, timeout))

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

    def _start(self, transport: AsyncTransport, asking: Asking) -> None:
        self._transport = transport
        self._asking = asking
        self._closed = False

    async def _opened(self, request: Any, timeout: float | None) -> AsyncGenerator[Any, None]:
        """As `Client._opened`."""
        messages = self._transport.stream(request, timeout)
        first = await anext(messages, None)

        async def all_of_them() -> AsyncGenerator[Any, None]:
            async with aclosing(messages):
                if first is not None:
                    yield first
                    async for message in messages:
                        yield message

        return all_of_them()

    async def _run(
        self, steps: Steps[T], call: Callable[[Any, float | None], Awaitable[Any]] | None = None
    ) -> T:
        if self._closed:
            raise FailedPreconditionError("this client is closed; make a new one", reason="CLOSED")
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    response = await (call or self._transport.call)(step.request, step.timeout)
                except DualformError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as done:
            result: T = done.value
            return result
