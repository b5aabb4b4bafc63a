"""The questions, free of any transport: plans that say what to send and make an answer of it.

A plan is a generator: it yields `Send` and is given the response (or has the error thrown in), or
yields `Pause`; it returns the result. The clients only drive it, blocking or in an event loop, so
that batches, limits, retries, the deadline and decoding are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.client._arrays import flag, int64, query_matrix, tensor_of, text, values_of
from dualform.client._filters import Where, where_of
from dualform.client._info import (
    IndexInfo,
    IndexSummary,
    ServerLimits,
    index_of,
    limits_of,
    summary_of,
)
from dualform.client._results import (
    STRATEGIES,
    DualOutputResult,
    Explanation,
    Result,
    SumsResult,
    TopKResult,
    dual_output_of,
    explanations_of,
    join,
    join_explanations,
    sums_of,
    top_k_of,
)
from dualform.client._retry import Deadline, Retry, may_help
from dualform.client.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from dualform.v1 import attribution_pb2 as pb

T = TypeVar("T")
Enum = TypeVar("Enum")


@dataclass(frozen=True)
class Send:
    """Send `request` and come back with the response; `timeout` in seconds."""

    request: Any
    timeout: float | None


@dataclass(frozen=True)
class Pause:
    """Come back after so many seconds."""

    seconds: float


Plan = Generator[Send | Pause, Any, T]

_ORDERS = {
    "largest": pb.ORDER_LARGEST,
    "smallest": pb.ORDER_SMALLEST,
    "absolute": pb.ORDER_ABSOLUTE,
}
_RANKS = {"weight": pb.RANK_BY_WEIGHT, "contribution": pb.RANK_BY_CONTRIBUTION}
# The server's word for an answer that a smaller batch would make fit.
_TOO_LARGE = "ANSWER_TOO_LARGE"
# Far more than a plot can show, and few enough for any message.
MAX_BINS = 100_000
# Beside the queries a request holds names and a tensor's header.
_HEADER_BYTES = 256


class Questions:
    """Makes plans; remembers the server's limits. Arguments are those of `Client`."""

    def __init__(self, retry: Retry | None, timeout: float | None) -> None:
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidArgumentError(
                f"retry={retry!r} is of type {type(retry).__name__}; a dualform.client.Retry is "
                "needed, or None for no second try",
                field="retry",
            )
        self._retry = retry or Retry(attempts=1)
        self._timeout = timeout
        self._limits: ServerLimits | None = None

    def indexes(self, timeout: float | None) -> Plan[list[IndexSummary]]:
        """See Client.indexes."""
        deadline = self._deadline(timeout)
        response = yield from self._send(pb.ListIndexesRequest(), deadline)
        self._limits = limits_of(response.limits)
        return [summary_of(index) for index in response.indexes]

    def index(self, name: str | None, timeout: float | None) -> Plan[IndexInfo]:
        """See Client.index."""
        deadline = self._deadline(timeout)
        request = pb.GetIndexRequest(index=_name(name, "name"))
        response = yield from self._send(request, deadline)
        self._limits = limits_of(response.limits)
        return index_of(response.index)

    def top_k(
        self,
        layer: str,
        queries: object,
        k: int,
        where: str | pb.Filter | None,
        group_by: str | None,
        order: str,
        rank_by: str,
        unit: int | None,
        at_step: int | None,
        distinct: str | None,
        strategy: str,
        explain_plan: bool,
        index: str | None,
        timeout: float | None,
    ) -> Plan[TopKResult]:
        """See Client.top_k."""
        restriction = where_of(where)
        request = pb.TopKRequest(
            index=_name(index, "index"),
            layer=_layer(layer),
            k=int64(k, "k"),
            where=restriction.filter,
            group_by=_name(group_by, "group_by"),
            order=_choice(order, _ORDERS, "order"),
            rank_by=_choice(rank_by, _RANKS, "rank_by"),
            unit=_optional(unit, "unit"),
            at_step=_optional(at_step, "at_step"),
            distinct=_name(distinct, "distinct"),
            strategy=_choice(strategy, STRATEGIES, "strategy"),
            explain_plan=flag(explain_plan, "explain_plan"),
        )
        return (yield from self._batches(request, restriction, queries, timeout, top_k_of))

    def sums(
        self,
        layer: str,
        queries: object,
        group_by: str,
        absolute: bool,
        where: str | pb.Filter | None,
        bins: Iterable[float] | None,
        strategy: str,
        explain_plan: bool,
        index: str | None,
        timeout: float | None,
    ) -> Plan[SumsResult]:
        """See Client.sums."""
        if group_by is None:
            raise InvalidArgumentError(
                "group_by=None: sums need the metadata column to sum over", field="group_by"
            )
        restriction = where_of(where)
        request = pb.SumsRequest(
            index=_name(index, "index"),
            layer=_layer(layer),
            group_by=_name(group_by, "group_by"),
            absolute=flag(absolute, "absolute"),
            where=restriction.filter,
            bins=None if bins is None else _edges(bins),
            strategy=_choice(strategy, STRATEGIES, "strategy"),
            explain_plan=flag(explain_plan, "explain_plan"),
        )
        return (yield from self._batches(request, restriction, queries, timeout, sums_of))

    def profile(
        self,
        layer: str,
        queries: object,
        bins: int,
        absolute: bool,
        where: str | pb.Filter | None,
        index: str | None,
        timeout: float | None,
    ) -> Plan[SumsResult]:
        """See Client.profile."""
        deadline = self._deadline(timeout)
        count = int64(bins, "bins")
        if not 1 <= count <= MAX_BINS:
            raise InvalidArgumentError(
                f"bins={count}; from 1 to {MAX_BINS:,} equal parts of training are possible, and "
                "sums(…, group_by='step', bins=[…]) takes edges of your own",
                field="bins",
            )
        steps = (yield from self.index(index, deadline.remaining())).steps
        edges = np.linspace(0, max(steps, 1), count + 1).tolist()
        found = yield from self.sums(
            layer,
            queries,
            "step",
            absolute,
            where,
            edges,
            "auto",
            False,
            index,
            deadline.remaining(),
        )
        return found

    def dual_output(
        self,
        layer: str,
        queries: object,
        where: str | pb.Filter | None,
        at_step: int | None,
        group_by: str | None,
        strategy: str,
        explain_plan: bool,
        index: str | None,
        timeout: float | None,
    ) -> Plan[DualOutputResult]:
        """See Client.dual_output."""
        restriction = where_of(where)
        request = pb.DualOutputRequest(
            index=_name(index, "index"),
            layer=_layer(layer),
            where=restriction.filter,
            at_step=_optional(at_step, "at_step"),
            group_by=_name(group_by, "group_by"),
            strategy=_choice(strategy, STRATEGIES, "strategy"),
            explain_plan=flag(explain_plan, "explain_plan"),
        )
        return (yield from self._batches(request, restriction, queries, timeout, dual_output_of))

    def explain(
        self,
        queries: Mapping[str, object],
        k: int | None,
        order: str,
        where: str | pb.Filter | None,
        group_by: str | None,
        absolute: bool,
        output: bool,
        index: str | None,
        timeout: float | None,
    ) -> Plan[dict[str, Explanation]]:
        """See Client.explain."""
        deadline = self._deadline(timeout)
        if not isinstance(queries, Mapping):
            raise InvalidArgumentError(
                f"queries are {type(queries).__name__}; explain takes them by layer, such as "
                "capture_queries gives",
                field="queries",
            )
        restriction = where_of(where)
        template = pb.ExplainRequest(
            index=_name(index, "index"),
            where=restriction.filter,
            k=0 if k is None else int64(k, "k"),
            order=_choice(order, _ORDERS, "order"),
            group_by=_name(group_by, "group_by"),
            absolute=flag(absolute, "absolute"),
            output=flag(output, "output"),
        )
        left = {_layer(layer): query_matrix(own) for layer, own in queries.items()}
        limits = yield from self._known_limits(deadline)
        widest = np.empty((0, max(1, sum(own.shape[1] for own in left.values()))), np.float32)
        size = _batch_size(template, widest, limits)
        parts: dict[str, list[Explanation]] = {layer: [] for layer in left}
        # At least once: what an empty request gets is the server's word.
        while left or not any(parts.values()):
            request = pb.ExplainRequest()
            request.CopyFrom(template)
            for layer, own in left.items():
                request.layers.add(layer=layer, queries=tensor_of(own[:size]))
            try:
                response = yield from self._send(request, deadline)
            except ResourceExhaustedError as error:
                size = _halved(error, min(size, max(map(len, left.values()), default=0)))
                continue
            except InvalidArgumentError as error:
                raise (restriction.located(error) if error.field == "where" else error) from None
            for layer, found in zip(left, explanations_of(response), strict=True):
                parts[layer].append(found)
            left = {layer: own[size:] for layer, own in left.items() if len(own) > size}
        return {layer: join_explanations(own) for layer, own in parts.items()}

    def stream_weights(
        self, layer: str, queries: object, index: str | None, timeout: float | None
    ) -> Plan[Any]:
        """See Client.stream_weights: what to send; the response is the driver's business."""
        request = pb.StreamWeightsRequest(
            index=_name(index, "index"),
            layer=_layer(layer),
            queries=tensor_of(query_matrix(queries)),
        )
        return self._send(request, self._deadline(timeout))

    def examples(
        self, ids: Iterable[object], index: str | None, timeout: float | None
    ) -> Plan[list[bytes | str | None]]:
        """See Client.examples."""
        deadline = self._deadline(timeout)
        name = _name(index, "index")
        values = values_of(_flat(ids), "ids")
        asked = [value for value in values if value.WhichOneof("kind")]
        limits = yield from self._known_limits(deadline)
        payloads: list[bytes | str | None] = []
        size = limits.max_queries
        while len(payloads) < len(asked):
            part = asked[len(payloads) : len(payloads) + size]
            request = pb.GetExamplesRequest(index=name, ids=part)
            try:
                response = yield from self._send(request, deadline)
            except ResourceExhaustedError as error:
                size = _halved(error, len(part))
            else:
                payloads.extend(_payload(example) for example in response.examples)
        found = iter(payloads)
        # Padding has no id, and what has no id has no payload.
        return [next(found) if value.WhichOneof("kind") else None for value in values]

    def _batches(
        self,
        template: Any,
        where: Where,
        queries: object,
        timeout: float | None,
        decode: Callable[[Any], Result],
    ) -> Plan[Result]:
        deadline = self._deadline(timeout)
        matrix = query_matrix(queries)
        limits = yield from self._known_limits(deadline)
        size = _batch_size(template, matrix, limits)
        parts: list[Result] = []
        start = 0
        # At least once: what an empty batch gets is the server's word.
        while start < len(matrix) or not parts:
            part = matrix[start : start + size]
            request = type(template)()
            request.CopyFrom(template)
            request.queries.CopyFrom(tensor_of(part))
            try:
                response = yield from self._send(request, deadline)
            except ResourceExhaustedError as error:
                size = _halved(error, len(part))
            except InvalidArgumentError as error:
                raise (where.located(error) if error.field == "where" else error) from None
            else:
                parts.append(decode(response))
                start += len(part)
        return join(parts)

    def _known_limits(self, deadline: Deadline) -> Plan[ServerLimits]:
        if self._limits is None:
            response = yield from self._send(pb.ListIndexesRequest(), deadline)
            self._limits = limits_of(response.limits)
        return self._limits

    def _send(self, request: Any, deadline: Deadline) -> Plan[Any]:
        pauses = self._retry.pauses()
        tries = 0
        while True:
            tries += 1
            try:
                return (yield Send(request, deadline.remaining()))
            except (UnavailableError, ResourceExhaustedError) as error:
                pause = next(pauses, None) if may_help(error) else None
                if pause is not None:
                    pause += error.retry_after or 0.0
                if pause is None or not deadline.allows(pause):
                    if tries == 1:
                        raise
                    raise type(error)(
                        f"{error} ({tries} tries)",
                        reason=error.reason,
                        field=error.field,
                        retry_after=error.retry_after,
                    ) from None
            yield Pause(pause)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)


def _name(value: str | None, field: str) -> str:
    """The wire's empty text for None; an empty text of the user's is a mistake."""
    if value is None:
        return ""
    if not text(value, field):
        raise InvalidArgumentError(f"{field}='' is empty; leave it out or name one", field=field)
    return value


def _choice(value: str, choices: Mapping[str, Enum], field: str) -> Enum:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(
            f"{field}={value!r} is none of {', '.join(map(repr, choices))}", field=field
        )
    return choices[value]


def _edges(bins: Iterable[float]) -> list[float]:
    """Bin edges as floats; what they must be like is the server's word."""
    if isinstance(bins, (str, bytes)) or not isinstance(bins, Iterable):
        raise InvalidArgumentError(
            f"bins={bins!r}: a list of ascending edges is needed, such as [0, 1000, 3000]",
            field="bins",
        )
    try:
        edges = [float(edge) for edge in bins]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"bins hold what is no number ({error})", field="bins") from None
    if len(edges) < 2:
        raise InvalidArgumentError(
            f"bins hold {len(edges)} edges; at least two are needed, such as [0, 1000, 3000]",
            field="bins",
        )
    return edges


def _optional(value: int | None, field: str) -> int | None:
    return None if value is None else int64(value, field)


def _layer(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"layer={value!r} is of type {type(value).__name__}; a name as in "
            f"model.named_modules() is needed, such as {str(value)!r}",
            field="layer",
        )
    return text(value, "layer")


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


def _payload(example: pb.Example) -> bytes | str | None:
    kind = example.WhichOneof("payload")
    payload: bytes | str | None = None if kind is None else getattr(example, kind)
    return payload


def _batch_size(template: Any, matrix: npt.NDArray[np.float32], limits: ServerLimits) -> int:
    overhead: int = template.ByteSize() + _HEADER_BYTES
    row_bytes: int = max(1, matrix.shape[1] * matrix.itemsize)
    room = limits.max_message_bytes - overhead
    return max(1, min(limits.max_queries, room // row_bytes))


def _halved(error: ResourceExhaustedError, size: int) -> int:
    """A batch of half the size, where that can help; otherwise the error goes on."""
    if error.reason != _TOO_LARGE or size < 2:
        raise error
    return size // 2
