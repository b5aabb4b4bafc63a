"""Watching one gradient between backward and step: was it zeroed, and by what was it scaled?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# Elements of the sample: the norm ratio of float32 numbers is then good to about 1e-9, and 4e-10
# from the first scaled gradient on. Loops that never scale need not pay for the larger one.
_FEW, _MANY = 1_024, 8_192
_ROUNDINGS = 8 * 2.0**-24  # unscaling, clipping and averaging round once each


@dataclass(frozen=True)
class Scale:
    """The gradient at the step, as a multiple of what backward accumulated.

    Attributes:
        factor: The multiple; NaN where the sample, empty or all zeros, cannot tell.
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
    """

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        self._stride = self._next_stride = _stride(shape, _FEW)
        self._sample: np.ndarray | None = None
        self._version = self._pointer = -1

    def accumulated(self, grad: torch.Tensor) -> None:
        """Backward has just accumulated into `grad`."""
        self._stride = self._next_stride
        self._sample = self._rows(grad).copy()
        self._version, self._pointer = grad._version, grad.data_ptr()

    def untouched(self, grad: torch.Tensor) -> bool:
        """Nothing that autograd counts has happened to `grad` (edits of `.data` do not count)."""
        return grad._version == self._version and grad.data_ptr() == self._pointer

    def sampled(self, grad: torch.Tensor) -> bool:
        """The rows that the sample takes are not all zero."""
        return bool(self._rows(grad).any())

    def zeroed(self, grad: torch.Tensor) -> bool:
        """The gradient is zero now and backward did not leave it so."""
        if self.sampled(grad) or bool(grad.any()):
            return False
        was_zero = self._sample is None or not self._sample.any()
        return not (was_zero and self.untouched(grad))

    def scale(self, grad: torch.Tensor) -> Scale:
        """Compare the gradient with the sample, element by element in float64."""
        if self._sample is None:
            return Scale(float("nan"))
        before = self._sample.astype(np.float64)
        now = self._rows(grad).astype(np.float64)
        self._next_stride = _stride(self._shape, _MANY)
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

    def _rows(self, grad: torch.Tensor) -> np.ndarray:
        grad = grad.detach()
        if grad.is_cpu and grad.dtype is torch.float32:
            rows: np.ndarray = grad.numpy()
            return rows[:: self._stride]
        return np.asarray(grad[:: self._stride].double().cpu().numpy())


def _stride(shape: torch.Size, elements: int) -> int:
    """Every how many rows one is taken, to get about so many elements."""
    rows = max(1, -(-elements // max(1, shape[1:].numel())))
    return max(1, shape[0] // rows)
