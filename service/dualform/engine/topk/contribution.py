"""What a row added to one output unit: (c_t x_t.x + c'_t) e_t[u], primes for the bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients


@dataclass(frozen=True)
class Contribution:
    """Contributions to one output unit, after the steps that the coefficients are for.

    Attributes:
        coefficients: Of the layer's weight and bias.
        unit: The output unit.
    """

    coefficients: LayerCoefficients
    unit: int

    def at(self, layer: Layer, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """c, c' (float64 [m]) and e (float32 [m]) at these positions, int64 [m] and ascending."""
        of_weight, of_bias = self._factors(layer, positions, torch.device("cpu"))
        return of_weight.numpy(), of_bias.numpy(), layer.values_at(positions, self.unit)

    def of_tile(
        self,
        layer: Layer,
        positions: np.ndarray,
        weights: torch.Tensor,
        errors: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Contributions of a tile's rows and bounds of their errors.

        Args:
            layer: Whose tile.
            positions: int64 [rows].
            weights: Attention weights [n, rows].
            errors: float64 [n, 1], bounds of the weights' errors.
            values: float32 [rows, d_out].

        Returns:
            float64 [n, rows] both; NaN, which is never ranked, where a value is not finite.
        """
        of_weight, of_bias = self._factors(layer, positions, weights.device)
        e = values[:, self.unit].double()
        e = torch.where(torch.isfinite(e), e, torch.nan)
        parts = weights.double() * of_weight
        # Three float64 roundings on top of what the weight is off.
        rounding = (parts.abs() + of_bias.abs()) * e.abs() * 2.0**-50
        return (parts + of_bias) * e, errors * (of_weight * e).abs() + rounding

    def _factors(
        self, layer: Layer, positions: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_weight, of_bias = row_coefficients(layer, self.coefficients, positions, device)
        return of_weight, torch.zeros_like(of_weight) if of_bias is None else of_bias
