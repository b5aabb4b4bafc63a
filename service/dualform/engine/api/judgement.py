"""What a difference between rebuilt and trained weights means: a fault, rounding, noise, a mark.

Training rounds in float32: every step rounds each weight, and every gradient is a sum of rounded
products. Where weights moved less than that, or where a gradient is nothing but rounding (a key
bias in attention, a bias before batch norm), no one can rebuild the way; the outputs tell whether
that matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dualform.questions import MAX_RESIDUAL

TOLERANCE = 1e-4
"""Relative error up to which weights count as rebuilt: training rounds in float32 at every step."""

NOISE = 1e-5
"""A gradient so small beside the terms that it is the sum of is their rounding."""

_FLOAT32_UNIT = 2.0**-24
_PRODUCTS = 16
"""Float32 roundings in the sum of a gradient's products, in units of its absolute terms."""


@dataclass(frozen=True)
class Rebuilt:
    """One parameter, rebuilt from the initial state and all rows. Frobenius norms.

    Attributes:
        parameter: Its name.
        error: |rebuilt - trained|.
        moved: |trained - initial|.
        size: The larger of |trained| and |initial|.
        terms: Of what rows add with their coefficients, the sum of lengths; 0 where unknown.
        units: Output units that error, moved and size are of: those whose gradient is no noise,
            unless all are.
        noise: Output units whose gradient is noise: the median over steps of its length is at most
            `NOISE` of its terms'.
        unexplained: What these are off by, as a share of the parameter's whole way.
    """

    parameter: str
    error: float
    moved: float
    size: float
    terms: float = 0.0
    units: int = 0
    noise: int = 0
    unexplained: float = 0.0

    @property
    def relative(self) -> float:
        """error / moved; 0 where nothing was learned and nothing is wrong."""
        if self.moved > 0:
            return self.error / self.moved
        return 0.0 if self.error == 0 else math.inf


@dataclass(frozen=True)
class Judgement:
    """What was found of a layer's parameters.

    Attributes:
        faults: What is wrong.
        notes: What need not be wrong, and why.
    """

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def judge(
    rebuilt: Sequence[Rebuilt], steps: int, output_error: float | None, marked: bool
) -> Judgement:
    """Tell faults from what float32 training explains.

    Args:
        rebuilt: The parameters.
        steps: How many steps there were.
        output_error: Of outputs, the largest part that no row explains; None if unknown.
        marked: The recorder found something that the ledger does not explain.
    """
    faults, notes = [], []
    outputs_agree = output_error is None or output_error <= MAX_RESIDUAL
    for parameter in rebuilt:
        if marked:
            continue
        if parameter.unexplained > TOLERANCE:
            notes.append(
                f"{parameter.parameter}: its gradient is rounding noise in {parameter.noise:,} "
                f"output units, so {parameter.unexplained:.2g} of its way is explained by no row"
            )
        if parameter.relative <= TOLERANCE or 0 < parameter.noise == parameter.units:
            continue
        rounding = _FLOAT32_UNIT * (steps * parameter.size + _PRODUCTS * parameter.terms)
        if parameter.error <= rounding and outputs_agree:
            notes.append(
                f"{parameter.parameter}: it moved by no more than float32 rounding explains, so "
                f"its way is rebuilt to {parameter.relative:.2g} only"
            )
        else:
            faults.append(
                f"{parameter.parameter}: the rows do not rebuild it to {TOLERANCE:g} "
                f"(error {parameter.relative:.2g} of its way)"
            )
    return Judgement(tuple(faults), tuple(notes))
