"""What a row added to one output unit, or along a direction g: (c_t x_t.x + c'_t) (e_t.g), primes
for the bias; a unit is the direction that is 1 there and 0 elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dualform.engine.memory.float64 import pair_dots
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.tiles import Tile
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients

_FLOAT64_UNIT = 2.0**-52


@dataclass(frozen=True, eq=False)
class Contribution:
    """Contributions to one output unit, or along directions, after the steps that the coefficients
    are for.

    Attributes:
        coefficients: Of the layer's weight and bias; None where rows have none, and each step its
            own metric (`topk.followed`).
        unit: The output unit; -1 with directions.
        directions: float32 [n, d_out], one for each query; None for a unit.
    """

    coefficients: LayerCoefficients | None
    unit: int = -1
    directions: torch.Tensor | None = None

    def part(self, queries: slice) -> Contribution:
        """The same for some of the queries."""
        if self.directions is None:
            return self
        return replace(self, directions=self.directions[queries])

    def same_question(self, other: Contribution) -> bool:
        """Whether both are about the same unit or directions."""
        if self.directions is None or other.directions is None:
            return self.directions is other.directions and self.unit == other.unit
        return torch.equal(self.directions, other.directions)

    def at(
        self, layer: Layer, positions: np.ndarray, queries: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """c, c' and e.g, float64 [m], of rows at these positions, each for its own query, int64 [m]
        both, in any order. The sums of e.g are taken in an order that depends on nothing but d_out.
        """
        of_weight, of_bias = self.factors(layer.space.steps[positions])
        read, place = np.unique(positions, return_inverse=True)
        if self.directions is None:
            along = layer.values_at(read, self.unit).astype(np.float64)[place]
        else:
            values = layer.value_rows(read)[torch.from_numpy(place)]
            along = _along(values, self.directions[torch.from_numpy(queries)])
        return of_weight.numpy(), of_bias.numpy(), along

    def inside(
        self, tile: Tile, rows: np.ndarray, queries: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Likewise of rows of a tile by their places in it, each for its own query, int64 [m]
        both."""
        assert tile.values is not None
        of_weight, of_bias = self.factors(tile.steps[rows])
        values = tile.values[torch.from_numpy(rows)]
        if self.directions is None:
            along = values[:, self.unit].double().numpy()
        else:
            along = _along(values, self.directions[torch.from_numpy(queries)])
        return of_weight.numpy(), of_bias.numpy(), along

    def parts(self, tile: Tile, weights: torch.Tensor) -> torch.Tensor:
        """Contributions of a tile's rows, float64 [n, rows]; not finite where a value is not.

        Args:
            tile: With values.
            weights: Attention weights [n, rows], of all queries.
        """
        assert tile.values is not None
        of_weight, of_bias = self.factors(tile.steps)
        if self.directions is None:
            e = tile.values[:, self.unit].double()
        else:
            e = self.directions.double() @ tile.values.double().T
        return (weights.double() * of_weight + of_bias) * e

    def of_tile(
        self,
        tile: Tile,
        weights: torch.Tensor,
        errors: torch.Tensor,
        which: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Contributions of a tile's rows and bounds of their errors.

        Args:
            tile: With values.
            weights: Attention weights [n, rows].
            errors: float64 [n, 1], bounds of the weights' errors.
            which: The queries that the weights belong to, int64 [n]; None for all.

        Returns:
            float64 [n, rows] both; NaN, which is never ranked, where a value is not finite.
        """
        assert tile.values is not None
        of_weight, of_bias = self.factors(tile.steps)
        parts = weights.double() * of_weight
        if self.directions is None:
            e = tile.values[:, self.unit].double()
            e = torch.where(torch.isfinite(e), e, torch.nan)
            # Three float64 roundings on top of what the weight is off.
            rounding = (parts.abs() + of_bias.abs()) * e.abs() * 2.0**-50
            return (parts + of_bias) * e, errors * (of_weight * e).abs() + rounding
        g = self.directions if which is None else self.directions[torch.from_numpy(which)]
        g, values = g.double(), tile.values.double()
        e = g @ values.T
        e = torch.where(torch.isfinite(e), e, torch.nan)
        # The sum of d_out products in any order, with Cauchy-Schwarz for its size.
        off = torch.outer(
            torch.linalg.vector_norm(g, dim=1), torch.linalg.vector_norm(values, dim=1)
        ) * ((g.shape[1] + 4) * _FLOAT64_UNIT)
        size = parts.abs() + of_bias.abs()
        bound = errors * of_weight.abs() * (e.abs() + off) + size * (off + e.abs() * 2.0**-50)
        return (parts + of_bias) * e, bound

    def factors(self, steps: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """c and c' of rows of these steps, int64 [m]: float64 [m]."""
        assert self.coefficients is not None
        of_weight, of_bias = row_coefficients(self.coefficients, steps)
        return of_weight, torch.zeros_like(of_weight) if of_bias is None else of_bias


def _along(values: torch.Tensor, directions: torch.Tensor) -> np.ndarray:
    """e.g of rows with each one's direction, float32 [m, d_out] both: float64 [m]."""
    with np.errstate(all="ignore"):
        return pair_dots(values.numpy(), directions.numpy())
