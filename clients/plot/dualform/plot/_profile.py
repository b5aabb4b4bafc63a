"""Attention weight over training: when did the rows come that a query attends to?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualform.client import Client, Filter, SumsResult
from dualform.plot import style
from dualform.plot._parts import Query, answers_by_part, layer_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def profile(
    client: Client,
    queries: Mapping[str, object],
    *,
    bins: int = 50,
    absolute: bool = True,
    task_by: str | None = "task",
    tasks: Sequence[Any] | None = None,
    where: str | Filter | None = None,
    index: str | None = None,
    timeout: float | None = None,
) -> Figure:
    """Total attention weight over equal parts of training, a panel per layer, a curve per task.

    Args:
        client: Any client, remote or local.
        queries: By layer, the query: float32 [d_in] or [1, d_in].
        bins: Parts of training.
        absolute: Sum |weight|; False: signed.
        task_by: The tasks' metadata column; None for no split.
        tasks: Which tasks, in this order; None for all in ascending order.
        where: Which rows take part.
        index: Its name; None where one is served.
        timeout: Seconds per question.

    Returns:
        5 x 2 inches per layer.

    Raises:
        InvalidArgumentError: Not one query per layer, unknown tasks, or what `Client.profile`
            refuses.
        NotFoundError: No such layer or index.
        FailedPreconditionError: matplotlib is not installed.
    """
    style.need_matplotlib()

    def ask(layer: str, query: Query, rows: str | Filter | None) -> SumsResult:
        return client.profile(
            layer,
            query,
            bins=bins,
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
    steps = client.index(index, timeout=timeout).steps
    with style.look():
        figure, axes = layer_panels(answers)
        for panel, split in zip(axes, answers.values(), strict=True):
            for part, curve in split:
                edges = [*curve.groups, steps]
                panel.stairs(
                    curve.values[0], edges, baseline=None, color=part.colour, linewidth=1.2
                )
                if len(split) == 1:  # Several would hide each other.
                    panel.stairs(curve.values[0], edges, color=part.colour, alpha=0.25, fill=True)
            if absolute:
                panel.set_ylim(bottom=0)
            panel.axhline(0, color=style.FRAME, linewidth=0.6)
            panel.set_xlim(0, steps)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.set_ylabel("sum of |weights|" if absolute else "sum of weights")
        axes[-1].set_xlabel(f"training step, in {bins:,} parts")
    return figure
