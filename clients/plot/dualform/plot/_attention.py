"""The paper's figure of attention weights: the largest of each class, in descending order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.client import Client, Filter, TopKResult
from dualform.plot import style
from dualform.plot._parts import Query, answers_by_part, few_groups, layer_panels, named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def attention(
    client: Client,
    queries: Mapping[str, object],
    *,
    per_group: int = 500,
    absolute: bool = True,
    group_by: str = "label",
    task_by: str | None = "task",
    tasks: Sequence[Any] | None = None,
    where: str | Filter | None = None,
    index: str | None = None,
    timeout: float | None = None,
) -> Figure:
    """Each class's largest attention weights in descending order, a panel per layer.

    The paper's figures "Attention weights over training examples": with several tasks, the first
    one's classes come first, each task in its colour.

    Args:
        client: Any client, remote or local.
        queries: By layer, the query: float32 [d_in] or [1, d_in].
        per_group: Rows per class.
        absolute: By |weight|, as the authors did; False: the largest signed weights.
        group_by: The classes' metadata column.
        task_by: The tasks' metadata column; None for no split.
        tasks: Which tasks, in this order; None for all in ascending order.
        where: Which rows take part.
        index: Its name; None where one is served.
        timeout: Seconds per question.

    Returns:
        5 x 2 inches per layer.

    Raises:
        InvalidArgumentError: Not one query per layer, more groups than can be shown, unknown
            tasks, or what `Client.top_k` refuses.
        NotFoundError: No such layer or index.
        FailedPreconditionError: matplotlib is not installed.

    Example:
        >>> figure = attention(client, {"0": queries["0"][:1], "2": queries["2"][:1]})
        >>> save(figure, "attention.pdf")
    """
    style.need_matplotlib()

    def ask(layer: str, query: Query, rows: str | Filter | None) -> TopKResult:
        return client.top_k(
            layer,
            query,
            k=per_group,
            group_by=group_by,
            order="absolute" if absolute else "largest",
            where=rows,
            index=index,
            timeout=timeout,
        )

    answers = answers_by_part(
        client,
        queries,
        ask,
        task_by=task_by,
        tasks=tasks,
        where=where,
        index=index,
        timeout=timeout,
    )
    for split in answers.values():
        few_groups(sum(int(np.sum(hits.rows[0, :, 0] >= 0)) for _, hits in split), group_by)
    with style.look():
        figure, axes = layer_panels(answers)
        for panel, split in zip(axes, answers.values(), strict=True):
            blocks = [
                (named(group), scores, part.colour)
                for part, hits in split
                for group, scores in zip(hits.groups or [], hits.scores[0], strict=True)
                if not np.isnan(scores).all()
            ]
            _draw(panel, blocks, per_group, absolute)
            panel.set_ylabel("|attention weight|" if absolute else "attention weight")
        axes[-1].set_xlabel(f"{group_by} of the training rows, the top {per_group:,} of each")
    return figure


def _draw(
    axes: Axes, blocks: Sequence[tuple[str, Any, str]], per_group: int, absolute: bool
) -> None:
    """A curve per block of (name, scores, colour), side by side with gaps and separators."""
    gap = max(per_group // 10, 1)
    step = per_group + gap
    for number, (_, scores, colour) in enumerate(blocks):
        there = scores[~np.isnan(scores)]
        heights = np.abs(there) if absolute else there
        places = number * step + np.arange(len(heights))
        axes.plot(places, heights, color=colour, linewidth=1.2, solid_capstyle="butt")
        axes.fill_between(places, heights, color=colour, alpha=0.25, linewidth=0)
        if number:
            next_task = colour != blocks[number - 1][2]
            line = style.FRAME if next_task else style.SEPARATOR
            axes.axvline(number * step - (gap + 1) / 2, color=line, linewidth=0.6)
    axes.set_xlim(-gap, len(blocks) * step)
    if absolute:
        axes.set_ylim(bottom=0)
    centres = [number * step + (per_group - 1) / 2 for number in range(len(blocks))]
    style.group_ticks(axes, centres, [name for name, _, _ in blocks])
