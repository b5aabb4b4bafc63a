"""Did the weights move as the ledger says? u'Wv, predicted step by step and compared now and then.

Rounding is followed beside the prediction: every step rounds the weights and the momentum buffer
once, and its gradient carries the error of a float32 product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from dualform.store.ledger import LedgerRow

_EPS = 2.0**-24

Pair = tuple[float, float]
_Matrix = tuple[float, float, float, float]


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
        self._steps: list[tuple[LedgerRow, float, float]] = []

    def reset(self, step: int, state: Sequence[Pair]) -> None:
        """Take the real (probe, norm) of the parameter and of its buffer as they are."""
        (w, w_size), (m, m_size) = state
        self.since = step
        self._steps.clear()
        self._state, self._size = (w, m), (w_size, m_size)
        self._noise = (8 * _EPS * w_size, 8 * _EPS * m_size)

    def advance(self, row: LedgerRow, probe: float, size: float) -> None:
        """Note one step of the optimizer, to be followed when it is needed.

        Args:
            row: The parameter's in the ledger.
            probe: Of the gradient that the optimizer saw.
            size: What its rounding errors are relative to.
        """
        if row.took_part:
            self._steps.append((row, probe, size))

    def agrees(self, state: Sequence[Pair]) -> bool:
        """Whether the real (probe, norm) of parameter and buffer are as predicted."""
        for step in self._steps:
            self._follow(*step)
        self._steps.clear()
        return all(
            abs(real - predicted) <= 2 * noise + 16 * _EPS * size
            for (real, size), predicted, noise in zip(state, self._state, self._noise, strict=True)
        )

    def _follow(self, row: LedgerRow, probe: float, size: float) -> None:
        move, bound = _moves(
            row.lr,
            row.momentum,
            row.dampening,
            row.nesterov,
            row.weight_decay,
            row.maximize,
            row.first,
        )
        self._state = _moved(*move, self._state, -probe)
        self._size = w, m = _moved(*bound, self._size, size)
        noise_w, noise_m = _moved(*bound, self._noise, 8 * _EPS * size)
        self._noise = (noise_w + 4 * _EPS * w, noise_m + 4 * _EPS * m)


@functools.lru_cache(maxsize=256)
def _moves(
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    first: bool,
) -> tuple[tuple[_Matrix, Pair], tuple[_Matrix, Pair]]:
    """The ledger's matrices for a gradient taken as it is at the step, and their magnitudes."""
    row = LedgerRow(
        0, "", lr, momentum, dampening, nesterov, weight_decay, maximize, 1.0, True, first
    )
    a, b = row.transition()
    p, q, r, s, e, f = (float(number) for number in (*a.reshape(-1), *b))
    magnitudes = (abs(p), abs(q), abs(r), abs(s)), (abs(e), abs(f))
    return ((p, q, r, s), (e, f)), magnitudes


def _moved(a: _Matrix, b: Pair, pair: Pair, e: float) -> Pair:
    w, m = pair
    return a[0] * w + a[1] * m + b[0] * e, a[2] * w + a[3] * m + b[1] * e
