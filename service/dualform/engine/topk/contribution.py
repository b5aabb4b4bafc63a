"""What a row added to one output unit: (c_t x_t.x + c'_t) e_t[u], primes for the bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.tiles import Tile
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients


@dataclass(frozen=True)
class Contribution:
    """Contributions to one output unit, after the steps that the coefficients are for.

    Attributes:
        coefficients: Of the layer's weight and bias; None where rows have none, and each step its
            own metric (`topk.followed`).
        unit: The output unit.
    """

    coefficients: LayerCoefficients | None
    unit: int

    def at(self, layer: Layer, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """c, c' (float64 [m]) and e (float32 [m]) at these positions, int64 [m] and ascending."""
        of_weight, of_bias = self._factors(layer.space.steps[positions], torch.device("cpu"))
        return of_weight.numpy(), of_bias.numpy(), layer.values_at(positions, self.unit)

    def inside(self, tile: Tile, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Likewise of rows of a tile by their places in it, int64 [m]."""
        assert tile.values is not None
        of_weight, of_bias = self._factors(tile.steps[rows], torch.device("cpu"))
        values = tile.values[torch.from_numpy(rows), self.unit].cpu()
        return of_weight.numpy(), of_bias.numpy(), values.numpy()

    def of_tile(
        self, tile: Tile, weights: torch.Tensor, errors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Contributions of a tile's rows and bounds of their errors.

        Args:
            tile: With values.
            weights: Attention weights [n, rows].
            errors: float64 [n, 1], bounds of the weights' errors.

        Returns:
            float64 [n, rows] both; NaN, which is never ranked, where a value is not finite.
        """
        assert tile.values is not None
        of_weight, of_bias = self._factors(tile.steps, weights.device)
        e = tile.values[:, self.unit].double()
        e = torch.where(torch.isfinite(e), e, torch.nan)
        parts = weights.double() * of_weight
        # Three float64 roundings on top of what the weight is off.
        rounding = (parts.abs() + of_bias.abs()) * e.abs() * 2.0**-50
        return (parts + of_bias) * e, errors * (of_weight * e).abs() + rounding

    def _factors(
        self, steps: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.coefficients is not None
        of_weight, of_bias = row_coefficients(self.coefficients, steps, device)
        return of_weight, torch.zeros_like(of_weight) if of_bias is None else of_bias
