"""How much each row counts: the coefficients (c_t, c'_t) that an optimizer's settings imply.

Irie et al. (2022), eq. dual_linear, for the whole SGD family (`dualform.store.ledger`); with them,
what a stored state left behind of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from dualform.engine.memory.states import State, product
from dualform.store.ledger import Coefficients, Ledger


@dataclass(frozen=True)
class LayerCoefficients:
    """Coefficients of a layer's weight and, where it has one, of its bias, after some steps.

    Attributes:
        start: The step from whose state they start; rows of earlier steps have none.
    """

    weight: Coefficients
    bias: Coefficients | None
    start: int = 0

    def without_rows(self) -> LayerCoefficients:
        """Only what the state at `start` counts."""
        none = np.zeros(0)
        bias = None if self.bias is None else replace(self.bias, c=none)
        return LayerCoefficients(replace(self.weight, c=none), bias, self.start)


class Parameters(Protocol):
    """The names of a layer's parameters, as manifests of indexes and of recordings have them."""

    @property
    def weight(self) -> str: ...

    @property
    def bias(self) -> str | None: ...


def layer_coefficients(
    ledger: Ledger, layer: Parameters, at_step: int, start: int = 0
) -> LayerCoefficients:
    """The layer's coefficients after at_step steps, from the state after `start`."""
    return LayerCoefficients(
        ledger.coefficients(layer.weight, at_step, start),
        None if layer.bias is None else ledger.coefficients(layer.bias, at_step, start),
        start,
    )


def step_coefficients(ledger: Ledger, layer: Parameters) -> LayerCoefficients:
    """What each step's rows counted in that step alone, later decay and momentum left out."""
    return LayerCoefficients(
        Coefficients(0.0, 0.0, ledger.step_sizes(layer.weight)),
        None if layer.bias is None else Coefficients(0.0, 0.0, ledger.step_sizes(layer.bias)),
    )


def initial_part(
    layer: Parameters, state: State, coefficients: LayerCoefficients, queries: torch.Tensor
) -> np.ndarray:
    """What the weight, bias and momentum buffers of a state left behind: float64 [n, d_out].

    Args:
        layer: Names of its parameters.
        state: From which the coefficients start.
        coefficients: After how many steps.
        queries: float32 [n, d_in].
    """
    wide = queries.double()
    of_weight = coefficients.weight
    out = of_weight.p * product(wide, state[layer.weight])
    momentum = state.get(f"momentum:{layer.weight}")
    if momentum is not None:
        out += of_weight.r * product(wide, momentum)
    if layer.bias is not None and coefficients.bias is not None:
        of_bias = coefficients.bias
        out += of_bias.p * state[layer.bias].double()
        momentum = state.get(f"momentum:{layer.bias}")
        if momentum is not None:
            out += of_bias.r * momentum.double()
    return np.asarray(out.numpy())


def plain_output(layer: Parameters, state: State, queries: torch.Tensor) -> np.ndarray:
    """W x + b by stored tensors: float64 [n, d_out]."""
    out = product(queries.double(), state[layer.weight])
    if layer.bias is not None:
        out += state[layer.bias].double()
    return np.asarray(out.numpy())


def row_coefficients(
    coefficients: LayerCoefficients, steps: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """c, and c' where there is a bias, of rows of these steps, int64 [m]: float64 [m]."""
    steps = steps - coefficients.start
    of_weight = torch.from_numpy(coefficients.weight.c[steps])
    if coefficients.bias is None:
        return of_weight, None
    return of_weight, torch.from_numpy(coefficients.bias.c[steps])


def left_behind(
    state: Mapping[str, np.ndarray], parameter: str, coefficients: Coefficients
) -> np.ndarray:
    """What one parameter and its momentum buffer left behind: float64, the parameter's shape."""
    out = coefficients.p * state[parameter].astype(np.float64)
    momentum = state.get(f"momentum:{parameter}")
    if momentum is not None:
        out += coefficients.r * momentum.astype(np.float64)
    return np.asarray(out)
