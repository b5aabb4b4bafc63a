"""One function per question: a request's fields checked, the index asked, the response built.

What is checked here is what is cheap to check before anything is allocated for the answer: sizes
of tensors, k, filters and ids, and how large the answer would be. The index checks the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualform.engine.api.index import Index
from dualform.engine.errors import (
    CancelledError,
    EngineError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.messages import wire
from dualform.engine.messages.limits import Limits
from dualform.engine.messages.questions import (
    ORDERS,
    QUESTIONS,
    check_ranking,
    group_count,
    hit_bytes,
    output_response,
    sums_response,
    top_k_response,
    where_of,
)
from dualform.engine.totals.streams import CHUNK_BYTES
from dualform.v1 import attribution_pb2 as pb

_PAYLOADS_AT_ONCE = 64


def about_rows(index: Index, request: Any, limits: Limits, stop: Stop | None) -> Any:
    """Answer TopK, Sums or DualOutput."""
    question = QUESTIONS[type(request)]
    checked = question.check(index, request, limits)
    return question.respond(request, question.ask(index, request, checked, stop))


def explain(
    index: Index, request: pb.ExplainRequest, limits: Limits, stop: Stop | None
) -> pb.ExplainResponse:
    """Answer Explain."""
    if not request.layers:
        raise InvalidArgumentError("no layers; name at least one, with queries", field="layers")
    if request.k < 0:
        raise InvalidArgumentError(f"k is {request.k}; it must not be negative", field="k")
    if not (request.k or request.group_by or request.output):
        raise InvalidArgumentError(
            "nothing is asked; give k for the best rows, group_by for sums, or output", field="k"
        )
    if request.absolute and not request.group_by:
        raise InvalidArgumentError("absolute goes with group_by, for sums", field="absolute")
    check_ranking(request, limits)
    where = where_of(request)
    asked, size = [], 0
    for own in request.layers:
        with _layer_named(own.layer):
            queries = wire.decode_queries(own.queries, limits.max_queries)
            layer = index.layer(own.layer)
            groups = group_count(index, own.layer, request.group_by)
        per_query = request.k * hit_bytes(layer) + (8 * groups if request.group_by else 0)
        if request.output:
            per_query += 4 * layer.d_out * (groups + 2)
        size += len(queries) * per_query
        asked.append((own.layer, queries))
    limits.check_answer(size, "ask for fewer layers or queries at a time, or with a smaller k")
    response = pb.ExplainResponse()
    for name, queries in asked:
        with _layer_named(name):
            found = index.explain(
                name,
                queries,
                k=request.k or None,
                order=ORDERS[request.order],
                where=where,
                group_by=request.group_by or None,
                absolute=request.absolute,
                dual_output=request.output,
                stop=stop,
            )
        part = response.layers.add(layer=name)
        if found.top_k is not None:
            part.top_k.CopyFrom(top_k_response(found.top_k, ""))
        if found.sums is not None:
            part.sums.CopyFrom(sums_response(found.sums, request.group_by))
        if found.output is not None:
            part.output.CopyFrom(output_response(found.output, request.group_by))
    return response


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


@contextmanager
def _layer_named(layer: str) -> Iterator[None]:
    """Say which of several layers is at fault."""
    try:
        yield
    except EngineError as error:
        if isinstance(error, CancelledError):
            raise
        raise type(error)(
            f"layer {layer!r}: {error}", field=error.field, reason=error.reason
        ) from error
