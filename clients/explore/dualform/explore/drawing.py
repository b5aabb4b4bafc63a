"""The training curve, as SVG."""

from __future__ import annotations

import math
from html import escape

from dualform.explore.curve import Curve
from dualform.explore.markup import named, number

_WIDTH, _HEIGHT = 600.0, 60.0
_WIDE = 30
"""Curves of positive numbers so many times apart are drawn on a logarithmic axis."""


def curves(found: tuple[Curve, ...], steps: int, step: int | None) -> str:
    """Curves above the slider, whose axis they share.

    Args:
        found: What was recorded.
        steps: Of training.
        step: That is looked at; None for the trained network.
    """
    return "".join(_figure(each, steps, steps if step is None else step) for each in found)


def _figure(curve: Curve, steps: int, step: int) -> str:
    low, high = min(curve.values), max(curve.values)
    log = low > 0 and high > _WIDE * low

    def height(value: float) -> float:
        if high == low:
            return _HEIGHT / 2
        if log:
            return _HEIGHT * (1 - math.log(value / low) / math.log(high / low))
        return _HEIGHT * (1 - (value - low) / (high - low))

    def across(at: int) -> float:
        return _WIDTH * at / max(steps, 1)

    line = " ".join(
        f"{across(at):.1f},{height(value):.1f}"
        for at, value in zip(curve.steps, curve.values, strict=True)
    )
    first, last = curve.values[0], curve.values[-1]
    said = (
        f"{curve.column} from {number(first)} in step {curve.steps[0]} to {number(last)} in step "
        f"{curve.steps[-1]}"
    )
    axis = ", logarithmic" if log else ""
    near = min(range(len(curve.steps)), key=lambda place: abs(curve.steps[place] - (step - 1)))
    here = f"{number(curve.values[near])} in step {curve.steps[near]:,}"
    at = across(min(step, steps))
    return (
        f'<figure class="curve"><figcaption><b>{named(curve.column)}</b> {here}'
        f"<span>{number(low)} to {number(high)}{axis}</span></figcaption>"
        f'<svg viewBox="0 -2 {_WIDTH:.0f} {_HEIGHT + 4:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(said)}"><line x1="{at:.1f}" x2="{at:.1f}" y1="-2" '
        f'y2="{_HEIGHT + 2:.0f}"/><polyline points="{line}"/></svg></figure>'
    )
