"""The best rows by contribution where rows have no coefficients: every row is scored exactly.

Sketches bound dot products under one metric; here each step has its own. So all selected rows are
scored in float64 and the best are taken, a few queries at a time.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.ranking import Ranking, merit
from dualform.engine.topk.top_k import Hits
from dualform.engine.totals.metric import UnitMetric, scores_by_metric
from dualform.store.grouping import Grouping

SCORE_BYTES = 256 << 20
"""Scores that are held at once."""


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
    step = max(1, SCORE_BYTES // (4 * max(1, layer.rows)))
    members = _members(grouping, selected)
    same = None if distinct is None else _values(layer, distinct)
    for first in range(0, len(queries), step):
        found = scores_by_metric(layer, queries[first : first + step], metric, unit, selected, stop)
        for number, own in enumerate(found, first):
            for group, rows in enumerate(members):
                best = _best(layer, ranking, rows, own[rows], same)
                positions[number, group, : len(best)] = best
                scores[number, group, : len(best)] = own[best]
    found_rows = positions >= 0
    ids = np.full(positions.shape, -1, np.int64)
    ids[found_rows] = layer.space.ids[positions[found_rows]]
    groups = pa.nulls(1) if grouping is None else grouping.values
    return Hits(ids, scores, positions, groups, {})


def _members(grouping: Grouping | None, selected: np.ndarray) -> list[np.ndarray]:
    """The selected rows of each group, by position."""
    rows = np.flatnonzero(selected)
    if grouping is None:
        return [rows]
    codes = grouping.codes[rows]
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(1, len(grouping.values)))
    return np.split(rows[order], bounds)


def _values(layer: Layer, distinct: Grouping) -> np.ndarray:
    """What rows stand for: int64 [total], equal where they stand for the same."""
    codes = distinct.codes.astype(np.int64)
    null = Groups(distinct).null
    if null is not None:
        without = codes == null
        codes[without] = -1 - layer.space.ids[without]
    return codes


def _best(
    layer: Layer, ranking: Ranking, rows: np.ndarray, scores: np.ndarray, same: np.ndarray | None
) -> np.ndarray:
    """The best k of these rows, by position, in order; of rows that are the same only the best."""
    merits = merit(torch.from_numpy(scores), ranking.order).numpy()
    ids = layer.space.ids[rows]
    if same is None and len(rows) > ranking.k:
        kth = np.partition(merits, len(merits) - ranking.k)[len(merits) - ranking.k]
        kept = merits >= kth
        rows, merits, ids = rows[kept], merits[kept], ids[kept]
    order = np.lexsort((ids, -merits))
    if same is not None:
        _, first = np.unique(same[rows[order]], return_index=True)
        order = order[np.sort(first)]
    return np.asarray(rows[order[: ranking.k]])
