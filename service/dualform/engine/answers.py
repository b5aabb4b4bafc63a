"""One function per question: a request's fields checked, the index asked, the response built.

What is checked here is what is cheap to check before anything is allocated for the answer: sizes
of tensors, k, filters and ids, and how large the answer would be. The index checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.engine import wire
from dualform.engine.errors import InvalidArgumentError, ResourceExhaustedError
from dualform.engine.index import Index, Layer, Order, RankBy
from dualform.engine.limits import Limits
from dualform.engine.results import Coverage
from dualform.engine.stream import CHUNK_BYTES
from dualform.v1 import attribution_pb2 as pb

Stop = Callable[[], bool]

_PAYLOADS_AT_ONCE = 64
_ORDERS: dict[int, Order] = {
    pb.ORDER_UNSPECIFIED: "largest",
    pb.ORDER_LARGEST: "largest",
    pb.ORDER_SMALLEST: "smallest",
    pb.ORDER_ABSOLUTE: "absolute",
}
_RANKS: dict[int, RankBy] = {
    pb.RANK_BY_UNSPECIFIED: "weight",
    pb.RANK_BY_WEIGHT: "weight",
    pb.RANK_BY_CONTRIBUTION: "contribution",
}


def top_k(
    index: Index, request: pb.TopKRequest, limits: Limits, stop: Stop | None
) -> pb.TopKResponse:
    """Answer TopK."""
    k = request.k
    if k < 1:
        raise InvalidArgumentError(f"k is {k}; it must be at least 1", field="k")
    if k > limits.max_k:
        raise ResourceExhaustedError(
            f"k is {k:,}; at most {limits.max_k:,} rows are returned per query: "
            "ask for fewer, or use sums for totals over all rows",
            field="k",
        )
    if request.order not in _ORDERS:
        raise InvalidArgumentError(
            f"order {int(request.order)} is unknown; allowed are largest, smallest, absolute",
            field="order",
        )
    if request.rank_by not in _RANKS:
        raise InvalidArgumentError(
            f"rank_by {int(request.rank_by)} is unknown; allowed are weight, contribution",
            field="rank_by",
        )
    queries, where = _question(request, limits)
    columns = index.layer(request.layer).columns
    per_row = 12 + sum(wire.COLUMN_BYTES[wire.column_type(kind)] for _, kind in columns)
    if request.distinct:
        per_row += 8
    groups = _group_count(index, request.layer, request.group_by)
    limits.check_answers(len(queries), groups * k * per_row, "with a smaller k")
    found = index.top_k(
        request.layer,
        queries,
        k,
        where=where,
        group_by=request.group_by or None,
        order=_ORDERS[request.order],
        rank_by=_RANKS[request.rank_by],
        unit=request.unit if request.HasField("unit") else None,
        at_step=request.at_step if request.HasField("at_step") else None,
        distinct=request.distinct or None,
        stop=stop,
    )
    return pb.TopKResponse(
        rows=wire.encode_tensor(found.rows),
        scores=wire.encode_tensor(found.scores),
        columns=[wire.encode_column(name, array) for name, array in found.columns.items()],
        groups=_groups(request.group_by, found.groups),
        coverage=_coverage(found.coverage),
        counts=None if found.counts is None else wire.encode_tensor(found.counts),
    )


def sums(
    index: Index, request: pb.SumsRequest, limits: Limits, stop: Stop | None
) -> pb.SumsResponse:
    """Answer Sums."""
    if not request.group_by:
        raise InvalidArgumentError(
            "sums need group_by, the metadata column to sum over", field="group_by"
        )
    queries, where = _question(request, limits)
    groups = _group_count(index, request.layer, request.group_by)
    remedy = "grouped by a column with fewer values"
    if request.bins:
        groups, remedy = len(request.bins), "with fewer bins"
    limits.check_answers(len(queries), groups * 8, remedy)
    found = index.sums(
        request.layer,
        queries,
        request.group_by,
        absolute=request.absolute,
        where=where,
        bins=list(request.bins) or None,
        stop=stop,
    )
    return pb.SumsResponse(
        groups=_groups(request.group_by, found.groups),
        values=wire.encode_tensor(found.values),
        counts=wire.encode_tensor(found.counts),
        coverage=_coverage(found.coverage),
    )


def dual_output(
    index: Index, request: pb.DualOutputRequest, limits: Limits, stop: Stop | None
) -> pb.DualOutputResponse:
    """Answer DualOutput."""
    queries, where = _question(request, limits)
    d_out = index.layer(request.layer).d_out
    # Beside the values travel the initial part, and the trained layer's output or the residual.
    tensors = _group_count(index, request.layer, request.group_by) + 2
    limits.check_answers(len(queries), tensors * d_out * 4, "grouped by a column with fewer values")
    found = index.dual_output(
        request.layer,
        queries,
        where=where,
        at_step=request.at_step if request.HasField("at_step") else None,
        group_by=request.group_by or None,
        stop=stop,
    )
    return pb.DualOutputResponse(
        values=wire.encode_tensor(found.values),
        initial=wire.encode_tensor(found.initial),
        trained=None if found.trained is None else wire.encode_tensor(found.trained),
        groups=_groups(request.group_by, found.groups),
        counts=None if found.counts is None else wire.encode_tensor(found.counts),
        coverage=_coverage(found.coverage),
        residual=None if found.residual is None else wire.encode_tensor(found.residual),
    )


def stream_weights(
    index: Index, request: pb.StreamWeightsRequest, limits: Limits, stop: Stop | None
) -> Iterator[pb.StreamWeightsResponse]:
    """Answer StreamWeights: arguments are checked at once, chunks computed as they are taken."""
    queries = wire.decode_queries(request.queries, limits.max_queries)
    limits.check_answers(len(queries), 2 * 4, "for one row")
    chunks = index.stream_weights(
        request.layer,
        queries,
        chunk_bytes=min(CHUNK_BYTES, limits.max_message_bytes // 2),
        stop=stop,
    )
    return (
        pb.StreamWeightsResponse(start=chunk.start, weights=wire.encode_tensor(chunk.weights))
        for chunk in chunks
    )


def examples(
    index: Index, request: pb.GetExamplesRequest, limits: Limits, stop: Stop | None
) -> pb.GetExamplesResponse:
    """Answer GetExamples."""
    if not request.ids:
        raise InvalidArgumentError("no ids; send at least one example id", field="ids")
    if len(request.ids) > limits.max_queries:
        raise ResourceExhaustedError(
            f"{len(request.ids):,} ids in one request; at most {limits.max_queries:,} "
            "are answered: send them in smaller batches",
            field="ids",
        )
    ids = [wire.decode_id(value) for value in request.ids]
    response = pb.GetExamplesResponse()
    size = 0
    for start in range(0, len(ids), _PAYLOADS_AT_ONCE):
        payloads = index.examples(ids[start : start + _PAYLOADS_AT_ONCE])
        size += sum(len(payload) for payload in payloads if payload is not None)
        limits.check_answer(size, "ask for fewer ids at a time")
        for place, payload in enumerate(payloads, start):
            example = response.examples.add(id=request.ids[place])
            if isinstance(payload, str):
                example.text = payload
            elif payload is not None:
                example.data = payload
    return response


def layer_info(layer: Layer) -> pb.LayerInfo:
    """What GetIndex tells of one layer."""
    return pb.LayerInfo(
        name=layer.name,
        kind=layer.kind,
        d_in=layer.d_in,
        d_out=layer.d_out,
        bias=layer.bias,
        rows=layer.rows,
        row_space=layer.row_space,
        values=layer.values,
        columns=[
            pb.ColumnInfo(name=name, type=wire.column_type(kind)) for name, kind in layer.columns
        ],
        inexact=[pb.InexactMark(from_step=step, reason=reason) for step, reason in layer.inexact],
    )


def _question(
    request: pb.TopKRequest | pb.SumsRequest | pb.DualOutputRequest, limits: Limits
) -> tuple[npt.NDArray[np.float32], pb.Filter | None]:
    queries = wire.decode_queries(request.queries, limits.max_queries)
    if not request.HasField("where"):
        return queries, None
    wire.check_filter(request.where)
    return queries, request.where


def _group_count(index: Index, layer: str, group_by: str) -> int:
    return index.group_count(layer, group_by) if group_by else 1


def _groups(name: str, groups: pa.Array | None) -> pb.Column | None:
    return None if groups is None else wire.encode_column(name, groups)


def _coverage(coverage: Coverage) -> pb.Coverage:
    return pb.Coverage(rows=coverage.rows, total=coverage.total, nonfinite=coverage.nonfinite)
