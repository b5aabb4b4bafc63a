"""How much memory an answer takes at most, estimated from the question before anything is computed.

The peak of anonymous memory (bytes that no file backs) from the question to the encoded response,
in the worst case, where every score is the same. The constants count the arrays of the code that
they name; tests/engine/test_needs.py holds them against what is really taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import torch

from dualform.engine.api.index import Index
from dualform.engine.devices.held import STAGING_BYTES
from dualform.engine.groups import attributed, ranked, self_influence
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import TILE_BYTES, tile_rows
from dualform.engine.messages import responses
from dualform.engine.threads import MOST
from dualform.engine.topk.followed import EXACT_ROWS
from dualform.engine.topk.followed_along import SCORE_BYTES
from dualform.engine.topk.scan import SPAN, block_queries
from dualform.engine.topk.scoring import KEYS_TOGETHER
from dualform.engine.topk.top_k import COMPRESS_AT, candidates
from dualform.engine.totals.row_parts import REBUILD_BYTES
from dualform.engine.totals.steps import AHEAD_BYTES
from dualform.optimizers import followed_bytes
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
from dualform.store.packed_rows import BLOCK_BYTES
from dualform.v1 import attribution_pb2 as pb

# Whatever is asked: messages, plans, the small arrays of a scan.
_CALL = 4 << 20
# Queries: in the message, the question, the tensor, and in float64.
_QUERY = 6
# Bytes of a candidate: seven arrays, joined, and the orders that they are sorted in.
_CANDIDATE = 160
# Of a pair of query and row in a tile: its weight, merit, limit, and it is a candidate at first.
_PAIR = 200
# Of such a pair where weights are only added up: in float32, ordered, and in float64.
_WEIGHT = 24
# Of such a pair where contributions are: weights, coefficients and values' products in float64.
_CONTRIBUTION = 60
# Of such a pair where it is a cosine: the norms' product, the quotient, its error, in float64.
_COSINE = 48
# Of a row that takes part or not: masks, and which are left.
_ROW = 16
# Of a layer's row for each column that is looked at for the first time: codes and bitmaps.
_COLUMN_ROW = 24
# Of a number of a followed layer, beside its parts: gradients, preconditioners, moves.
_FOLLOWED = 80
# Of a number of a unit's metric: itself, the sums of keys that it is made of, what they become,
# and a query under it.
_METRIC = 48
# Of a row where steps have a metric: what is known of it, bounds, scores, and orders of them.
_METRIC_ROW = 240


# Of a block's bytes, while it is unpacked.
_BLOCK = 6


# Of a row that devices take part in: which there are, their groups and coefficients.
_DEVICE_ROW = 64


def of_rows(index: Index, question: RowsQuestion) -> int:
    """For a TopKQuestion, TopGroupsQuestion, SumsQuestion or OutputQuestion."""
    layer, n = index.layer(question.layer), len(question.queries)
    if index.machines:
        return _merging(index, layer, question)
    if isinstance(question, TopGroupsQuestion):
        beside = _by_devices(index, layer) + _unpacking(layer)
        return _top_groups(index, layer, question) + beside
    groups = index.group_count(question.layer, question.group_by)
    size = _CALL + _queries(layer, n) + _selection(layer, question.where, question.group_by)
    size += _by_devices(index, layer) + _unpacking(layer)
    if isinstance(question, TopKQuestion):
        if question.distinct is not None:
            size += _ROW * layer.rows
        if question.rank_by == "contribution":
            size += _contribution(index, layer, n, question.unit is None)
        if question.rank_by == "cosine":
            size += _COSINE * _pairs(layer, n)
        return size + _top_k(layer, n, groups, question.k)
    if isinstance(question, SumsQuestion):
        if question.bins is not None:
            # Python's numbers, Arrow's, and each row's bin.
            groups = len(question.bins)
            size += 160 * groups + _COLUMN_ROW * layer.rows
        return size + _sums(layer, n, groups)
    assert isinstance(question, OutputQuestion)
    return size + _output(index, layer, n, groups)


def of_attribute(index: Index, question: AttributeQuestion) -> int:
    """For an AttributeQuestion: its layers are answered in turn, their sums kept."""
    n, layers = question.inputs, len(question.layers)
    most = kept = 0
    if index.machines:
        groups = max(index.group_count(each.layer, question.by, "by") for each in question.layers)
        return _CALL + _merging_attributed(index, question, groups)
    spaces = {index.layer(each.layer).row_space: each.layer for each in question.layers}
    groups = sum(index.group_count(name, question.by, "by") for name in spaces.values())
    for each in question.layers:
        layer, m = index.layer(each.layer), len(each.queries)
        block = _block_pairs(m, n, attributed.block_inputs(groups, layers))
        size = _queries(layer, m) + _selection(layer, question.where, question.by)
        size += 100 * m * layer.d_out + _contribution(index, layer, block, True)
        size += _tiles_along(layer, block) + _unpacking(layer)
        most = max(most, size)
        kept += _QUERY * 4 * m * (layer.d_in + layer.d_out)
    inputs = min(n, attributed.block_inputs(groups, layers))
    kept += 8 * inputs * groups * (2 * layers + 5) + 60 * groups
    if question.k is None:
        kept += 4 * 8 * n * groups
    else:
        kept += 4 * n * question.k * (8 * layers + 40)
    return _CALL + most + kept


def _block_pairs(m: int, n: int, inputs: int) -> int:
    """How many of m queries belong to a block of so many of n inputs, if all have as many."""
    return max(1, min(m, -(-m * min(n, inputs) // n)))


def _tiles_along(layer: Layer, n: int) -> int:
    """Tiles with values, and what their rows added along n directions."""
    tile = tile_rows(max(layer.d_in, layer.d_out), n)
    return 6 * TILE_BYTES + _CONTRIBUTION * n * min(layer.rows, tile)


def of_self_influence(index: Index, question: SelfInfluenceQuestion, groups: int) -> int:
    """For a SelfInfluenceQuestion about so many groups."""
    layer = index.layer(question.layer)
    if index.machines:
        # Answers, and the rows of steps that lie on two machines, in float32 twice and widened.
        rows = index.machines * (1 + layer.rows // max(1, index.steps))
        size = 40 * groups * (index.machines + 1) + 24 * rows * (layer.d_in + layer.d_out)
        return _CALL + size + 4 * self_influence.BLOCK_BYTES
    # Rows of a step and group: their places, sorted; keys and values read, widened and in order.
    size = _selection(layer, question.where, question.by) + 100 * layer.rows + 80 * groups
    size += _unpacking(layer)
    return _CALL + size + 4 * self_influence.BLOCK_BYTES + 24 * layer.d_in * layer.d_out


def of_explain(index: Index, question: ExplainQuestion) -> int:
    """For an ExplainQuestion: its layers are answered in turn, their answers kept."""
    if index.machines:
        return _CALL + sum(_merging(index, *each) for each in _asked_one_by_one(index, question))
    most = kept = 0
    column = question.group_by
    for name, queries in question.layers:
        layer, n = index.layer(name), len(queries)
        groups = index.group_count(name, column)
        work, answer = 0, 0
        if question.k:
            work = max(work, _top_k(layer, n, 1, question.k))
            answer += 2 * n * question.k * responses.hit_bytes(layer)
        if column is not None:
            work += _sums(layer, n, groups)
            answer += 16 * n * groups
        if question.output:
            work += _output(index, layer, n, groups)
            answer += 8 * n * layer.d_out * (groups + 2)
        kept += answer
        work += _by_devices(index, layer) + _unpacking(layer)
        most = max(most, _queries(layer, n) + _selection(layer, question.where, column) + work)
    return _CALL + most + kept


def of_stream(index: Index, question: StreamWeightsQuestion) -> int:
    """For a part of the answer to a StreamWeightsQuestion."""
    layer, n = index.layer(question.layer), len(question.queries)
    rows = max(1, TILE_BYTES // max(1, 4 * layer.d_in))
    longest = max((shard.rows for shard in layer.shards), default=0)
    chunk = max(1 << 20, 4 * n)
    size = _CALL + _queries(layer, n) + _unpacking(layer)
    return size + 16 * longest + 3 * TILE_BYTES + 14 * chunk + 40 * rows


def of_examples(question: ExamplesQuestion, payloads: int) -> int:
    """For an ExamplesQuestion whose payloads have so many bytes."""
    return _CALL + 400 * len(question.ids) + 4 * payloads


def _merging(index: Index, layer: Layer, question: RowsQuestion) -> int:
    """Where others compute: their answers, and the one that is made of them."""
    n, answers = len(question.queries), index.machines + 1
    size = _CALL + 2 * _queries(layer, n)
    if isinstance(question, TopGroupsQuestion):
        groups = index.group_count(question.layer, question.by, "by")
        block = min(n, ranked.block_queries(groups * answers))
        beside = 4 * n * question.k * (responses.group_bytes(layer, question.by) + 16)
        return size + 2 * 8 * block * groups * answers + 60 * groups * answers + beside
    groups = index.group_count(question.layer, question.group_by)
    if isinstance(question, TopKQuestion):
        hit = 80 + 4 * responses.hit_bytes(layer) + _text(layer)
        return size + n * groups * question.k * hit * answers
    if isinstance(question, SumsQuestion):
        groups = groups if question.bins is None else len(question.bins)
        return size + (2 * 8 * n + 64) * groups * answers
    outputs = 2 * 8 * n * layer.d_out * (groups + 1) * answers
    if not index.ledger.family.scalar:
        # The layer on its way from machine to machine: as it is, and as a message.
        numbers = layer.d_in * layer.d_out
        outputs += 3 * followed_bytes(index.ledger.family, numbers, groups)
    return size + outputs + 24 * layer.d_in * layer.d_out + 64 * groups * answers


def _merging_attributed(index: Index, question: AttributeQuestion, groups: int) -> int:
    """Likewise of an AttributeQuestion, of a layer at a time."""
    n, answers = question.inputs, index.machines + len(question.layers) + 1
    block = min(n, attributed.block_inputs(groups, answers))
    size = 2 * 8 * block * groups * answers + 60 * groups * answers
    for each in question.layers:
        layer, m = index.layer(each.layer), len(each.queries)
        size += _QUERY * 4 * m * (layer.d_in + layer.d_out) + 100 * m * layer.d_out
        size += 24 * layer.d_in * layer.d_out
    if question.k is None:
        return size + 4 * 8 * n * groups
    return size + 4 * n * question.k * (8 * len(question.layers) + 40)


def _asked_one_by_one(
    index: Index, question: ExplainQuestion
) -> Iterator[tuple[Layer, RowsQuestion]]:
    """What an ExplainQuestion comes to."""
    column = question.group_by
    for name, queries in question.layers:
        layer = index.layer(name)
        if question.k:
            yield layer, TopKQuestion(name, queries, k=question.k)
        if column is not None:
            yield layer, SumsQuestion(name, queries, column)
        if question.output:
            yield layer, OutputQuestion(name, queries, group_by=column)


def _by_devices(index: Index, layer: Layer) -> int:
    """What devices take of the host's memory: rows that are brought to each go through buffers."""
    places = len(index.devices.working())
    return places * (2 * STAGING_BYTES + _DEVICE_ROW * layer.rows)


def _unpacking(layer: Layer) -> int:
    """What packed keys and values take when they are read: a tile of values, which would be mapped
    if they were plain, in each thread a block, its planes and what they become, and where rows are
    read step by step those of the next steps."""
    if not any(layer.packed):
        return 0
    block = max(BLOCK_BYTES, layer.key_bytes, layer.value_bytes)
    return TILE_BYTES + _BLOCK * block * MOST + 2 * AHEAD_BYTES


def _queries(layer: Layer, n: int) -> int:
    return _QUERY * 4 * n * layer.d_in


def _selection(layer: Layer, where: pb.Filter | None, column: str | None) -> int:
    """Which rows take part, and their groups."""
    size = _ROW * layer.rows if where is not None else 0
    looked_at = set(() if column is None else (column,))
    if where is not None:
        looked_at |= set(_columns(where))
        size += 400 * where.ByteSize() // 4
    return size + _COLUMN_ROW * layer.rows * len(looked_at)


def _columns(where: pb.Filter) -> Iterator[str]:
    kind = where.WhichOneof("kind")
    if kind == "comparison":
        yield where.comparison.column
    elif kind == "negated":
        yield from _columns(where.negated)
    elif kind is not None:
        for part in getattr(where, kind).filters:
            yield from _columns(part)


def _pairs(layer: Layer, n: int) -> int:
    """Weights of a tile."""
    return n * min(layer.rows, tile_rows(layer.d_in, n))


def _top_k(layer: Layer, n: int, groups: int, k: int) -> int:
    block = min(n, block_queries(layer.rows, groups, k))
    kept = 2 * block * min(layer.rows, candidates(groups, k)) + COMPRESS_AT
    # FAISS's of each shard, or a device's: twice an eighth more, where both ends are asked for.
    each = max((k + 32) * len(layer.shards), 2 * (k + k // 8 + 32))
    proposals = block * each if k <= 2048 else 0
    bounds = 20 * min(SPAN, block * layer.rows)
    hits = n * groups * k
    scored = 4 * layer.d_in * KEYS_TOGETHER * min(MOST, torch.get_num_threads())
    return (
        4 * TILE_BYTES
        + scored
        + _PAIR * _pairs(layer, block)
        + _CANDIDATE * (kept + proposals)
        + bounds
        + hits * (40 + 4 * responses.hit_bytes(layer) + _text(layer))
    )


def _text(layer: Layer) -> int:
    """Bytes of text that a row has at most, in the table and in a message."""
    return sum(2 * longest_text(column) for column in layer.space.columns.values())


def longest_text(column: pa.Array) -> int:
    """Bytes of a column's longest text; 0 where it is none."""
    words = column.dictionary if pa.types.is_dictionary(column.type) else column
    if not (pa.types.is_string(words.type) or pa.types.is_large_string(words.type)):
        return 0
    return int(pc.max(pc.binary_length(words)).as_py() or 0)


def _sums(layer: Layer, n: int, groups: int) -> int:
    runs = len(layer.space.run_starts)
    key_sums = 0 if layer.manifest.shards and layer.manifest.shards[0].sums is None else runs
    equal = 40 * layer.rows if layer.manifest.equal_keys is not None else 0
    return (
        2 * TILE_BYTES
        + _WEIGHT * _pairs(layer, n)
        + 8 * key_sums * (2 * layer.d_in + 2 * n)
        + equal
        + 5 * 8 * n * groups
        + 64 * groups
    )


def _top_groups(index: Index, layer: Layer, question: TopGroupsQuestion) -> int:
    n, groups = len(question.queries), index.group_count(question.layer, question.by, "by")
    block = min(n, ranked.block_queries(groups))
    size = _CALL + _queries(layer, n) + _selection(layer, question.where, question.by)
    # Of a group, beside the sums: counts, whether its sum is finite, its merit, and an order.
    size += 60 * groups + 4 * n * question.k * (responses.group_bytes(layer, question.by) + 16)
    size += n * question.k * 2 * longest_text(layer.space.columns[question.by])
    if question.rank_by == "weight":
        return size + _sums(layer, block, groups)
    if question.rank_by == "cosine":
        return size + _COSINE * _pairs(layer, block) + _sums(layer, block, groups)
    size += 60 * n * layer.d_out + 5 * 8 * block * groups
    if not index.ledger.family.scalar:
        return size + _contribution(index, layer, min(n, ranked.block_scores(layer.rows)), True)
    size += _tiles_along(layer, block)
    return size + _contribution(index, layer, block, True)


def _output(index: Index, layer: Layer, n: int, groups: int) -> int:
    numbers = layer.d_in * layer.d_out
    answer = n * layer.d_out * (40 * groups + 60)
    work = (
        3 * TILE_BYTES
        + _WEIGHT * _pairs(layer, n)
        + 16 * layer.d_out * TILE_BYTES // max(1, 4 * max(layer.d_in, layer.d_out))
    )
    if not index.ledger.family.scalar:
        # While they are followed; the parts, twice where steps since a stored state are apart.
        work = followed_bytes(index.ledger.family, numbers, groups)
        work += (16 * groups + _FOLLOWED) * numbers
    else:
        rebuilt = groups * numbers * 8
        work += rebuilt if rebuilt <= REBUILD_BYTES else 0
    # Parts of earlier questions, remainders: float64 weights that are kept.
    return answer + work + 24 * numbers + 64 * groups


def _contribution(index: Index, layer: Layer, n: int, along: bool) -> int:
    numbers = layer.d_in * layer.d_out
    size = 60 * n * layer.d_out + 24 * numbers + 24 * layer.rows
    if index.ledger.family.scalar:
        return size
    found = _METRIC_ROW * layer.rows
    if along:
        found = n * min(8 * layer.rows, SCORE_BYTES) + 40 * layer.rows
    exact = 28 * min(layer.rows, EXACT_ROWS) * layer.d_in
    return size + of_metric(index, layer) + found + exact


def of_metric(index: Index, layer: Layer) -> int:
    """For an output unit's metric."""
    numbers, metric = layer.d_in * layer.d_out, index.ledger.steps * layer.d_in
    return _METRIC * metric + _FOLLOWED * numbers + 3 * TILE_BYTES
