"""Which input of a batch each row of a layer belongs to: measured, whatever the layer's shape.

The numbers are multiplied by powers of two, other ones for each input, and taken back once more: a
row's gradient, which is of one input alone, is multiplied by that input's, exactly. And whether all
rows of a layer were seen: they add up to its weight's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

    Rows = tuple[npt.NDArray[Any], npt.NDArray[np.float32], bool, bool]
    """Keys and gradients of a pass; whether the keys are places of ones; and whether the product is
    the transposed matrix's."""

_DIGITS = 16
"""Inputs that one more backward tells apart."""


def factors_of(n: int) -> list[npt.NDArray[np.float64]]:
    """Powers of two for each input, float64 [n] each: all of them together tell which it is."""
    found: list[npt.NDArray[np.float64]] = []
    numbers = np.arange(n)
    while numbers.any():
        found.append(np.ldexp(1.0, numbers % _DIGITS))
        numbers = numbers // _DIGITS
    return found


def inputs_of(
    name: str,
    whole: npt.NDArray[np.float32],
    probes: Sequence[npt.NDArray[np.float32]],
    rounding: float,
) -> npt.NDArray[np.int64]:
    """The input that each row's gradient is of, int64 [rows].

    Args:
        name: The layer, for messages.
        whole: float32 [rows, d_out], of the numbers' plain sum.
        probes: Likewise, of the sums with each of `factors_of`.
        rounding: As `rounding_of` tells it.

    Raises:
        InvalidArgumentError: It is of several.
    """
    wide = whole.astype(np.float64)
    size = (wide * wide).sum(axis=1)
    inputs = np.zeros(len(whole), np.int64)
    # Powers of two pass through float32 exactly; sums in another order do not, nor half formats.
    most = min(0.01, 64 * rounding)
    for place, probe in enumerate(probes):
        with np.errstate(all="ignore"):
            share = (wide * probe).sum(axis=1) / size
            digit = np.rint(np.log2(share))
        digit = np.where(np.isfinite(digit), digit, -1).astype(np.int64)
        off = np.abs(probe - np.ldexp(wide, digit[:, None])).max(axis=1, initial=0)
        tiny = np.ldexp(2.0**-140, digit)  # what float32 rounds its smallest numbers by
        mixed = (digit < 0) | (digit >= _DIGITS) | (off > most * np.abs(probe).max(axis=1) + tiny)
        if mixed.any():
            raise InvalidArgumentError(
                f"layer {name!r}: the inputs have an influence on one another's target, so that "
                "what it sees can't be told apart by input; ask with one input at a time",
                field="inputs",
            )
        inputs += digit * _DIGITS**place
    return inputs


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
