"""The examples behind a prediction: what each did to it, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.client import AttributionResult, InvalidArgumentError
from dualform.plot import style
from dualform.plot._parts import named

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attribute(found: AttributionResult, *, number: int = 0, title: str = "") -> Figure:
    """The best groups of one input as bars, stacked by layer; what lowers goes to the left.

    Args:
        found: The answer of `Client.attribute`.
        number: Which input.
        title: Above the panel.

    Returns:
        A bar per group, the best above, its total as a dot where the layers do not agree in sign.

    Raises:
        InvalidArgumentError: No such input, or no group.
        FailedPreconditionError: matplotlib is not installed.
    """
    style.need_matplotlib()
    if not 0 <= number < len(found.groups):
        raise InvalidArgumentError(
            f"number is {number}; the answer is about inputs 0 to {len(found.groups) - 1}",
            field="number",
        )
    there = found.counts[number] > 0
    groups = [_plain(group) for group in found.groups[number][there]]
    parts = found.by_layer[number][there]
    if not groups:
        raise InvalidArgumentError("no group has rows; ask with another filter", field="found")
    shown = _fewer(found.layers, parts)
    with style.look():
        figure = style.new_figure(style.WIDTH, 0.6 + 0.19 * len(groups))
        panel = figure.subplots()
        style.dress(panel)
        places = np.arange(len(groups))
        for sign in (1, -1):
            left = np.zeros(len(groups))
            for colour, (_, values) in zip(style.TASK_COLOURS, shown, strict=False):
                width = np.where(np.sign(values) == sign, values, 0.0)
                panel.barh(places, width, left=left, height=0.7, color=colour)
                left += width
        if (parts.min(axis=1) * parts.max(axis=1) < 0).any():
            panel.plot(parts.sum(axis=1), places, "o", color=style.FRAME, markersize=2.5)
        panel.axvline(0, color=style.FRAME, linewidth=0.6)
        panel.set_yticks(places, [named(group) for group in groups])
        panel.yaxis.set_major_formatter(lambda value, _: named(groups[round(value)]))
        panel.invert_yaxis()
        panel.set_xlabel("what its rows added to the target")
        panel.set_title(title, loc="left")
        names = [f"layer {name}" if name else "others" for name, _ in shown]
        style.legend(figure, names, style.TASK_COLOURS[: len(names)])
    return figure


def _fewer(layers: tuple[str, ...], parts: Any) -> list[tuple[str, Any]]:
    """A name and the scores of each layer; where there are more than colours, the smallest
    together, under no name."""
    most = len(style.TASK_COLOURS)
    if len(layers) <= most:
        return [(name, parts[:, place]) for place, name in enumerate(layers)]
    size = np.abs(parts).sum(axis=0)
    kept = np.sort(np.argsort(-size, kind="stable")[: most - 1])
    rest = np.setdiff1d(np.arange(len(layers)), kept)
    return [*((layers[place], parts[:, place]) for place in kept), ("", parts[:, rest].sum(axis=1))]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
