"""The best rows by contribution where rows have no coefficients, but each step its own metric.

How much a row can have added is bounded before its key is read, by its value, the length of its
step's query and that of the longest key. The rows with the largest bounds are scored first; those
that may be better than these in float32, with a bound of the error; and what may then be among the
best in float64, in an order of additions that depends on nothing but the row, rounded once.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.memory.float64 import pair_dots
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop, tile_rows
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.ranking import Ranking, merit
from dualform.engine.topk.top_k import Hits
from dualform.engine.totals.metric import UnitMetric
from dualform.store.grouping import Grouping

FIRST_ROWS = 1024
"""Rows of each group that are scored before any other, or twice as many as are asked for."""

EXACT_ROWS = 4096
"""Rows that are scored exactly at once."""

_STEPS = 256
_FLOAT32_UNIT = 2.0**-24
# Sizes that float32 holds: its products may be larger than the one and lose the other.
_SAFE, _SMALL = 1e30, 1e-30


def best_by_metric(
    layer: Layer,
    queries: torch.Tensor,
    ranking: Ranking,
    metric: UnitMetric,
    selected: np.ndarray,
    stop: Stop | None,
) -> Hits:
    """The best rows of each query and group, by (score, row id).

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in], finite.
        ranking: k, order, groups and what counts as distinct.
        metric: The unit's, after the steps that the question is about.
        selected: bool [total], by position: the rows that take part, their keys finite.
        stop: Asked between tiles.

    Returns:
        As a scan gives them. A row whose value is not finite is never ranked.
    """
    grouping, distinct = ranking.grouping, ranking.distinct
    assert not isinstance(grouping, str)
    assert not isinstance(distinct, str)
    positions = np.full((len(queries), ranking.groups, ranking.k), -1, np.int64)
    scores = np.full(positions.shape, np.nan, np.float32)
    rows = _Rows(layer, metric, np.flatnonzero(selected & np.isfinite(metric.values)))
    members = _members(grouping, rows.positions)
    same = None if distinct is None else _values(layer, distinct)[rows.positions]
    for number, query in enumerate(queries):
        found = _scored(rows, query, ranking, members, same, stop)
        for group, of_group in enumerate(members):
            order = of_group[_ordered(rows, ranking, of_group, found, same)]
            cell = (number, group, slice(0, len(order)))
            positions[cell], scores[cell] = rows.positions[order], found[order]
    ids = np.full(positions.shape, -1, np.int64)
    ids[positions >= 0] = layer.space.ids[positions[positions >= 0]]
    groups = pa.nulls(1) if grouping is None else grouping.values
    return Hits(ids, scores, positions, groups, {})


class _Rows:
    """Rows that take part, and what is known of each before its key is read.

    Args:
        layer: Whose.
        metric: The unit's.
        positions: int64 [m], ascending.

    Attributes:
        positions: Likewise.
        ids: int64 [m], row ids.
    """

    def __init__(self, layer: Layer, metric: UnitMetric, positions: np.ndarray) -> None:
        self.positions = positions
        self.ids = layer.space.ids[positions]
        self._layer, self._metric = layer, metric
        self._steps = layer.space.steps[positions] - metric.start
        self._values = metric.values[positions].astype(np.float64)
        norms = np.array([shard.max_norm for shard in layer.shards])
        self._norms = np.repeat(norms, [shard.rows for shard in layer.shards])[positions]
        self._bias = metric.bias.numpy()[self._steps]

    def __len__(self) -> int:
        return len(self.positions)

    def asked(self, query: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Each step's query under the metric, float32 [steps, d_in]; and for each row how much it
        can have added at most, float64 [m]."""
        weight, wide = self._metric.weight, query.double()
        single = torch.empty(weight.shape, dtype=torch.float32)
        lengths = torch.empty(len(weight), dtype=torch.float64)
        for first in range(0, len(weight), _STEPS):
            steps = slice(first, first + _STEPS)
            product = weight[steps] * wide
            single[steps] = product
            torch.linalg.vector_norm(product, dim=1, out=lengths[steps])
        with np.errstate(all="ignore"):
            size = (lengths.numpy() + _SMALL)[self._steps] * self._norms + np.abs(self._bias)
            most = size * np.abs(self._values) * (1 + 2.0**-20)
            return single, np.where(np.maximum(size, most) < _SAFE, most, np.inf)

    def propose(self, single: torch.Tensor, which: np.ndarray, stop: Stop | None) -> np.ndarray:
        """Scores in float32 of some of the rows, int64 [n] and ascending: float64 [n]."""
        found = np.empty(len(which))
        size = tile_rows(self._layer.d_in, 1)
        for first in range(0, len(which), size):
            check_stop(stop)
            tile = which[first : first + size]
            keys = self._layer.keys_at(self.positions[tile]).numpy()
            queries = single[torch.from_numpy(self._steps[tile])].numpy()
            with np.errstate(all="ignore"):
                dots = np.einsum("rd,rd->r", keys, queries)
                found[first : first + size] = (dots + self._bias[tile]) * self._values[tile]
        return found

    def exact(self, query: torch.Tensor, which: np.ndarray, stop: Stop | None) -> np.ndarray:
        """Likewise, float64 products and sums, rounded once: float32 [n]."""
        out = np.empty(len(which), np.float32)
        wide = query.double().numpy()
        for first in range(0, len(which), EXACT_ROWS):
            check_stop(stop)
            some = which[first : first + EXACT_ROWS]
            asked = self._metric.weight.numpy()[self._steps[some]] * wide
            dots = pair_dots(self._layer.keys_at(self.positions[some]).numpy(), asked)
            with np.errstate(all="ignore"):
                found = (dots + self._bias[some]) * self._values[some]
                out[first : first + EXACT_ROWS] = found.astype(np.float32)
        return np.asarray(out + np.float32(0))


def _scored(
    rows: _Rows,
    query: torch.Tensor,
    ranking: Ranking,
    members: list[np.ndarray],
    same: np.ndarray | None,
    stop: Stop | None,
) -> np.ndarray:
    """Exact scores of all rows that may be among the best, float32 [m]; NaN for the others."""
    single, bounds = rows.asked(query)
    found = np.full(len(rows), np.nan, np.float32)
    least, most = np.full(len(rows), -np.inf), bounds.copy()

    def score(which: np.ndarray) -> None:
        found[which] = rows.exact(query, which, stop)
        merits = merit(torch.from_numpy(found[which]), ranking.order).double().numpy()
        least[which] = most[which] = np.where(np.isnan(merits), -np.inf, merits)

    def possible() -> np.ndarray:
        """Rows that may be among the best and were not scored exactly; ties are among them."""
        near = [which[most[which] >= _floor(ranking, which, least, same)] for which in members]
        which = np.sort(np.concatenate(near))
        return np.asarray(which[np.isnan(found[which])])

    first = max(FIRST_ROWS, 2 * ranking.k)
    score(np.sort(np.concatenate([_largest(which, bounds, first) for which in members])))
    left = possible()
    merits = merit(torch.from_numpy(rows.propose(single, left, stop)), ranking.order).numpy()
    # Products, their sum, the metric's rounding to float32, the bias's and the value's product.
    errors = bounds[left] * ((single.shape[1] + 8) * _FLOAT32_UNIT * 1.01)
    sure = np.isfinite(errors)
    least[left[sure]] = (merits - errors)[sure]
    most[left[sure]] = (merits + errors)[sure]
    score(possible())
    return found


def _largest(which: np.ndarray, bounds: np.ndarray, count: int) -> np.ndarray:
    """Those of some rows with the largest bounds."""
    if len(which) <= count:
        return which
    return np.asarray(which[np.argpartition(bounds[which], len(which) - count)[-count:]])


def _floor(
    ranking: Ranking, which: np.ndarray, least: np.ndarray, same: np.ndarray | None
) -> float:
    """What the merit of the best k of some rows is at least; -inf where too few are known."""
    which = which[least[which] > -np.inf]
    if same is not None:
        # Of rows that are the same only one counts: the one that is certainly best.
        which = which[np.argsort(-least[which], kind="stable")]
        which = which[np.unique(same[which], return_index=True)[1]]
    if len(which) < ranking.k:
        return -np.inf
    kth = float(np.partition(least[which], len(which) - ranking.k)[len(which) - ranking.k])
    return kth - abs(kth) * 2.0**-22 - 2.0**-149


def _ordered(
    rows: _Rows,
    ranking: Ranking,
    which: np.ndarray,
    scores: np.ndarray,
    same: np.ndarray | None,
) -> np.ndarray:
    """The places among some rows of the best k, in order; of those that are the same the best."""
    known = np.flatnonzero(~np.isnan(scores[which]))
    merits = merit(torch.from_numpy(scores[which[known]]), ranking.order).numpy()
    order = known[np.lexsort((rows.ids[which[known]], -merits))]
    if same is not None:
        _, first = np.unique(same[which[order]], return_index=True)
        order = order[np.sort(first)]
    return np.asarray(order[: ranking.k])


def _members(grouping: Grouping | None, positions: np.ndarray) -> list[np.ndarray]:
    """The places of each group's rows among these, int64 and ascending."""
    if grouping is None:
        return [np.arange(len(positions))]
    codes = grouping.codes[positions]
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(1, len(grouping.values)))
    return np.split(order, bounds)


def _values(layer: Layer, distinct: Grouping) -> np.ndarray:
    """What rows stand for: int64 [total], equal where they stand for the same."""
    codes = distinct.codes.astype(np.int64)
    null = Groups(distinct).null
    if null is not None:
        without = codes == null
        codes[without] = -1 - layer.space.ids[without]
    return codes
