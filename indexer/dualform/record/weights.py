"""Did the weights move as the ledger says? u'Wv, predicted step by step and compared now and then.

Rounding is followed beside the prediction: every step rounds the weights and the momentum buffer
once, and its gradient carries the error of a float32 product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from dualform.optimizers import SGD, SGDSettings
from dualform.store.ledger import LedgerRow

_EPS = 2.0**-24
_SMALLEST = 2.0**-100
"""Far above what rounds below float32's normal numbers, 2^-149 a number and step, however many of
these: weights that decay get there."""

Pair = tuple[float, float]
_Six = tuple[float, float, float, float, float, float]


class WeightProbe:
    """Predicts u'Wv and u'mv (u.b and u.m for a bias) of one parameter and its momentum buffer.

    Attributes:
        since: The step at which both were last looked at; -1 before the first time.
    """

    def __init__(self) -> None:
        self.since = -1
        self._state: Pair = (0.0, 0.0)
        self._size: Pair = (0.0, 0.0)
        self._noise: Pair = (0.0, 0.0)

    def reset(self, step: int, state: Sequence[Pair]) -> None:
        """Take the real (probe, norm) of the parameter and of its buffer as they are."""
        (w, w_size), (m, m_size) = state
        self.since = step
        self._state, self._size = (w, m), (w_size, m_size)
        self._noise = (8 * _EPS * w_size, 8 * _EPS * m_size)

    def follow(self, row: LedgerRow, probe: float, size: float) -> None:
        """Predict one step of the optimizer.

        Args:
            row: The parameter's in the ledger.
            probe: Of the gradient that the optimizer saw.
            size: What its rounding errors are relative to.
        """
        if not row.took_part:
            return
        (p, q, r, s, e, f), (ap, aq, ar, as_, ae, af) = _moves(row.settings, row.first)
        w, m = self._state
        self._state = p * w + q * m + e * probe, r * w + s * m + f * probe
        w, m = self._size
        w, m = self._size = ap * w + aq * m + ae * size, ar * w + as_ * m + af * size
        n, o = self._noise
        rounding = 8 * _EPS * size
        self._noise = (
            ap * n + aq * o + ae * rounding + 4 * _EPS * w,
            ar * n + as_ * o + af * rounding + 4 * _EPS * m,
        )

    def agrees(self, state: Sequence[Pair], blindness: float = 1.0) -> bool:
        """Whether the real (probe, norm) of parameter and buffer are as predicted, and finite.

        Args:
            state: Of both.
            blindness: By what the probes underestimate norms: rounding may be so much larger.
        """
        return all(
            math.isfinite(real)
            and abs(real - predicted) <= blindness * (2 * noise + 16 * _EPS * size) + _SMALLEST
            for (real, size), predicted, noise in zip(state, self._state, self._noise, strict=True)
        )


@functools.lru_cache(maxsize=64)  # all parameters of a group move alike, and most steps
def _moves(settings: SGDSettings, first: bool) -> tuple[_Six, _Six]:
    """(W, m)' in terms of W, m and the gradient at the step: the factors and their magnitudes."""
    mm, mw, mg, ww, wm, wg = SGD().numbers(settings, first)
    real = (ww + wm * mw, wm * mm, mw, mm, wg + wm * mg, mg)
    # The weight is moved by rounded intermediate results, so their magnitudes add up.
    sizes = (
        abs(ww) + abs(wm * mw),
        abs(wm * mm),
        abs(mw),
        abs(mm),
        abs(wg) + abs(wm * mg),
        abs(mg),
    )
    return real, sizes
