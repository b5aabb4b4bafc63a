"""Do the recorded rows add up to the gradient, and the steps to the weights?

Freivalds' test with private random vectors u and v, fixed for the run: one read of the gradient
per step for u'Gv against the rows' sum of (u.e)(x.v). A failed test is confirmed against the whole
gradient in float64 before a layer is called inexact. The weights are checked through u'Wv, which
the ledger's algebra predicts from the same numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dualform.record.capture import Pass
from dualform.record.watch import GradientWatch
from dualform.store.ledger import LedgerRow

SCREEN = 5e-6
"""Relative difference of the two sides of Freivalds' test above which the whole is compared."""

TOLERANCE = 3e-6
"""Largest |G - sum e x'| / (|E| |X|), Frobenius norms, that float32 backward passes explain."""

Whole = Callable[[float | None], float]
"""The slow comparison: the relative error for a scale, or the scale itself for None."""

_EPS = 2.0**-24
_CHUNK = 4096


@dataclass(frozen=True)
class Verdict:
    """One parameter at one step.

    Attributes:
        took_part: There is a gradient.
        zeroed: The gradient is zero, though backward brought something else.
        scale: See `LedgerRow.scale`.
        probe: u'Gv for a weight, u.g for a bias, of the gradient at the step, float64.
        size: An estimate of the gradient's norm, for the rounding errors to expect.
        fault: What is wrong, or None: "mismatch", "clipped", "edited" or "not finite".
    """

    took_part: bool
    zeroed: bool = False
    scale: float = 1.0
    probe: float = 0.0
    size: float = 0.0
    fault: str | None = None


class GradientCheck:
    """Freivalds' test for one layer.

    Args:
        d_in: Length of a key.
        d_out: Length of a value.
        random: A generator of the recorder's own, so that training's random state stays as it is.

    Attributes:
        u: float32 [d_out], standard normal.
        v: float32 [d_in], standard normal.
    """

    def __init__(self, d_in: int, d_out: int, random: np.random.Generator) -> None:
        self.u = torch.from_numpy(random.standard_normal(d_out, np.float32))
        self.v = torch.from_numpy(random.standard_normal(d_in, np.float32))
        self._u64 = self.u.double().numpy()

    def probe(self, tensor: torch.Tensor) -> tuple[float, float]:
        """u'Tv for a matrix, u.t for a vector, float64; and an estimate of the tensor's norm."""
        tensor = tensor.detach()
        if tensor.dim() == 2:
            tensor = torch.mv(tensor, self.v.to(tensor.device))
        reduced = tensor.cpu().numpy()
        return float((reduced * self._u64).sum()), math.sqrt(float((reduced * reduced).sum()))

    def weight(
        self, grad: torch.Tensor | None, watch: GradientWatch, passes: Sequence[Pass]
    ) -> Verdict:
        """Test the weight's gradient at the step against the rows."""
        if grad is None:
            return Verdict(False)
        grad = grad.detach()
        probe, size = self.probe(grad)
        if size == 0.0 and watch.zeroed(grad):
            return Verdict(True, zeroed=True)
        total = spread_e = spread_x = 0.0
        for item in passes:
            assert item.value_probe is not None
            e, x = item.value_probe.numpy().astype(np.float64), item.key_probe.numpy()
            total -= float((e * x).sum())
            spread_e += float((e * e).sum())
            spread_x += float((x.astype(np.float64) ** 2).sum())
        spread = math.sqrt(spread_e * spread_x)
        return _judge(
            grad, watch, probe, size, total, spread, lambda s: _whole_weight(grad, passes, s)
        )

    def bias(
        self, grad: torch.Tensor | None, watch: GradientWatch, passes: Sequence[Pass]
    ) -> Verdict:
        """Test the bias's gradient at the step against the rows."""
        if grad is None:
            return Verdict(False)
        grad = grad.detach()
        probe, size = self.probe(grad)
        if size == 0.0 and watch.zeroed(grad):
            return Verdict(True, zeroed=True)
        total = spread = 0.0
        rows = 0
        for item in passes:
            assert item.value_probe is not None
            e = item.value_probe.numpy().astype(np.float64)
            total -= float(e.sum())
            spread += float((e * e).sum())
            rows += item.rows
        spread = math.sqrt(spread * rows)
        return _judge(
            grad, watch, probe, size, total, spread, lambda s: _whole_bias(grad, passes, s)
        )


class WeightProbe:
    """Predicts u'Wv and u'mv (u.b, u.m for a bias) step by step, to be compared with the real ones.

    Rounding is followed beside them: every step rounds the weights and the momentum buffer once,
    and its gradient has the error of a float32 product.
    """

    def __init__(self) -> None:
        self.since = 0
        self._state = np.zeros(2)
        self._size = np.zeros(2)
        self._noise = np.zeros(2)

    def reset(self, step: int, state: Sequence[tuple[float, float]]) -> None:
        """Take the real (probe, norm) of the weight and of the momentum buffer as they are."""
        self.since = step
        self._state = np.array([probe for probe, _ in state])
        self._size = np.array([size for _, size in state])
        self._noise = 8 * _EPS * self._size

    def advance(self, row: LedgerRow, verdict: Verdict) -> None:
        """Follow one step of the optimizer."""
        if not verdict.took_part:
            return
        (a00, a01, a10, a11), (b0, b1) = _transition(replace(row, step=0, parameter=""))
        e = 0.0 if row.scale == 0 else -verdict.probe / row.scale
        g = 0.0 if row.scale == 0 else abs(verdict.size / row.scale)
        w, m = self._state
        self._state = np.array([a00 * w + a01 * m + b0 * e, a10 * w + a11 * m + b1 * e])
        a00, a01, a10, a11, b0, b1 = map(abs, (a00, a01, a10, a11, b0, b1))
        w, m = self._size
        self._size = np.array([a00 * w + a01 * m + b0 * g, a10 * w + a11 * m + b1 * g])
        n, k = self._noise
        n, k = a00 * n + a01 * k + 16 * _EPS * b0 * g, a10 * n + a11 * k + 16 * _EPS * b1 * g
        self._noise = np.array([n, k]) + 4 * _EPS * self._size

    def agrees(self, state: Sequence[tuple[float, float]]) -> bool:
        """Whether the real (probe, norm) of weight and momentum buffer are as predicted."""
        real = np.array([probe for probe, _ in state])
        size = np.array([norm for _, norm in state])
        return bool((np.abs(real - self._state) <= 4 * self._noise + 32 * _EPS * size).all())


def _judge(
    grad: torch.Tensor,
    watch: GradientWatch,
    probe: float,
    size: float,
    total: float,
    spread: float,
    whole: Whole,
) -> Verdict:
    """Find the scale, then test; `total` and `spread` are the rows' side and its magnitude."""
    if not math.isfinite(probe):
        return Verdict(True, scale=1.0, fault="not finite")
    factor = 1.0
    compared = not watch.untouched(grad)
    if not compared and abs(probe - total) > SCREEN * spread:
        compared = True  # perhaps an edit of `.data`, which autograd does not count
    if compared:
        scale = watch.scale(grad)
        factor = scale.factor
        if math.isnan(factor):  # the sample was zero: take the scale from all rows
            factor = whole(None)
            factor = 1.0 if math.isnan(factor) else factor
        if not scale.uniform:
            fault = "clipped" if scale.plateau else "edited"
            return Verdict(True, False, factor, probe, size, fault)
    if abs(probe - factor * total) > SCREEN * abs(factor) * spread and not (
        whole(factor) <= TOLERANCE
    ):
        return Verdict(True, False, factor, probe, size, "mismatch")
    return Verdict(True, False, factor, probe, size)


def _whole_weight(grad: torch.Tensor, passes: Sequence[Pass], scale: float | None) -> float:
    rows = torch.zeros(grad.shape, dtype=torch.float64)
    spread_e = spread_x = 0.0
    for item in passes:
        assert item.value is not None
        assert item.key is not None
        for start in range(0, item.rows, _CHUNK):
            e = item.value.tensor[start : start + _CHUNK].double()
            x = item.key.tensor[start : start + _CHUNK].double()
            rows -= e.T @ x
            spread_e += float((e * e).sum())
            spread_x += float((x * x).sum())
    return _relative(grad, rows, scale, math.sqrt(spread_e * spread_x))


def _whole_bias(grad: torch.Tensor, passes: Sequence[Pass], scale: float | None) -> float:
    rows = torch.zeros(grad.shape, dtype=torch.float64)
    spread, count = 0.0, 0
    for item in passes:
        assert item.value is not None
        e = item.value.tensor.double()
        rows -= e.sum(0)
        spread += float((e * e).sum())
        count += item.rows
    return _relative(grad, rows, scale, math.sqrt(spread * count))


def _relative(grad: torch.Tensor, rows: torch.Tensor, scale: float | None, spread: float) -> float:
    given = grad.double().cpu()
    if scale is None:
        norm = float(rows.norm())
        return float(given.norm()) / norm if norm else math.nan
    error = float((given - scale * rows).norm())
    return error / (abs(scale) * spread) if scale and spread else math.inf if error else 0.0


@functools.lru_cache(maxsize=256)
def _transition(row: LedgerRow) -> tuple[tuple[float, ...], tuple[float, ...]]:
    a, b = row.transition()
    return tuple(a.reshape(-1).tolist()), tuple(b.tolist())
