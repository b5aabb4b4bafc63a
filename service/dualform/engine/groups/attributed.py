"""What the rows of each group, of several layers together, added to a number that a model gave.

Along the number's gradient at each layer's output. All groups are added up, by layer, for a block
of inputs at a time, and the best kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.context import multiplies_in_float32
from dualform.engine.errors import ResourceExhaustedError
from dualform.engine.groups.best import BestGroups, best_groups
from dualform.engine.groups.pairs import Pairs
from dualform.engine.memory.fold import fold
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.tiles import Tile
from dualform.engine.memory.weights import weights_by_row
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.followed_along import (
    MOST_PRODUCTS,
    PRODUCTS_A_SECOND,
    SCORE_BYTES,
    FindMetric,
)
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients
from dualform.engine.totals.group_sums import GroupSum
from dualform.store.grouping import Grouping

TOTAL_BYTES = 128 << 20
"""Sums of all groups, by layer, that are held at once, for as many inputs as that is; for one at
least."""

_ROWS = 4096
"""Rows whose keys are held at once, in float64, where each step has its own metric."""

_FASTER = 8
"""How much faster a matrix product is there than one number after the other."""


class AttributedSum:
    """Adds up what rows added along directions, per input and group: a reducer.

    Args:
        pairs: What each input is asked about.
        coefficients: What each row counts, by its step.
        groups: The groups.
        wide: Multiply directions and values in float64, where float32 is too small for them.
    """

    values = True

    def __init__(
        self,
        pairs: Pairs,
        coefficients: LayerCoefficients,
        groups: Groups,
        *,
        wide: bool = False,
    ) -> None:
        self._pairs = pairs
        self._wide, self.once = wide, not wide
        self._bias = None if pairs.bias is None else pairs.bias[:, None]
        self._coefficients = coefficients
        self._sum = GroupSum(pairs.count, groups, absolute=False)

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile, with values, and its weights, [m, rows]."""
        assert tile.values is not None
        of_weight, of_bias = row_coefficients(self._coefficients, tile.steps)
        parts = weights.to(torch.float64, copy=True)
        if of_bias is None:
            parts.mul_(of_weight)
        else:
            beside = of_bias if self._bias is None else self._bias * of_bias
            torch.addcmul(beside, parts, of_weight, out=parts)
        directions = self._pairs.directions
        parts *= weights_by_row(directions, tile.values, wide=self._wide, faiss=tile.faiss)
        self._sum.update(tile, self._pairs.fold(parts))

    def merge(self, other: AttributedSum) -> None:
        """Take what another added up: of the same inputs, and of other rows."""
        ours, theirs = self._pairs, other._pairs
        same = ours.count == theirs.count and torch.equal(ours.directions, theirs.directions)
        if not same or not torch.equal(ours.queries, theirs.queries):
            raise ValueError("only answers to the same question can be merged")
        self._sum.merge(other._sum)

    def result(self) -> np.ndarray:
        """float64 [inputs, groups], in the order of the groups' values; a view, group by group in
        memory: only the layers' sum is turned round."""
        return np.asarray(self._sum.by_group().T)


@dataclass(frozen=True)
class PreparedLayer:
    """One of the layers that are asked about, its column and filter looked up.

    Attributes:
        layer: Which.
        pairs: What each input is asked about.
        grouping: The groups of all layers, with the codes of this one's rows.
        selected: bool [total], by position: the rows that take part.
        coefficients: What each row counts; None where each step has its own metric.
        find: Gives a unit's metric there.
    """

    layer: Layer
    pairs: Pairs
    grouping: Grouping
    selected: np.ndarray
    coefficients: LayerCoefficients | None
    find: FindMetric


@dataclass(frozen=True)
class Attributed:
    """The best groups of some inputs, or the sums of all.

    Attributes:
        best: The best; None where all were asked for.
        by_layer: float64 [n, k, layers], what the best groups' rows of each layer add up to; NaN
            where fewer groups have rows. Without k [n, groups, 1]: of all layers.
        rows: float64 [n, layers], what all rows that took part add up to.
    """

    best: BestGroups | None
    by_layer: np.ndarray
    rows: np.ndarray


def block_inputs(groups: int, layers: int) -> int:
    """For how many inputs the sums of so many groups are held at a time."""
    return max(1, TOTAL_BYTES // (8 * max(1, groups) * max(1, layers)))


def attributed(
    layers: Sequence[PreparedLayer],
    counts: np.ndarray,
    k: int | None,
    order: str,
    stop: Stop | None,
) -> Attributed:
    """The best groups, or all.

    Args:
        layers: What is asked of each; of the same groups.
        counts: int64 [groups], the rows of each that take part, of all layers.
        k: Groups per input; None for all.
        order: "largest", "smallest" or "absolute".
        stop: Asked between tiles.

    Raises:
        ResourceExhaustedError: It would take too long where rows have no coefficients.
    """
    followed = [asked for asked in layers if asked.coefficients is None]
    check_costs(
        (asked.layer, asked.pairs, int(np.count_nonzero(asked.selected))) for asked in followed
    )

    def sums(first: int, last: int) -> list[np.ndarray]:
        return [layer_sums(asked, first, last, stop) for asked in layers]

    size = block_inputs(len(counts), len(layers))
    return best_attributed(sums, layers[0].pairs.count, size, counts, k, order, stop)


def best_attributed(
    sums_of: Callable[[int, int], Sequence[np.ndarray]],
    count: int,
    size: int,
    counts: np.ndarray,
    k: int | None,
    order: str,
    stop: Stop | None = None,
) -> Attributed:
    """The best groups, or all, for some inputs at a time.

    Args:
        sums_of: Gives all groups' sums for the inputs from first to last: float64 [n, groups], one
            for each layer.
        count: How many inputs there are.
        size: For how many sums are held at a time.
        counts, k, order, stop: As for `attributed`.
    """
    best, by_layer, rows_of = [], [], []
    for first in range(0, count, size):
        last = min(first + size, count)
        sums = sums_of(first, last)
        rows_of.append(np.stack([of_layer.sum(axis=1) for of_layer in sums], axis=1))
        whole = sums[0].copy(order="K")
        for of_layer in sums[1:]:
            whole += of_layer
        if k is None:
            by_layer.append(whole[:, :, None])
            continue
        found = best_groups(np.ascontiguousarray(whole), counts, k, order, stop)
        best.append(found)
        codes = np.maximum(found.codes, 0)
        chosen = np.stack([np.take_along_axis(each, codes, axis=1) for each in sums], axis=2)
        by_layer.append(np.where(found.codes[:, :, None] < 0, np.nan, chosen + 0.0))
    joined = None if k is None else BestGroups.join(best)
    return Attributed(joined, np.concatenate(by_layer), np.concatenate(rows_of))


def layer_sums(asked: PreparedLayer, first: int, last: int, stop: Stop | None) -> np.ndarray:
    """Of one layer and the inputs from first to last, float64 [n, groups]."""
    layer, pairs = asked.layer, asked.pairs.part(first, last)
    groups = len(asked.grouping.values)
    if not len(pairs.inputs):
        return np.zeros((pairs.count, groups))
    if asked.coefficients is not None:
        pairs = pairs.few()
        for wide in (False, True) if multiplies_in_float32() else (True,):
            total = AttributedSum(pairs, asked.coefficients, Groups(asked.grouping), wide=wide)
            fold(layer, pairs.queries, asked.selected, [total], stop)
            found = total.result()
            if np.isfinite(found).all():
                break
        return found  # a row that is not finite makes its group's sum so
    return _followed_sums(asked, pairs, stop)


def _followed_sums(asked: PreparedLayer, pairs: Pairs, stop: Stop | None) -> np.ndarray:
    """Likewise where each step has its own metric: a row r of step s adds

        sum_j e_r[j] (sum_i A_s[j, i] x_r[i] q_j[i] + a'_s[j] h_j)

    to an input, with q_j = sum_p g_p[j] x_p and h_j = sum_p g_p[j] over its places p: a unit's
    metric is put to the keys once, and multiplied with all inputs.
    """
    layer, positions = asked.layer, np.flatnonzero(asked.selected)
    codes, groups = asked.grouping.codes[positions], len(asked.grouping.values)
    sums = np.zeros((pairs.count, groups))
    step = max(1, SCORE_BYTES // (8 * max(1, len(positions))))
    for first in range(0, pairs.count, step):
        some = pairs.part(first, min(pairs.count, first + step))
        found = torch.zeros((some.count, len(positions)), dtype=torch.float64)
        queries, g = some.queries.double(), some.directions.double()
        for unit in torch.nonzero((g != 0).any(dim=0))[:, 0].tolist():
            metric = asked.find(unit)
            of_unit = some.fold(queries * g[:, unit, None])
            of_bias = some.fold(g[:, unit])
            for start in range(0, len(positions), _ROWS):
                check_stop(stop)
                block = positions[start : start + _ROWS]
                steps = torch.from_numpy(layer.space.steps[block] - metric.start)
                values = torch.from_numpy(metric.values[block]).double()
                seen = layer.keys_at(block).double().mul_(metric.weight[steps])
                dots = of_unit @ seen.T
                dots += torch.outer(of_bias, metric.bias[steps])
                found[:, start : start + _ROWS] += dots.mul_(values)
        for number, of_input in enumerate(found.numpy(), first):
            sums[number] = np.bincount(codes, of_input, groups)
    return sums


def check_costs(layers: Iterable[tuple[Layer, Pairs, int]]) -> None:
    """Refuse what would take too long, of all layers together.

    Args:
        layers: Those where each step has its own metric, what is asked of each, and how many of its
            rows take part.

    Raises:
        ResourceExhaustedError: It would.
    """
    products, count = 0.0, 0
    for layer, pairs, rows in layers:
        used = pairs.directions != 0
        of_input = pairs.fold(used.double()) > 0
        units, inputs = int(used.any(dim=0).sum()), int(of_input.sum())
        # A metric's own pass, its product with the keys, and a matrix product, which is faster.
        passes = units * (layer.rows + rows) + inputs * rows / _FASTER
        products += layer.d_in * passes
        count += 1
    if products > MOST_PRODUCTS:
        raise ResourceExhaustedError(
            "under an optimizer without coefficients each output unit's metric takes a pass over "
            f"its layer's rows: the {count} layers here are {products:.1e} products, about "
            f"{products / PRODUCTS_A_SECOND:,.0f} s, and at most {MOST_PRODUCTS:.0e} are taken: "
            "ask about fewer of them with layers=, the last ones first, with a filter or with "
            "fewer inputs",
            field="layers",
            reason="TOO_COSTLY",
        )
