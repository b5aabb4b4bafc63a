"""One function per kind of question: held to the limits, asked, and the response built.

What is refused here is what no message could hold, before anything is allocated for the answer. A
question's own fields were checked when it was made; the index checks what depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dualform.engine.api.index import Index
from dualform.engine.api.opened import layer_named
from dualform.engine.api.results import DualOutput, Sums, TopGroups, TopK
from dualform.engine.errors import ResourceExhaustedError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.messages import needs, responses, wire
from dualform.engine.messages.limits import Limits
from dualform.engine.totals.streams import CHUNK_BYTES
from dualform.questions import (
    AttributeQuestion,
    ExamplesQuestion,
    ExplainQuestion,
    OutputQuestion,
    RowsQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.v1 import attribution_pb2 as pb

_PAYLOADS_AT_ONCE = 64
# A group's count and its place among the groups' values.
_GROUP_BYTES = 8 + 9


def about_rows(index: Index, question: RowsQuestion, limits: Limits, stop: Stop | None) -> Any:
    """Answer a TopKQuestion, TopGroupsQuestion, SumsQuestion or OutputQuestion."""
    check_size(index, question, limits)
    take(index, question, limits)
    found = index.ask(question, stop)
    return response_of(question, found, stop)


def take(index: Index, question: RowsQuestion, limits: Limits) -> None:
    """Ask for the memory that an answer takes.

    Raises:
        ResourceExhaustedError: It is not there.
    """
    if limits.take is not None:
        index.check_queries(question)
        limits.take(needs.of_rows(index, question))


def check_size(index: Index, question: RowsQuestion, limits: Limits) -> int:
    """Refuse what is over a limit; the bytes that each query adds to the answer."""
    limits.check_queries(len(question.queries))
    wire.check_filter(question.where)
    if isinstance(question, TopGroupsQuestion):
        return _check_groups(index, question, limits)
    groups = index.group_count(question.layer, question.group_by)
    beside = _group_bytes(index.layer(question.layer), question.group_by)
    layer, remedy = index.layer(question.layer), "grouped by a column with fewer values"
    if isinstance(question, TopKQuestion):
        limits.check_k(question.k)
        count = 8 if question.distinct else 0
        size, remedy = (
            groups * question.k * (responses.hit_bytes(layer) + count),
            "with a smaller k",
        )
    elif isinstance(question, SumsQuestion):
        if question.bins is not None:
            groups, remedy = len(question.bins), "with fewer bins"
            beside = groups * _GROUP_BYTES
        size = groups * 8
    else:
        # Beside the values travel the initial part, and the trained layer's output or the residual.
        size = (groups + 2) * layer.d_out * 4
    limits.check_answers(len(question.queries), size, remedy, beside)
    return size


def _check_groups(index: Index, question: TopGroupsQuestion, limits: Limits) -> int:
    """`check_size` of the best groups: of those alone that come back."""
    limits.check_k(question.k)
    index.group_count(question.layer, question.by, "by")
    size = question.k * responses.group_bytes(index.layer(question.layer), question.by)
    limits.check_answers(len(question.queries), size, "with a smaller k")
    return size


def response_of(
    question: RowsQuestion, found: TopK | TopGroups | Sums | DualOutput, stop: Stop | None
) -> Any:
    """The response message to one of `about_rows`' questions."""
    if isinstance(question, TopGroupsQuestion) and isinstance(found, TopGroups):
        return responses.top_groups(question, found, stop)
    if isinstance(question, TopKQuestion) and isinstance(found, TopK):
        return responses.top_k(question, found, stop)
    if isinstance(question, SumsQuestion) and isinstance(found, Sums):
        return responses.sums(question, found, stop)
    assert isinstance(question, OutputQuestion)
    assert isinstance(found, DualOutput)
    return responses.dual_output(question, found, stop)


def attribute(
    index: Index, question: AttributeQuestion, limits: Limits, stop: Stop | None
) -> pb.AttributeResponse:
    """Answer an AttributeQuestion."""
    n, layers = question.inputs, len(question.layers)
    limits.check_queries(n)
    wire.check_filter(question.where)
    for each in question.layers:
        with layer_named(each.layer):
            groups = index.group_count(each.layer, question.by, "by")
    first = index.layer(question.layers[0].layer)
    if question.k is None:
        beside, remedy = _group_bytes(first, question.by), "by a column with fewer values"
        size = 8 * groups
    else:
        limits.check_k(question.k)
        beside, remedy = 0, "with a smaller k"
        size = question.k * (responses.group_bytes(first, question.by) + 8 * layers)
    limits.check_answers(n, size + 32 * layers, remedy, beside)
    if limits.take is not None:
        limits.take(needs.of_attribute(index, question))
    return responses.attribute(question, index.attribute(question, stop), stop)


def self_influence(
    index: Index, question: SelfInfluenceQuestion, limits: Limits, stop: Stop | None
) -> pb.SelfInfluenceResponse:
    """Answer a SelfInfluenceQuestion."""
    wire.check_filter(question.where)
    groups = index.group_count(question.layer, question.by, "by")
    asked = max(0, groups - question.first)
    asked = asked if question.count is None else min(asked, question.count)
    each = 16 + _group_bytes(index.layer(question.layer), question.by) // max(1, groups)
    limits.check_answer(asked * each, "ask for fewer groups at a time, with count")
    if limits.take is not None:
        limits.take(needs.of_self_influence(index, question, asked))
    return responses.self_influence(question, index.self_influence(question, stop), stop)


def explain(
    index: Index, question: ExplainQuestion, limits: Limits, stop: Stop | None
) -> pb.ExplainResponse:
    """Answer an ExplainQuestion."""
    k, column = question.k or 0, question.group_by
    limits.check_k(k)
    wire.check_filter(question.where)
    size = 0
    for name, queries in question.layers:
        with layer_named(name):
            limits.check_queries(len(queries))
            layer = index.layer(name)
            groups = index.group_count(name, column)
        per_query = k * responses.hit_bytes(layer) + (8 * groups if column else 0)
        if question.output:
            per_query += 4 * layer.d_out * (groups + 2)
        size += len(queries) * per_query + _group_bytes(layer, column)
    limits.check_answer(size, "ask for fewer layers or queries at a time, or with a smaller k")
    if limits.take is not None:
        limits.take(needs.of_explain(index, question))
    response = pb.ExplainResponse()
    found = index.explain_layers(question, stop)
    for name, _ in question.layers:
        with layer_named(name):
            response.layers.append(responses.explained(question, name, next(found), stop))
    return response


def stream_weights(
    index: Index, question: StreamWeightsQuestion, limits: Limits, stop: Stop | None
) -> Iterator[pb.StreamWeightsResponse]:
    """Answer a StreamWeightsQuestion: chunks are computed as they are taken."""
    limits.check_queries(len(question.queries))
    limits.check_answers(len(question.queries), 2 * 4, "for one row")
    if limits.take is not None:
        limits.take(needs.of_stream(index, question))
    chunks = index.chunks(question, stop, min(CHUNK_BYTES, limits.max_message_bytes // 2))
    return map(responses.weights, chunks)


def examples(
    index: Index, question: ExamplesQuestion, limits: Limits, stop: Stop | None
) -> pb.GetExamplesResponse:
    """Answer an ExamplesQuestion."""
    ids = question.ids
    if len(ids) > limits.max_queries:
        raise ResourceExhaustedError(
            f"{len(ids):,} ids in one request; at most {limits.max_queries:,} "
            "are answered: send them in smaller batches",
            field="ids",
        )
    expected = index.example_bytes(ids)
    limits.check_answer(expected, "ask for fewer ids at a time")
    if limits.take is not None:
        limits.take(needs.of_examples(question, expected))
    response = pb.GetExamplesResponse()
    size = 0
    for start in range(0, len(ids), _PAYLOADS_AT_ONCE):
        part = ids[start : start + _PAYLOADS_AT_ONCE]
        payloads = index.examples(part)
        size += sum(len(payload) for payload in payloads if payload is not None)
        limits.check_answer(size, "ask for fewer ids at a time")
        for example_id, payload in zip(part, payloads, strict=True):
            example = response.examples.add(id=wire.encode_id(example_id))
            if isinstance(payload, str):
                example.text = payload
            elif payload is not None:
                example.data = payload
    return response


def _group_bytes(layer: Layer, column: str | None) -> int:
    """What the groups themselves add to an answer: their values and counts."""
    if not column:
        return 0
    values = layer.space.grouping(column).values
    return int(values.nbytes) + len(values) * _GROUP_BYTES
