"""How training went: columns of numbers, such as the loss, over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dualform.client import AsyncClient, DualformError, LayerInfo, UnavailableError
from dualform.explore.keys import plain

POINTS = 120
ROWS = 8
"""Rows of a step that are looked at: of a column with one value per step they are all alike, and
others are not drawn."""
_MOST_CURVES = 3


@dataclass(frozen=True)
class Curve:
    """A column with one value for all rows of a step.

    Attributes:
        column: Its name.
        steps: Ascending.
        values: Of these steps, finite.
    """

    column: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


async def curves_of(client: AsyncClient, index: str | None, layer: LayerInfo) -> tuple[Curve, ...]:
    """The curves of a layer's columns of floating-point numbers, the loss first.

    Raises:
        UnavailableError: Nobody answers; where there is no curve for another reason, there is none.
    """
    columns = [name for name, kind in layer.columns.items() if kind == "float64"]
    columns.sort(key=lambda name: "loss" not in name.lower())
    if not columns:
        return ()
    nothing = np.zeros((1, layer.d_in), np.float32)
    try:
        there = await client.sums(layer.name, nothing, group_by="step", index=index)
        steps = [plain(step) for step in there.groups]
        if len(steps) > POINTS:
            places = np.linspace(0, len(steps) - 1, POINTS).round().astype(int)
            steps = [steps[place] for place in places]
        some = f"step in ({', '.join(map(str, steps))})"
        rows = await client.top_k(
            layer.name, nothing, k=ROWS, group_by="step", where=some, index=index
        )
    except UnavailableError:
        raise
    except DualformError:
        return ()
    found = [_curve(name, rows["step"][0], rows[name][0]) for name in columns]
    drawn = [curve for curve in found if curve is not None and len(curve.steps) > 1]
    return tuple(drawn[:_MOST_CURVES])


def _curve(name: str, steps: np.ndarray, values: np.ndarray) -> Curve | None:
    """Of [groups, k] steps and values, None where there are none; None where rows of a step
    differ."""
    found: dict[int, float] = {}
    for step, value in zip(steps.ravel(), values.ravel(), strict=True):
        if step is None or value is None or not math.isfinite(value):
            continue
        if found.setdefault(int(step), float(value)) != value:
            return None
    order = sorted(found)
    return Curve(name, tuple(order), tuple(found[at] for at in order))
