"""What rows add to an output: their contributions (c_t x_t.x + c'_t) e_t, added up.

Weights are float32 products; the sum over rows is float64 throughout, because contributions cancel:
a float32 sum over a tile's rows loses up to a hundred times more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dualform.engine.memory.fold import Reducer, fold
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups, tile_runs
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients
from dualform.engine.totals.group_sums import GroupTotals
from dualform.store.grouping import Grouping

REBUILD_BYTES = 256 << 20
_SPANS = 512


class WeightedValues:
    """Adds up contributions per group: a reducer.

    Args:
        queries: Number of queries.
        d_out: Length of a value.
        coefficients: What each row counts, by its step.
        groups: The groups to keep apart.
        stop: Asked from time to time where a tile has many groups.
    """

    values, once = True, False

    def __init__(
        self,
        queries: int,
        d_out: int,
        coefficients: LayerCoefficients,
        groups: Groups,
        stop: Stop | None = None,
    ) -> None:
        self._stop = stop
        self._coefficients = coefficients
        self._groups = groups
        self._totals = GroupTotals(groups, (queries, d_out))

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, [n, rows]."""
        assert tile.values is not None
        of_weight, of_bias = row_coefficients(self._coefficients, tile.steps)
        factors = weights.to(torch.float64, copy=True).mul_(of_weight)
        if of_bias is not None:
            factors += of_bias
        values = tile.values.double()
        found = tile_runs(self._groups, tile.table, tile.positions)
        totals = self._totals.tensor()
        if found.order is not None:
            order = found.order
            factors, values = factors[:, order], values[order]
        for number, (group, first, last) in enumerate(found.spans):
            if number % _SPANS == 0:
                check_stop(self._stop)
            totals[group].addmm_(factors[:, first:last], values[first:last])

    def merge(self, other: WeightedValues) -> None:
        """Take what another added up of other rows, by the same coefficients."""
        self._totals.merge(other._totals)

    def result(self) -> np.ndarray:
        """float64 [n, groups, d_out], in the order of the groups' values."""
        return np.ascontiguousarray(self._totals.ordered().permute(1, 0, 2).numpy())


def rows_part(
    layer: Layer,
    queries: torch.Tensor,
    coefficients: LayerCoefficients,
    grouping: Grouping | None,
    selected: np.ndarray,
    stop: Stop | None,
    also: Sequence[Reducer] = (),
) -> np.ndarray:
    """What the selected rows add to the output: float64 [n, groups, d_out]; without groups, one.

    A few queries are carried through the rows. For many it is cheaper to add up the rows' outer
    products first, W = sum c_t e_t (x) x_t, and multiply once: Proposition 1 of the paper. Then
    `also`, what else takes the scan's tiles, has a scan of its own.
    """
    manifest = layer.manifest
    groups = 1 if grouping is None else len(grouping.values)
    cheaper = len(queries) * (manifest.d_in + manifest.d_out) > manifest.d_in * manifest.d_out
    if cheaper and groups * manifest.d_in * manifest.d_out * 8 <= REBUILD_BYTES:
        weight, bias = rebuild(layer, coefficients, grouping, selected, stop)
        out = torch.einsum("nd,god->ngo", queries.double(), weight)
        if also:
            fold(layer, queries, selected, also, stop)
        return np.asarray((out if bias is None else out + bias).numpy())
    total = WeightedValues(len(queries), manifest.d_out, coefficients, Groups(grouping), stop)
    fold(layer, queries, selected, [total, *also], stop)
    return total.result()


def rebuild(
    layer: Layer,
    coefficients: LayerCoefficients,
    grouping: Grouping | None,
    selected: np.ndarray,
    stop: Stop | None = None,
    watch: Callable[[Tile], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add up the selected rows' outer products, and their values for the bias.

    Args:
        layer: Whose rows.
        coefficients: What each row counts.
        grouping: Groups to keep apart, or None for a single one.
        selected: bool [total], by position.
        stop: Asked between tiles.
        watch: Called with each tile.

    Returns:
        Weight, float64 [groups, d_out, d_in], and bias, float64 [groups, d_out], None without one.
    """
    manifest, kept_apart = layer.manifest, Groups(grouping)
    groups = len(kept_apart)
    weight = torch.zeros((groups, manifest.d_out, manifest.d_in), dtype=torch.float64, device="cpu")
    bias = None
    if coefficients.bias is not None:
        bias = torch.zeros((groups, manifest.d_out), dtype=torch.float64, device="cpu")
    for shard in layer.shards:
        inside = selected[shard.start : shard.start + shard.rows]
        for tile in shard.tiles(inside, 1, values=True, stop=stop):
            assert tile.values is not None
            of_weight, of_bias = row_coefficients(coefficients, tile.steps)
            keys, values = tile.keys.double(), tile.values.double()
            found = tile_runs(kept_apart, tile.table, tile.positions)
            if found.order is not None:
                order = found.order
                keys, values, of_weight = keys[order], values[order], of_weight[order]
                of_bias = None if of_bias is None else of_bias[order]
            for group, first, last in found.spans:
                group_values = values[first:last]
                scaled = group_values * of_weight[first:last, None]
                weight[group].addmm_(scaled.T, keys[first:last])
                if bias is not None and of_bias is not None:
                    bias[group].addmv_(group_values.T, of_bias[first:last])
            if watch is not None:
                watch(tile)
    return weight, bias
