"""Watching one gradient between backward and step: was it zeroed, and by what was it scaled?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dualform.record.buffers import dot, gram, host_array
from dualform.record.copies import NONE, Copies

_ELEMENTS = 4_096  # of the sample: the norm ratio of float32 numbers is then good to 5e-10
_ROUNDINGS = 8 * 2.0**-24  # unscaling, clipping and averaging round once each
_DENORMAL = 1e-37  # below this float32 numbers have fewer digits


_Part = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """The gradient at the step, as a multiple of what backward accumulated.

    Attributes:
        factor: The multiple; NaN where the sample, empty or all zeros, cannot tell, infinity where
            the gradient is not finite.
        uniform: Every element has it; otherwise no factor explains the change.
        plateau: Several elements share the largest magnitude, as after clipping by value.
    """

    factor: float
    uniform: bool = True
    plateau: bool = False


class GradientWatch:
    """Keeps a sample of evenly spaced whole rows of a gradient as backward left it.

    Args:
        shape: Of what is watched.
        part: What of a gradient is watched; None for all of it.
        copies: Bring it from a device.
    """

    def __init__(self, shape: torch.Size, part: _Part | None = None, copies: Copies = NONE) -> None:
        self._copies = copies
        self._stride = _stride(shape, _ELEMENTS)
        self._part = part
        self._sample: np.ndarray | None = None
        self._version = self._pointer = -1

    def begin(self, step: bool) -> None:
        """The gradient was zeroed, or with `step` a step begins."""

    def before(self, grad: torch.Tensor | None) -> None:
        """A backward is going to add to `grad`."""

    def averaged(self, grad: torch.Tensor | None) -> None:
        """A backward has ended, and gradients were averaged over ranks, if at all."""

    def unexplained(self, grad: torch.Tensor) -> bool:
        """The gradient holds something, though nothing was recorded of this step so far."""
        return self.sampled(grad)

    def forget(self) -> None:
        """Another parameter's gradient is watched from now on."""
        self._sample = None
        self._version = self._pointer = -1

    def accumulated(self, grad: torch.Tensor) -> None:
        """Backward has just accumulated into `grad`."""
        self._keep(grad)
        self._version, self._pointer = grad._version, grad.data_ptr()

    def look_ahead(self, grad: torch.Tensor | None) -> None:
        """The gradient is about to be compared with the sample."""
        if grad is not None and self._copies.takes(grad):
            self._copies.look_ahead(self._some(grad))

    def untouched(self, grad: torch.Tensor) -> bool:
        """Nothing that autograd counts has happened to `grad` (edits of `.data` do not count)."""
        return grad._version == self._version and grad.data_ptr() == self._pointer

    def sampled(self, grad: torch.Tensor) -> bool:
        """The rows that the sample takes are not all zero."""
        return bool(self._rows(grad).any())

    def zeroed(self, grad: torch.Tensor) -> bool:
        """The gradient is zero now and backward did not leave it so."""
        if self.sampled(grad) or bool((grad if self._part is None else self._part(grad)).any()):
            return False
        self._copies.wait()
        was_zero = self._sample is None or not self._sample.any()
        return not (was_zero and self.untouched(grad))

    def scale(self, grad: torch.Tensor) -> Scale:
        """Compare the gradient with the sample, in float64."""
        self._copies.wait()
        before = self._sample
        if before is None:
            return Scale(float("nan"))
        pair = np.empty((2, *before.shape))
        pair[0], pair[1] = before, self._rows(grad)
        (bb, bn), (_, nn) = gram(pair.reshape(2, -1))
        if not math.isfinite(nn):
            return Scale(math.inf, uniform=False)
        if bb == 0.0:
            return Scale(float("nan"), uniform=nn == 0.0)
        factor = math.copysign(math.sqrt(nn / bb), bn)
        off = (pair[1] - factor * pair[0]).reshape(-1)
        if dot(off, off) <= _ROUNDINGS**2 * nn + off.size * _DENORMAL**2:
            return Scale(factor)
        magnitude = np.abs(pair[1])
        plateau = int((magnitude == magnitude.max()).sum()) > 1
        return Scale(factor, uniform=False, plateau=plateau)

    def _keep(self, grad: torch.Tensor) -> None:
        """Take the sample; from a device it is there once copies were waited for."""
        if not (self._copies.sending and self._copies.takes(grad)):
            self._sample = self._rows(grad).copy()
            return
        some = self._some(grad)
        sample = self._sample = np.empty(some.shape)
        self._copies.send(some, torch.float64, lambda host: np.copyto(sample, host.numpy()))

    def _some(self, grad: torch.Tensor) -> torch.Tensor:
        """The rows that the sample takes, where the gradient lies."""
        whole = grad if self._part is None else self._part(grad)
        return whole.detach()[:: self._stride]

    def _rows(self, grad: torch.Tensor) -> np.ndarray:
        if not (self._copies.sending and self._copies.takes(grad)):
            whole = grad if self._part is None else self._part(grad)
            host = host_array(whole) if whole.dtype is torch.float32 else None
            if host is not None:
                return host[:: self._stride]
        return self._copies.read(self._some(grad)).astype(np.float64)


def _stride(shape: torch.Size, elements: int) -> int:
    """Every how many rows one is taken, to get about so many elements."""
    rows = max(1, -(-elements // max(1, shape[1:].numel())))
    return max(1, shape[0] // rows)
