"""Watching one gradient between backward and step: was it zeroed, and by what was it scaled?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_SAMPLE = 16_384  # elements: the norm ratio of float32 numbers is then good to about 3e-10
_ROUNDINGS = 8 * 2.0**-24  # unscaling, clipping and averaging round once each


@dataclass(frozen=True)
class Scale:
    """The gradient at the step, as a multiple of what backward accumulated.

    Attributes:
        factor: The multiple; NaN where the sample held zeros alone and cannot tell.
        uniform: Every element has it; otherwise no factor explains the change.
        plateau: Several elements share the largest magnitude, as after clipping by value.
    """

    factor: float
    uniform: bool = True
    plateau: bool = False


class GradientWatch:
    """Keeps a sample of evenly spaced whole rows of a gradient as backward left it.

    Args:
        shape: Of the parameter.

    Attributes:
        stride: Every how many rows the sample takes one.
    """

    def __init__(self, shape: torch.Size) -> None:
        per_row = max(1, shape[1:].numel())
        wanted = max(1, -(-_SAMPLE // per_row))
        self.stride = max(1, shape[0] // wanted)
        self._sample: torch.Tensor | None = None
        self._version = self._pointer = -1

    def accumulated(self, grad: torch.Tensor) -> None:
        """Backward has just accumulated into `grad`."""
        rows = grad.detach()[:: self.stride]
        if self._sample is None or self._sample.dtype != rows.dtype:
            self._sample = rows.clone()
        else:
            self._sample.copy_(rows)
        self._version, self._pointer = grad._version, grad.data_ptr()

    def untouched(self, grad: torch.Tensor) -> bool:
        """Nothing that autograd counts has happened to `grad` (edits of `.data` do not count)."""
        return grad._version == self._version and grad.data_ptr() == self._pointer

    def zeroed(self, grad: torch.Tensor) -> bool:
        """The gradient is zero now and backward did not leave it so."""
        if bool(grad[:: self.stride].any()) or bool(grad.any()):
            return False
        was_zero = self._sample is None or not bool(self._sample.any())
        return not (was_zero and self.untouched(grad))

    def scale(self, grad: torch.Tensor) -> Scale:
        """Compare the gradient with the sample, element by element in float64."""
        if self._sample is None:
            return Scale(1.0)
        before = _float64(self._sample)
        now = _float64(grad.detach()[:: self.stride])
        norm = float(np.sqrt((before * before).sum()))
        if norm == 0.0:
            return Scale(float("nan"), uniform=not now.any())
        factor = float(np.sqrt((now * now).sum())) / norm
        if float((now * before).sum()) < 0:
            factor = -factor
        expected = factor * before
        off = np.abs(now - expected) > _ROUNDINGS * np.abs(expected) + 1e-37
        if not off.any():
            return Scale(factor)
        magnitude = np.abs(now)
        plateau = int((magnitude == magnitude.max()).sum()) > 1
        return Scale(factor, uniform=False, plateau=plateau)


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.double().cpu().numpy()).reshape(-1)
