"""The paper's figure of total scores: the sum of attention weights per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.client import Client, Filter, SumsResult
from dualform.plot import style
from dualform.plot._parts import (
    Query,
    answers_by_part,
    few_groups,
    layer_panels,
    named,
    with_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sums(
    client: Client,
    queries: Mapping[str, object],
    *,
    absolute: bool = True,
    group_by: str = "label",
    task_by: str | None = "task",
    tasks: Sequence[Any] | None = None,
    where: str | Filter | None = None,
    index: str | None = None,
    timeout: float | None = None,
) -> Figure:
    """Total attention weight per class as bars, a panel per layer.

    The paper's figures "Total scores per class", in the colours and order of `attention`.

    Args:
        client: Any client, remote or local.
        queries: By layer, the query: float32 [d_in] or [1, d_in].
        absolute: Sum |weight|, as the authors did; False: signed.
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
            tasks, or what `Client.sums` refuses.
        NotFoundError: No such layer or index.
        FailedPreconditionError: matplotlib is not installed.
    """
    style.need_matplotlib()

    def ask(layer: str, query: Query, rows: str | Filter | None) -> SumsResult:
        return client.sums(
            layer,
            query,
            group_by=group_by,
            absolute=absolute,
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
        few_groups(sum(int(np.sum(totals.counts > 0)) for _, totals in split), group_by)
    with style.look():
        figure, axes = layer_panels(answers)
        for panel, split in zip(axes, answers.values(), strict=True):
            ticks: list[str] = []
            for part, totals in split:
                heights = totals.values[0][totals.counts > 0]
                places = range(len(ticks), len(ticks) + len(heights))
                panel.bar(places, heights, width=0.75, color=part.colour)
                ticks += map(named, with_rows(totals.groups, totals.counts))
                if part is not split[-1][0]:
                    panel.axvline(len(ticks) - 0.5, color=style.FRAME, linewidth=0.6)
            panel.axhline(0, color=style.FRAME, linewidth=0.6)
            panel.set_xlim(-0.7, len(ticks) - 0.3)
            style.group_ticks(panel, range(len(ticks)), ticks)
            panel.set_ylabel("sum of |weights|" if absolute else "sum of weights")
        axes[-1].set_xlabel(f"{group_by} of the training rows")
    return figure
