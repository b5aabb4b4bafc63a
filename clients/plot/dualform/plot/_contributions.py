"""What each class's rows added to each output unit: the dual output, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client import Client, DualOutputResult, Filter, InvalidArgumentError
from dualform.plot import style
from dualform.plot._parts import few_groups, named, one_query, parts, with_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_UNITS = 20


def contributions(
    client: Client,
    layer: str,
    query: object,
    *,
    units: Sequence[int] | None = None,
    group_by: str = "label",
    task_by: str | None = "task",
    tasks: Sequence[Any] | None = None,
    where: str | Filter | None = None,
    at_step: int | None = None,
    index: str | None = None,
    timeout: float | None = None,
) -> Figure:
    """A table in colours: initial part, each class's contribution and the total, per output unit.

    The lines above "total" add up to it (paper, eq. dual_linear). The unit with the largest total
    is printed bold.

    Args:
        client: Any client, remote or local.
        layer: As in `model.named_modules()`.
        query: float32 [d_in] or [1, d_in].
        units: Which output units, up to 20; None for all.
        group_by: The classes' metadata column.
        task_by: The tasks' metadata column; None for no split.
        tasks: The tasks' order; None for ascending.
        where: Which rows contribute; the initial part always stays.
        at_step: The layer after so many steps; None for the trained layer.
        index: Its name; None where one is served.
        timeout: Seconds per question.

    Raises:
        InvalidArgumentError: Not one query, units that are not there or too many, tasks left out,
            more groups than can be shown, or what `Client.dual_output` refuses.
        NotFoundError: No such layer or index.
        FailedPreconditionError: The index holds no values, the layer has no exact dual form, or
            matplotlib is not installed.
    """
    style.need_matplotlib()
    asked = one_query({layer: query})[layer]

    def output(rows: str | Filter | None, column: str | None) -> DualOutputResult:
        return client.dual_output(
            layer,
            asked,
            where=rows,
            group_by=column,
            at_step=at_step,
            index=index,
            timeout=timeout,
        )

    whole = output(where, None)
    columns = _units(units, whole.values.shape[1])
    split = parts(
        client,
        layer,
        asked,
        task_by=task_by,
        tasks=tasks,
        where=where,
        index=index,
        timeout=timeout,
    )
    names, lines = ["initial"], [whole.initial[0]]
    residual = None
    for part in split:
        answer = output(part.where, group_by)
        assert answer.groups is not None
        assert answer.counts is not None
        groups = with_rows(answer.groups, answer.counts)
        few_groups(len(names) + len(groups), group_by)
        names += [f"{part.name} {named(group)}".strip() for group in groups]
        lines += list(answer.values[0][answer.counts > 0])
        residual = answer.residual
    if split[0].name:
        by_task = output(where, task_by)
        assert by_task.groups is not None
        assert by_task.counts is not None
        residual = by_task.residual
        shown = [part.task for part in split]
        left_out = [t for t in with_rows(by_task.groups, by_task.counts) if t not in shown]
        if left_out:
            raise InvalidArgumentError(
                f"tasks leaves out {named(left_out[0])!r}, and the parts would not add up: name "
                "all tasks, or leave rows out with where=",
                field="tasks",
            )
    # Of the trained layer the total is that of the lines, and what no row explains is too small to
    # be seen (max_residual); after some steps the total starts from weights that training kept.
    if residual is not None and at_step is not None:
        names.append("rounding")
        lines.append(residual[0])
    names.append("total")
    lines.append(whole.values[0])
    title = f"layer {layer}: what the rows of each {group_by} added"
    title += "" if at_step is None else f", after {at_step:,} steps"
    with style.look():
        return _draw(np.stack(lines)[:, columns], names, columns, title)


def _units(units: Sequence[int] | None, d_out: int) -> list[int]:
    if units is None:
        if d_out > MAX_UNITS:
            raise InvalidArgumentError(
                f"the layer has {d_out:,} output units, and the figure shows up to {MAX_UNITS}: "
                "choose some with units=",
                field="units",
            )
        return list(range(d_out))
    chosen = [int(unit) for unit in units]
    if not 1 <= len(chosen) <= MAX_UNITS or not all(0 <= unit < d_out for unit in chosen):
        raise InvalidArgumentError(
            f"units={chosen}: 1 to {MAX_UNITS} of 0 to {d_out - 1} are needed", field="units"
        )
    return chosen


def _draw(
    table: npt.NDArray[np.float32], names: Sequence[str], units: Sequence[int], title: str
) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap

    height, width = table.shape
    # Not narrower than its title.
    figure = style.new_figure(max(0.42 * width + 1.5, 4.2), 0.2 * height + 0.75)
    axes = figure.subplots()
    most = float(np.max(np.abs(table))) or 1.0
    colours = LinearSegmentedColormap.from_list("contributions", style.DIVERGING)
    axes.imshow(table, cmap=colours, vmin=-most, vmax=most, aspect="auto")
    best = int(np.argmax(table[-1]))
    for (row, column), value in np.ndenumerate(table):
        axes.text(
            column,
            row,
            _number(float(value), most),
            ha="center",
            va="center",
            fontsize=style.SMALL - 0.5,
            color="white" if _dark(colours(0.5 + 0.5 * float(value) / most)) else "black",
            fontweight="bold" if column == best and row == height - 1 else "normal",
        )
    # The groups stand apart from what is none.
    ends = [0.5, height - 1.5] + ([height - 2.5] if "rounding" in names else [])
    for end in ends:
        axes.axhline(end, color="white", linewidth=2.5)
    axes.set_xticks(range(width), [str(unit) for unit in units])
    axes.get_xticklabels()[best].set_fontweight("bold")
    axes.set_yticks(range(height), list(names))
    axes.tick_params(labelsize=style.SMALL, length=0)
    axes.set_xlabel("output unit")
    axes.set_title(title, loc="left")
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _number(value: float, most: float) -> str:
    """With as many digits as tell the parts apart at the table's scale."""
    if most >= 1e4 or most < 1e-2:
        text = f"{value:.1e}"
    else:
        text = f"{value:.{0 if most >= 1000 else 1 if most >= 10 else 2}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", "\N{MINUS SIGN}")


def _dark(colour: tuple[float, float, float, float]) -> bool:
    """Whether white is read better on it than black (WCAG's relative luminance)."""
    red, green, blue = (
        c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18
