"""The dual output: what the rows' contributions (c_t x_t.x + c'_t) e_t add up to.

Irie et al. (2022), eq. dual_linear, with coefficients for the whole SGD family
(`dualform.store.ledger`). Weights are float32 products; the sum over rows is float64 throughout,
because contributions cancel: a float32 sum over a tile's rows loses up to a hundred times more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dualform.engine.groups import runs
from dualform.engine.shards import Stop
from dualform.engine.weights import needs_float64, tile_weights
from dualform.store.grouping import Grouping
from dualform.store.index import IndexLayer
from dualform.store.ledger import Coefficients, Ledger

if TYPE_CHECKING:
    from dualform.engine.index import Layer


@dataclass(frozen=True)
class LayerCoefficients:
    """Coefficients of a layer's weight and, where it has one, of its bias, after some steps."""

    weight: Coefficients
    bias: Coefficients | None


def layer_coefficients(ledger: Ledger, layer: IndexLayer, at_step: int) -> LayerCoefficients:
    """The layer's coefficients after at_step steps."""
    return LayerCoefficients(
        ledger.coefficients(layer.weight, at_step),
        None if layer.bias is None else ledger.coefficients(layer.bias, at_step),
    )


def initial_part(
    layer: IndexLayer,
    state: Mapping[str, np.ndarray],
    coefficients: LayerCoefficients,
    queries: torch.Tensor,
) -> np.ndarray:
    """What initial weights, bias and momentum buffers left behind: float64 [n, d_out]."""
    weight = left_behind(state, layer.weight, coefficients.weight)
    out = queries.double().numpy() @ weight.T
    if layer.bias is not None and coefficients.bias is not None:
        out += left_behind(state, layer.bias, coefficients.bias)
    return np.asarray(out)


def plain_output(
    layer: IndexLayer, state: Mapping[str, np.ndarray], queries: torch.Tensor
) -> np.ndarray:
    """W x + b by stored weights: float64 [n, d_out]."""
    out = queries.double().numpy() @ state[layer.weight].astype(np.float64).T
    if layer.bias is not None:
        out += state[layer.bias].astype(np.float64)
    return np.asarray(out)


class WeightedValues:
    """Adds up contributions, whole or per group.

    Args:
        queries: Number of queries.
        d_out: Length of values.
        grouping: Groups, or None for a single one.
        device: Where tiles are.
    """

    def __init__(
        self, queries: int, d_out: int, grouping: Grouping | None, device: torch.device
    ) -> None:
        self._codes = None if grouping is None else grouping.codes
        groups = 1 if grouping is None else len(grouping.values)
        shape = (groups, queries, d_out)
        self._totals = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, positions: np.ndarray, factors: torch.Tensor, values: torch.Tensor) -> None:
        """Take a tile: positions int64 [rows], float64 factors [n, rows], values [rows, d_out]."""
        if self._codes is None:
            self._totals[0] += factors @ values
            return
        found = runs(self._codes[positions])
        if found.order is not None:
            order = found.order.to(factors.device)
            factors, values = factors[:, order], values[order]
        for group, first, last in found.spans:
            self._totals[group] += factors[:, first:last] @ values[first:last]

    def result(self) -> np.ndarray:
        """float64 [n, groups, d_out]."""
        return np.ascontiguousarray(self._totals.permute(1, 0, 2).cpu().numpy())


def scan(
    layer: Layer,
    queries: torch.Tensor,
    coefficients: LayerCoefficients,
    grouping: Grouping | None,
    selected: np.ndarray,
    device: torch.device,
    stop: Stop | None,
) -> np.ndarray:
    """Sum of the selected rows' contributions: float64 [n, groups, d_out]; without groups, one."""
    total = WeightedValues(len(queries), layer.manifest.d_out, grouping, device)
    norms = torch.linalg.vector_norm(queries.double(), dim=1)
    own = queries.to(device)
    of_weight = torch.from_numpy(coefficients.weight.c).to(device)
    of_bias = (
        None if coefficients.bias is None else torch.from_numpy(coefficients.bias.c).to(device)
    )
    for shard in layer.shards:
        wide = needs_float64(norms, shard)
        inside = selected[shard.start : shard.start + shard.rows]
        for tile in shard.tiles(inside, values=True, device=device, stop=stop):
            steps = torch.from_numpy(layer.space.steps[tile.positions]).to(device)
            weights = tile_weights(own, tile.keys, wide=wide)
            factors = weights.double().mul_(of_weight[steps])
            if of_bias is not None:
                factors += of_bias[steps]
            assert tile.values is not None
            total.update(tile.positions, factors, tile.values.double())
    return total.result()


def left_behind(
    state: Mapping[str, np.ndarray], parameter: str, coefficients: Coefficients
) -> np.ndarray:
    out = coefficients.p * state[parameter].astype(np.float64)
    momentum = state.get(f"momentum:{parameter}")
    if momentum is not None:
        out += coefficients.r * momentum.astype(np.float64)
    return np.asarray(out)
