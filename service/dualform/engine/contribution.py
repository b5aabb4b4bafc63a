"""What a row added to one output unit: (c_t x_t.x + c'_t) e_t[u], primes for the bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dualform.engine.output import LayerCoefficients

if TYPE_CHECKING:
    from dualform.engine.index import Layer


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
        of_weight, of_bias = self._factors(layer, positions)
        return of_weight, of_bias, layer.values_at(positions, self.unit)

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
        of_weight, of_bias = self._factors(layer, positions)
        e = values[:, self.unit].double()
        e = torch.where(torch.isfinite(e), e, torch.nan)
        c = torch.from_numpy(of_weight).to(weights.device)
        bias = torch.from_numpy(of_bias).to(weights.device)
        contributions = weights.double().mul_(c).add_(bias).mul_(e)
        # Three float64 roundings on top of what the weight is off.
        rounding = ((weights.double() * c).abs() + bias.abs()) * e.abs() * 2.0**-50
        return contributions, errors * (c * e).abs() + rounding

    def _factors(self, layer: Layer, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        steps = layer.space.steps[positions]
        bias = self.coefficients.bias
        zeros = np.zeros(len(steps))
        # Rows of later steps have no coefficient; the caller leaves them out.
        return self.coefficients.weight.c[steps], zeros if bias is None else bias.c[steps]
