"""The best rows by contribution where rows have no coefficients, but each step its own metric.

Every selected row is scored in float32 with a bound of the error; those that may be among the best
are scored again in float64, in an order of additions that depends on nothing but the row, and
rounded once.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.memory.float64 import pair_dots
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.ranking import Ranking, merit
from dualform.engine.topk.top_k import Hits
from dualform.engine.totals.metric import UnitMetric
from dualform.store.grouping import Grouping

SCORE_BYTES = 256 << 20
"""Scores and bounds that are held at once."""

EXACT_ROWS = 4096
"""Rows that are scored exactly at once."""

_FLOAT32_UNIT = 2.0**-24
_SAFE = 1e30


def best_by_metric(
    layer: Layer,
    queries: torch.Tensor,
    ranking: Ranking,
    metric: UnitMetric,
    unit: int,
    selected: np.ndarray,
    stop: Stop | None,
) -> Hits:
    """The best rows of each query and group, by (score, row id).

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in], finite.
        ranking: k, order, groups and what counts as distinct.
        metric: The unit's, after the steps that the question is about.
        unit: The output unit.
        selected: bool [total], by position: the rows that take part, their keys finite.
        stop: Asked at every step.

    Returns:
        As a scan gives them.
    """
    grouping, distinct = ranking.grouping, ranking.distinct
    assert not isinstance(grouping, str)
    assert not isinstance(distinct, str)
    positions = np.full((len(queries), ranking.groups, ranking.k), -1, np.int64)
    scores = np.full(positions.shape, np.nan, np.float32)
    # Of each query: scores, bounds, and what it is under each step's metric, in 8 and 4 bytes.
    step = max(1, SCORE_BYTES // (8 * layer.rows + 12 * metric.weight.numel() + 1))
    members = _members(grouping, selected)
    same = None if distinct is None else _values(layer, distinct)
    for first in range(0, len(queries), step):
        asked = queries[first : first + step]
        proposed, errors = _proposals(layer, asked, metric, unit, selected, stop)
        for number in range(len(asked)):
            for group, of_group in enumerate(members):
                near = _possible(ranking, of_group, proposed[number], errors[number], same)
                exact = _exact(layer, asked[number], metric, unit, near)
                order = _ordered(layer, ranking, near, exact, same)
                cell = (first + number, group, slice(0, len(order)))
                positions[cell], scores[cell] = near[order], exact[order]
    found = positions >= 0
    ids = np.full(positions.shape, -1, np.int64)
    ids[found] = layer.space.ids[positions[found]]
    groups = pa.nulls(1) if grouping is None else grouping.values
    return Hits(ids, scores, positions, groups, {})


def _members(grouping: Grouping | None, selected: np.ndarray) -> list[np.ndarray]:
    """The selected rows of each group, by position."""
    positions = np.flatnonzero(selected)
    if grouping is None:
        return [positions]
    codes = grouping.codes[positions]
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(1, len(grouping.values)))
    return np.split(positions[order], bounds)


def _values(layer: Layer, distinct: Grouping) -> np.ndarray:
    """What rows stand for: int64 [total], equal where they stand for the same."""
    codes = distinct.codes.astype(np.int64)
    null = Groups(distinct).null
    if null is not None:
        without = codes == null
        codes[without] = -1 - layer.space.ids[without]
    return codes


def _proposals(
    layer: Layer,
    queries: torch.Tensor,
    metric: UnitMetric,
    unit: int,
    selected: np.ndarray,
    stop: Stop | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores in float32 and bounds of their errors, both float32 [n, total], by position.

    Rows whose numbers float32 might not hold have an infinite bound.
    """
    shape = (len(queries), layer.rows)
    scores, errors = np.zeros(shape, np.float32), np.full(shape, np.inf, np.float32)
    asked = [metric.weight * query.double() for query in queries]
    lengths = [torch.linalg.vector_norm(weighted, dim=1).numpy() for weighted in asked]
    single = [weighted.float() for weighted in asked]
    # Products, their sum, the metric's rounding to float32, the bias's and the value's product.
    unit_errors = (layer.d_in + 8) * _FLOAT32_UNIT
    for shard in layer.shards:
        inside = selected[shard.start : shard.start + shard.rows]
        for tile in shard.tiles(inside, 1, stop=stop):
            steps = tile.steps
            which = torch.from_numpy(steps)
            values = layer.values_at(tile.positions, unit)
            magnitudes = np.abs(values).astype(np.float64)
            bias = metric.bias.numpy()[steps]
            for number in range(len(queries)):
                dots = (tile.keys * single[number][which]).sum(1).numpy()
                size = lengths[number][steps] * tile.max_norm + np.abs(bias)
                with np.errstate(all="ignore"):
                    scores[number, tile.positions] = (dots + bias) * values
                    bound = size * magnitudes * unit_errors * 1.01 + 1e-37
                    bound[~(size * np.maximum(magnitudes, 1.0) < _SAFE)] = np.inf
                    errors[number, tile.positions] = np.nextafter(
                        bound.astype(np.float32), np.float32(np.inf)
                    )
    return scores, errors


def _possible(
    ranking: Ranking,
    positions: np.ndarray,
    scores: np.ndarray,
    errors: np.ndarray,
    same: np.ndarray | None,
) -> np.ndarray:
    """Those of the rows that may be among the best, by position; ties are among them."""
    wide, bounds = scores[positions].astype(np.float64), errors[positions].astype(np.float64)
    merits = merit(torch.from_numpy(wide), ranking.order).numpy()
    least, most = merits - bounds, merits + bounds
    counted = least
    if same is not None:
        # Of rows that are the same only one counts: the one that is certainly best.
        order = np.argsort(-least, kind="stable")
        _, first = np.unique(same[positions[order]], return_index=True)
        counted = least[order[first]]
    if len(counted) <= ranking.k:
        return positions
    kth = np.partition(counted, len(counted) - ranking.k)[len(counted) - ranking.k]
    return np.asarray(positions[most >= kth - abs(kth) * 2.0**-22 - 2.0**-149])


def _exact(
    layer: Layer, query: torch.Tensor, metric: UnitMetric, unit: int, positions: np.ndarray
) -> np.ndarray:
    """Scores of rows, ascending by position: float64 products and sums, rounded once; float32."""
    out = np.empty(len(positions), np.float32)
    wide = query.double().numpy()
    for first in range(0, len(positions), EXACT_ROWS):
        part = slice(first, first + EXACT_ROWS)
        steps = layer.space.steps[positions[part]]
        asked = metric.weight.numpy()[steps] * wide
        dots = pair_dots(layer.keys_at(positions[part]).numpy(), asked) + metric.bias.numpy()[steps]
        with np.errstate(over="ignore"):
            found = dots * layer.values_at(positions[part], unit).astype(np.float64)
            out[part] = found.astype(np.float32)
    return np.asarray(out + np.float32(0))


def _ordered(
    layer: Layer,
    ranking: Ranking,
    positions: np.ndarray,
    scores: np.ndarray,
    same: np.ndarray | None,
) -> np.ndarray:
    """The places of the best k rows, in order; of rows that are the same only the best."""
    merits = merit(torch.from_numpy(scores), ranking.order).numpy()
    order = np.lexsort((layer.space.ids[positions], -merits))
    if same is not None:
        _, first = np.unique(same[positions[order]], return_index=True)
        order = order[np.sort(first)]
    return np.asarray(order[: ranking.k])
