"""How questions are asked, free of any transport: steps that say what to send, and what it means.

Steps are a generator: it yields `Send` and is given the response (or has the error thrown in), or
yields `Pause`; it returns the result. The clients only drive it, blocking or in an event loop, so
that batches, limits, retries, the deadline and decoding are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from dualform.client._answers import (
    WeightsReader,
    explanations_of,
    payloads_of,
    read,
    sums_of,
)
from dualform.client._arrays import int64
from dualform.client._between import REQUEST_TOO_LARGE
from dualform.client._filters import where_of
from dualform.client._info import (
    IndexInfo,
    IndexSummary,
    ServerLimits,
    index_of,
    limits_of,
    summaries_of,
)
from dualform.client._joining import Result, join, join_explanations
from dualform.client._results import Explanation, SumsResult
from dualform.client._retry import Deadline, Retry, may_help
from dualform.client.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    bad_answer,
)
from dualform.questions import (
    ExamplesQuestion,
    ExplainQuestion,
    IndexesQuestion,
    IndexQuestion,
    Question,
    RowsQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
    message_of,
)
from dualform.v1 import attribution_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """Send a message (or ask a question), and come back with the response.

    Attributes:
        request: What to send.
        timeout: Seconds.
        parts: The response comes in parts: come back with an iterator over them, once the first one
            is there.
    """

    request: Any
    timeout: float | None
    parts: bool = False


@dataclass(frozen=True)
class Pause:
    """Come back after so many seconds."""

    seconds: float


Steps = Generator[Send | Pause, Any, T]

# The words for an answer, or a request, that a smaller batch would make fit.
_TOO_LARGE = ("ANSWER_TOO_LARGE", REQUEST_TOO_LARGE)
# Far more than a plot can show, and few enough for any message.
MAX_BINS = 100_000
# Beside the queries a request holds names and a tensor's header.
_HEADER_BYTES = 256


class Asking:
    """Makes steps of questions; remembers the server's limits.

    Args:
        retry, timeout: Those of `Client`.
        local: Whether questions are asked as they are, in this process, or travel as messages.
    """

    def __init__(self, retry: Retry | None, timeout: float | None, *, local: bool = False) -> None:
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidArgumentError(
                f"retry={retry!r} is of type {type(retry).__name__}; a dualform.client.Retry is "
                "needed, or None for no second try",
                field="retry",
            )
        self._local = local
        self._retry = retry or Retry(attempts=1)
        self._timeout = timeout
        self._limits: ServerLimits | None = None

    def indexes(self, timeout: float | None) -> Steps[list[IndexSummary]]:
        """See Client.indexes."""
        deadline = self.deadline(timeout)
        summaries, self._limits = yield from self.send(IndexesQuestion(), deadline, _served)
        return summaries

    def index(self, question: IndexQuestion, timeout: float | None) -> Steps[IndexInfo]:
        """See Client.index."""
        deadline = self.deadline(timeout)
        info, self._limits = yield from self.send(question, deadline, _index)
        return info

    def rows(
        self,
        question: RowsQuestion,
        where: str | pb.Filter | None,
        timeout: float | None,
        reader: Callable[[Any, Any], Result],
    ) -> Steps[Result]:
        """Ask about rows, in as many parts as the server's limits need.

        Args:
            question: With all its queries.
            where: What the user gave as filter, to say where in it a mistake is.
            timeout: Seconds for all parts.
            reader: Makes a result of a response, and the question that it answers.
        """
        deadline = self.deadline(timeout)
        matrix = question.queries
        limits = yield from self.known_limits(deadline)
        by_query = _by_query(question)
        width = sum(array.shape[1] for array in by_query.values())
        first = {name: array[:1] for name, array in by_query.items()}
        size = _batch_size(_overhead(question, **first), width, limits)
        parts: list[Result] = []
        start = 0
        while start < len(matrix):
            part = {name: array[start : start + size] for name, array in by_query.items()}
            count = len(part["queries"])
            try:
                found = yield from self.send(replace(question, **part), deadline, reader)
            except ResourceExhaustedError as error:
                size = halved(error, count)
            except InvalidArgumentError as error:
                raise located(error, where) from None
            else:
                parts.append(found)
                start += count
        return join(parts)

    def profile(
        self,
        question: SumsQuestion,
        bins: int,
        where: str | pb.Filter | None,
        timeout: float | None,
    ) -> Steps[SumsResult]:
        """Sums over so many equal parts of training; see Client.profile."""
        deadline = self.deadline(timeout)
        count = int64(bins, "bins")
        if not 1 <= count <= MAX_BINS:
            raise InvalidArgumentError(
                f"bins={count}; from 1 to {MAX_BINS:,} equal parts of training are possible, and "
                "sums(…, group_by='step', bins=[…]) takes edges of your own",
                field="bins",
            )
        about = IndexQuestion(index=question.index)
        steps = (yield from self.index(about, deadline.remaining())).steps
        edges = np.linspace(0, max(steps, 1), count + 1).tolist()
        whole = replace(question, bins=tuple(edges))
        return (yield from self.rows(whole, where, deadline.remaining(), sums_of))

    def explain(
        self, question: ExplainQuestion, where: str | pb.Filter | None, timeout: float | None
    ) -> Steps[dict[str, Explanation]]:
        """See Client.explain."""
        deadline = self.deadline(timeout)
        left = dict(question.layers)
        limits = yield from self.known_limits(deadline)
        width = sum(queries.shape[1] for queries in left.values())
        first = [(layer, queries[:1]) for layer, queries in left.items()]
        size = _batch_size(_overhead(question, layers=first), width, limits)
        parts: dict[str, list[Explanation]] = {layer: [] for layer in left}
        while left:
            batch = tuple((layer, queries[:size]) for layer, queries in left.items())
            try:
                found = yield from self.send(
                    replace(question, layers=batch), deadline, explanations_of
                )
            except ResourceExhaustedError as error:
                size = halved(error, min(size, max(map(len, left.values()))))
                continue
            except InvalidArgumentError as error:
                raise located(error, where) from None
            for layer, of_layer in zip(left, found, strict=True):
                parts[layer].append(of_layer)
            left = {name: queries[size:] for name, queries in left.items() if len(queries) > size}
        return {layer: join_explanations(found) for layer, found in parts.items()}

    def stream_weights(
        self, question: StreamWeightsQuestion, timeout: float | None
    ) -> Steps[tuple[Any, WeightsReader]]:
        """See Client.stream_weights: the parts, and who reads them."""
        deadline = self.deadline(timeout)
        # How many rows there are: neither an end that comes early, nor one that never comes, passes
        # for a whole answer.
        info = yield from self.index(IndexQuestion(index=question.index), deadline.remaining())
        layer = info.layers.get(question.layer)
        rows = None if layer is None else layer.rows
        parts = yield from self.send(question, deadline, lambda parts, _: parts, parts=True)
        return parts, WeightsReader(question, rows, info.version)

    def examples(
        self, ids: Iterable[object], index: str | None, timeout: float | None
    ) -> Steps[list[bytes | str | None]]:
        """See Client.examples."""
        deadline = self.deadline(timeout)
        # Padding has no id, and what has no id has no payload.
        given = list(_flat(ids))
        some = tuple(entry for entry in given if entry is not None)
        if not some:
            return [None] * len(given)
        question = ExamplesQuestion(some, index=index)  # type: ignore[arg-type]
        limits = yield from self.known_limits(deadline)
        payloads: list[bytes | str | None] = []
        whole = message_of(question).ByteSize()
        room = max(0, limits.max_message_bytes - _HEADER_BYTES)
        size = max(1, min(limits.max_queries, len(some) * room // whole))
        while len(payloads) < len(some):
            part = question.ids[len(payloads) : len(payloads) + size]
            try:
                payloads += yield from self.send(replace(question, ids=part), deadline, payloads_of)
            except ResourceExhaustedError as error:
                size = halved(error, len(part))
        found = iter(payloads)
        return [None if entry is None else next(found) for entry in given]

    def known_limits(self, deadline: Deadline) -> Steps[ServerLimits]:
        if self._limits is None:
            _, self._limits = yield from self.send(IndexesQuestion(), deadline, _served)
        return self._limits

    def send(
        self,
        question: Question,
        deadline: Deadline,
        reader: Callable[[Any, Any], T],
        parts: bool = False,
    ) -> Steps[T]:
        """Ask until there is an answer, or no hope for one; what `reader` makes of it."""
        request: Any = question if self._local else message_of(question)
        pauses = self._retry.pauses()
        tries = 0
        while True:
            tries += 1
            left = deadline.remaining()
            try:
                response = yield Send(request, left, parts)
                return read(reader, response, question)
            except DeadlineExceededError as error:
                if error.reason == error.code:  # no proxy's, nor a server's
                    error.args = (f"{error}{deadline.of_which(left)}",)
                raise
            except (UnavailableError, ResourceExhaustedError) as error:
                pause = next(pauses, None) if may_help(error) else None
                if pause is not None:
                    pause += error.retry_after or 0.0
                if error.reason == REQUEST_TOO_LARGE and self._limits is not None:
                    # What stands between takes less than the server: from here on, so do we.
                    fits = max(1, request.ByteSize() // 2)
                    self._limits = replace(self._limits, max_message_bytes=fits)
                if pause is None or not deadline.allows(pause):
                    if tries == 1:
                        raise
                    error.args = (f"{error} ({tries} tries)",)
                    raise
            yield Pause(pause)

    def deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)


def _by_query(question: RowsQuestion) -> dict[str, Any]:
    """What has a row for each query: the queries, and the directions where there are any."""
    found: dict[str, Any] = {"queries": question.queries}
    if isinstance(question, (TopKQuestion, TopGroupsQuestion)) and question.direction is not None:
        found["direction"] = question.direction
    return found


def _flat(ids: Iterable[object]) -> Iterable[object]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidArgumentError(
            f"ids={ids!r}: a list or one-dimensional array of ids is needed, such as [{ids!r}]",
            field="ids",
        )
    shape = tuple(getattr(ids, "shape", (1,)))
    if len(shape) != 1:
        raise InvalidArgumentError(
            f"ids have shape {list(shape)}; pass ids.ravel(), and payloads come back in its order",
            field="ids",
        )
    # Arrays, tensors and pandas' columns alike: Python scalars.
    return ids.tolist() if hasattr(ids, "tolist") else ids


def _served(response: pb.ListIndexesResponse, _: object) -> tuple[list[IndexSummary], ServerLimits]:
    return summaries_of(response), limits_of(response.limits)


def _index(
    response: pb.GetIndexResponse, question: IndexQuestion
) -> tuple[IndexInfo, ServerLimits]:
    if not response.HasField("index") or question.index not in (None, response.index.name):
        raise bad_answer(f"about index {response.index.name!r}, not {question.index!r}")
    return index_of(response.index), limits_of(response.limits)


def located(error: InvalidArgumentError, where: str | pb.Filter | None) -> InvalidArgumentError:
    """The error, with the place in the filter's text that it speaks of."""
    return where_of(where).located(error) if error.field == "where" else error


def _overhead(question: Question, **one_query: Any) -> int:
    """Bytes of a request without its queries."""
    return int(message_of(replace(question, **one_query)).ByteSize()) + _HEADER_BYTES


def _batch_size(overhead: int, width: int, limits: ServerLimits) -> int:
    """How many queries of so many numbers one request holds."""
    row_bytes = max(1, width * 4)
    return max(1, min(limits.max_queries, (limits.max_message_bytes - overhead) // row_bytes))


def halved(error: ResourceExhaustedError, size: int) -> int:
    """A batch of half the size, where that can help; otherwise the error goes on."""
    if error.reason not in _TOO_LARGE or size < 2:
        raise error
    return size // 2
