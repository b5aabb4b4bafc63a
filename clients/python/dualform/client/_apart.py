"""Which input of a batch each row of a layer belongs to: measured, whatever the layer's shape.

The numbers are multiplied by powers of two with random signs, other ones for each input, and taken
back a few more times: a row's gradient, which is of one input alone, is multiplied by that input's,
exactly, and by no other's. And whether all rows of a layer were seen: they add up to its weight's
gradient.

A gradient that is of several inputs passes for one input's only where their influences a_j cancel
in every pass, sum_j (w_j - w_i) a_j = 0 with the factors w: no target that was written before these
were drawn can see to that, and by luck it happens at most once in 16 for each of the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

    Rows = tuple[npt.NDArray[Any], npt.NDArray[np.float32], bool, bool]
    """Keys and gradients of a pass; whether the keys are places of ones; and whether the product is
    the transposed matrix's."""

_LOWEST, _EXPONENTS = -3, 8
"""Few, as half formats have few."""
_FACTORS = 2 * _EXPONENTS
_PASSES = 3
"""At least: all three are fooled by luck once in 4,096 times, by the worst of targets."""


def factors_of(n: int) -> npt.NDArray[np.float64]:
    """What each of n inputs is multiplied by in each of a few more backwards, [passes, n].

    Powers of two with signs, drawn anew each time; no two inputs have the same in all.
    """
    if n == 1:
        return np.ones((0, 1))
    passes = _PASSES
    while _FACTORS**passes < _FACTORS * n:
        passes += 1
    codes = np.array(SystemRandom().sample(range(_FACTORS**passes), n))
    digits = codes // _FACTORS ** np.arange(passes)[:, None] % _FACTORS
    sizes = np.ldexp(1.0, digits % _EXPONENTS + _LOWEST)
    return np.where(digits < _EXPONENTS, sizes, -sizes)


def inputs_of(
    name: str,
    whole: npt.NDArray[np.float32],
    probes: Sequence[npt.NDArray[np.float32]],
    factors: npt.NDArray[np.float64],
    rounding: float,
) -> npt.NDArray[np.int64]:
    """The input that each row's gradient is of, int64 [rows].

    Args:
        name: The layer, for messages.
        whole: float32 [rows, d_out], of the numbers' plain sum.
        probes: Likewise, of the sums with each of
        factors: Those of `factors_of`.
        rounding: As `rounding_of` tells it.

    Raises:
        InvalidArgumentError: It is of several.
    """
    wide = whole.astype(np.float64)
    size = (wide * wide).sum(axis=1)
    # Powers of two pass through float32 exactly; sums in another order do not, nor half formats.
    most = min(0.01, 64 * rounding)
    codes = np.zeros(len(whole), np.int64)
    mixed = np.zeros(len(whole), bool)
    for probe in probes:
        with np.errstate(all="ignore"):
            share = (wide * probe).sum(axis=1) / size
            exponent = np.rint(np.log2(np.abs(share))) - _LOWEST
        known = (exponent >= 0) & (exponent < _EXPONENTS)
        exponent = np.where(known, exponent, 0).astype(np.int64)
        factor = np.copysign(np.ldexp(1.0, exponent + _LOWEST), share)
        off = np.abs(probe - factor[:, None] * wide).max(axis=1, initial=0)
        # What float32 rounds its smallest numbers by.
        tiny = np.maximum(np.abs(factor), 1) * 2.0**-140
        mixed |= ~known | (off > most * np.abs(probe).max(axis=1, initial=0) + tiny)
        codes = codes * _FACTORS + _digits(factor)
    of_inputs = _codes(factors)
    order = np.argsort(of_inputs)
    place = np.minimum(np.searchsorted(of_inputs[order], codes), len(order) - 1)
    inputs = np.asarray(order[place])
    if (mixed | (of_inputs[inputs] != codes)).any():
        raise InvalidArgumentError(
            f"layer {name!r}: the inputs have an influence on one another's target, so that "
            "what it sees can't be told apart by input; ask with one input at a time",
            field="inputs",
        )
    return inputs


def _digits(factors: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    exponents = np.log2(np.abs(factors)).astype(np.int64) - _LOWEST
    return np.asarray(exponents + _EXPONENTS * np.signbit(factors))


def _codes(factors: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """By column one number, int64 [n]."""
    codes = np.zeros(factors.shape[1], np.int64)
    for of_pass in factors:
        codes = codes * _FACTORS + _digits(of_pass)
    return codes


def condensed(
    queries: npt.NDArray[np.float32], directions: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What asks the same of one input in at most d_out + 1 places, where it has more.

    Rows add sum_p (c x.x_p + c') (e.g_p) = c e M x + c' e.h, with M = sum_p g_p x_p^T and
    h = sum_p g_p: a place (M_u / s, s) for each unit u, and (0, h - s) for what that leaves of h.

    Args:
        queries: float32 [m, d_in], x_p.
        directions: float32 [m, d_out], g_p.
    """
    d_out = directions.shape[1]
    if len(queries) <= d_out + 1:
        return queries, directions
    g = directions.astype(np.float64)
    h = g.sum(axis=0)
    s = float(np.abs(h).max()) or 1.0
    of_units = np.append(g.T @ queries / s, np.zeros((1, queries.shape[1])), axis=0)
    to_units = np.append(np.eye(d_out) * s, [h - s], axis=0)
    return of_units.astype(np.float32), to_units.astype(np.float32)


def rounding_of(gradient: torch.Tensor) -> float:
    """How far a product in its format and on its device may be off, relative to its terms."""
    import torch

    found = torch.finfo(gradient.dtype).eps
    if gradient.is_cuda:
        found = max(found, 2.0**-10)  # TF32, which convolutions use unless it is forbidden
    if torch.get_float32_matmul_precision() != "highest":
        found = max(found, 2.0**-7)
    return float(found)


def check_adds_up(name: str, gradient: torch.Tensor, rows: Sequence[Rows], rounding: float) -> None:
    """Refuse a layer whose weight is also used where no row is seen.

    Args:
        name: The layer.
        gradient: At its weight, [d_out, d_in].
        rows: Of all its passes: their keys times gradients are the whole of it.
        rounding: As `rounding_of` tells it.

    Raises:
        FailedPreconditionError: They are not, up to rounding.
    """
    left = gradient.double().cpu().numpy().copy()
    size, count = 0.0, 0
    for keys, values, one_hot, flipped in rows:
        matrix = left.T if flipped else left
        if one_hot:
            known = keys[:, 0] >= 0
            np.subtract.at(matrix.T, keys[known, 0], values[known])
            lengths = known.astype(np.float64)
        else:
            matrix -= values.T @ keys
            lengths = np.linalg.norm(keys.astype(np.float64), axis=1)
        size += float(lengths @ np.linalg.norm(values.astype(np.float64), axis=1))
        count += len(keys)
    # Sums of so many rounded terms, taken in one order there and in another here.
    off, most = float(np.linalg.norm(left)), rounding * (16 + 4 * count**0.5) * size
    if not off <= most:
        raise FailedPreconditionError(
            f"layer {name!r}: what its module was seen to multiply does not add up to its weight's "
            f"gradient (off by {off:.2g}, rounding explains {most:.2g}): the weight is used "
            "outside its module's forward, by another module or directly; call the module there, "
            "or leave the layer out with layers=",
            field="layers",
        )
