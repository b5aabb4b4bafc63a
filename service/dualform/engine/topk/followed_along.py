"""Contributions along a direction where rows have no coefficients, but each step its own metric.

A row r of step s adds sum_j g_j e_r[j] (sum_i A_s[j, i] x_r[i] x[i] + a'_s[j]) along g: it takes
the metrics of all units with g_j != 0, one after the other, each by a pass over the rows. The units
are added up in float64 and in their order, so that a score depends on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.errors import ResourceExhaustedError
from dualform.engine.memory.float64 import pair_dots
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.distinct import first_of_each, value_codes
from dualform.engine.topk.ranking import Ranking, merit
from dualform.engine.topk.top_k import Hits
from dualform.engine.totals.metric import UnitMetric

MOST_PRODUCTS = 6e10
"""Products of float64 numbers that an answer may take: a minute or so."""

PRODUCTS_A_SECOND = 1e9
"""Of one core, about."""

SCORE_BYTES = 512 << 20
"""Scores that are held at once."""

_ROWS = 4096
"""Rows whose keys are held at once."""

FindMetric = Callable[[int], UnitMetric]
"""Gives a unit's metric."""


def check_cost(layer: Layer, rows: int, directions: torch.Tensor) -> None:
    """Refuse what would take too long.

    Args:
        layer: Whose rows.
        rows: How many take part.
        directions: float32 [n, d_out].

    Raises:
        ResourceExhaustedError: It would.
    """
    used = directions != 0
    units, asked = int(used.any(dim=0).sum()), int(used.sum())
    products = float(layer.d_in) * (float(rows) * asked + float(layer.rows) * units)
    if products > MOST_PRODUCTS:
        raise ResourceExhaustedError(
            "under an optimizer without coefficients a direction needs the metric of each output "
            f"unit that it is not 0 at: {units:,} units of layer {layer.name!r}, over {rows:,} "
            f"rows and {len(directions):,} queries, are {products:.1e} products, and at most "
            f"{MOST_PRODUCTS:.0e} are taken: ask with fewer queries or a filter, set small numbers "
            "of the direction to 0, ask for a unit=, or leave the layer out",
            field="direction",
            reason="TOO_COSTLY",
        )


def contributions_along(
    layer: Layer,
    queries: torch.Tensor,
    directions: torch.Tensor,
    find: FindMetric,
    positions: np.ndarray,
    stop: Stop | None,
) -> np.ndarray:
    """What rows added along directions.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in].
        directions: float32 [n, d_out], one for each query.
        find: Gives a unit's metric, after the steps that the question is about.
        positions: int64 [m], ascending, of rows before that step.
        stop: Asked between blocks of rows.

    Returns:
        float64 [n, m]; not finite where a value is not.
    """
    found = np.zeros((len(queries), len(positions)))
    wide, g = queries.double().numpy(), directions.double().numpy()
    for unit in torch.nonzero((directions != 0).any(dim=0))[:, 0].tolist():
        metric = find(unit)
        weight, bias = metric.weight.numpy(), metric.bias.numpy()
        asked = np.flatnonzero(g[:, unit])
        for first in range(0, len(positions), _ROWS):
            check_stop(stop)
            block = slice(first, first + _ROWS)
            steps = layer.space.steps[positions[block]] - metric.start
            keys = layer.keys_at(positions[block]).numpy()
            values = metric.values[positions[block]].astype(np.float64)
            of_steps, of_bias = weight[steps], bias[steps]
            with np.errstate(all="ignore"):
                for query in asked:
                    dots = pair_dots(keys, of_steps * wide[query]) + of_bias
                    found[query, block] += g[query, unit] * (dots * values)
    return found


def best_along(
    layer: Layer,
    queries: torch.Tensor,
    ranking: Ranking,
    find: FindMetric,
    selected: np.ndarray,
    stop: Stop | None,
) -> Hits:
    """The best rows of each query and group by (score, row id).

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in], finite.
        ranking: What is ranked, with directions.
        find: As for `contributions_along`.
        selected: bool [total], by position: the rows that take part, their keys finite.
        stop: Likewise.

    Returns:
        As a scan gives them. A row whose value is not finite is never ranked.
    """
    contribution = ranking.contribution
    assert contribution is not None
    assert contribution.directions is not None
    positions = np.flatnonzero(selected)
    check_cost(layer, len(positions), contribution.directions)
    shape = (len(queries), ranking.groups, ranking.k)
    ids, places = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    scores = np.full(shape, np.nan, np.float32)
    step = max(1, SCORE_BYTES // (8 * max(1, len(positions))))
    for first in range(0, len(queries), step):
        block = slice(first, first + step)
        directions = contribution.directions[block]
        found = contributions_along(layer, queries[block], directions, find, positions, stop)
        with np.errstate(over="ignore"):
            rounded = found.astype(np.float32) + np.float32(0)
        for number, of_query in enumerate(rounded):
            known = np.flatnonzero(np.isfinite(found[number]))
            rows, groups, rank = _best(layer, ranking, positions[known], of_query[known])
            cell = (first + number, groups, rank)
            places[cell], scores[cell] = positions[known][rows], of_query[known][rows]
            ids[cell] = layer.space.ids[places[cell]]
    grouping = ranking.grouping
    assert not isinstance(grouping, str)
    return Hits(ids, scores, places, pa.nulls(1) if grouping is None else grouping.values, {})


def _best(
    layer: Layer, ranking: Ranking, positions: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of the best k rows of each group, their groups, and their ranks: int64 [found]."""
    grouping, distinct = ranking.grouping, ranking.distinct
    assert not isinstance(grouping, str)
    groups = np.zeros(len(positions), np.int64)
    if grouping is not None:
        groups = grouping.codes[positions].astype(np.int64)
    merits = merit(torch.from_numpy(scores), ranking.order).numpy()
    order = np.lexsort((layer.space.ids[positions], -merits, groups))
    if distinct is not None:
        same = value_codes(Groups(distinct), layer.space, positions[order])
        order = order[first_of_each(groups[order], same)]
    of_order = groups[order]
    rank = np.arange(len(order)) - np.searchsorted(of_order, of_order)
    best = rank < ranking.k
    return order[best], of_order[best], rank[best]
