"""Which input of a batch each row of a layer belongs to: measured, whatever the layer's shape.

The numbers are multiplied by powers of two, other ones for each input, and taken back once more: a
row's gradient, which is of one input alone, is multiplied by that input's, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dualform.client.errors import InvalidArgumentError

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
    name: str, whole: npt.NDArray[np.float32], probes: Sequence[npt.NDArray[np.float32]]
) -> npt.NDArray[np.int64]:
    """The input that each row's gradient is of, int64 [rows].

    Raises:
        InvalidArgumentError: It is of several.
    """
    wide = whole.astype(np.float64)
    size = (wide * wide).sum(axis=1)
    inputs = np.zeros(len(whole), np.int64)
    for place, probe in enumerate(probes):
        with np.errstate(all="ignore"):
            share = (wide * probe).sum(axis=1) / size
            digit = np.rint(np.log2(share))
        digit = np.where(np.isfinite(digit), digit, -1).astype(np.int64)
        off = np.abs(probe - np.ldexp(wide, digit[:, None])).max(axis=1, initial=0)
        mixed = (digit < 0) | (digit >= _DIGITS) | (off > 0.01 * np.abs(probe).max(axis=1))
        if mixed.any():
            raise InvalidArgumentError(
                f"layer {name!r}: the inputs have an influence on one another's target, so that "
                "what it sees can't be told apart by input; ask with one input at a time",
                field="inputs",
            )
        inputs += digit * _DIGITS**place
    return inputs
