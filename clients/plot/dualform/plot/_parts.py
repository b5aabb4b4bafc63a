"""What a figure is split by: the query of each layer, the tasks with their colours, the groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.client import Client, Filter, InvalidArgumentError, parse_filter
from dualform.plot.style import TASK_COLOURS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_GROUPS = 60

Answer = TypeVar("Answer")
Query: TypeAlias = npt.NDArray[np.float32]
"""One query, float32 [1, d_in]."""


@dataclass(frozen=True)
class Part:
    """The rows of one task, or all rows where a figure is not split.

    Attributes:
        task: The task; None where not split, or for rows without one.
        name: What a reader calls it; empty where not split.
        where: The rows that it is made of.
        colour: Of everything drawn of it.
    """

    task: Any
    name: str
    where: str | Filter | None
    colour: str


def one_query(queries: Mapping[str, object]) -> dict[str, Query]:
    """Each layer's query as float32 [1, d_in].

    Raises:
        InvalidArgumentError: No layer, or not exactly one query for a layer.
    """
    if not isinstance(queries, Mapping) or not queries:
        raise InvalidArgumentError(
            "queries is a mapping from layer to query, such as "
            "{name: q[:1] for name, q in capture_queries(model, images).items()}",
            field="queries",
        )
    found = {}
    for layer, given in queries.items():
        # A torch tensor on any device, gradients or not.
        plain = given.detach().cpu() if hasattr(given, "detach") else given
        query = np.asarray(plain)
        shape = list(query.shape)
        if query.ndim == 1:
            query = query[np.newaxis]
        if query.ndim != 2 or len(query) != 1:
            raise InvalidArgumentError(
                f"a figure shows one query; layer {layer!r} got an array of shape {shape}: "
                f"pass one of them, such as queries[{layer!r}][:1]",
                field="queries",
            )
        found[layer] = query
    return found


def answers_by_part(
    client: Client,
    queries: Mapping[str, object],
    ask: Callable[[str, Query, str | Filter | None], Answer],
    *,
    task_by: str | None,
    tasks: Sequence[Any] | None,
    where: str | Filter | None,
    index: str | None,
    timeout: float | None,
) -> dict[str, list[tuple[Part, Answer]]]:
    """By layer, each part with its answer.

    Args:
        ask: Called with the layer, its query and the part's filter.

    Raises:
        InvalidArgumentError: As `one_query` and `parts`.
    """
    found = {}
    for layer, query in one_query(queries).items():
        split = parts(
            client,
            layer,
            query,
            task_by=task_by,
            tasks=tasks,
            where=where,
            index=index,
            timeout=timeout,
        )
        found[layer] = [(part, ask(layer, query, part.where)) for part in split]
    return found


def layer_panels(
    answers: Mapping[str, Sequence[tuple[Part, Any]]],
) -> tuple[Figure, list[Axes]]:
    """An empty panel per layer, with the first one's tasks above."""
    split = [part for part, _ in next(iter(answers.values()))]
    return panels(list(answers), [part.name for part in split], [part.colour for part in split])


def parts(
    client: Client,
    layer: str,
    query: Query,
    *,
    task_by: str | None,
    tasks: Sequence[Any] | None,
    where: str | Filter | None,
    index: str | None,
    timeout: float | None,
) -> list[Part]:
    """The tasks that a figure is split by, each with its rows and colour.

    Args:
        task_by: Their metadata column; None for no split. A layer without it is not split.
        tasks: Which, in this order; None takes all in the column's order.

    Raises:
        InvalidArgumentError: `tasks` names what is not there, or there are more than colours.
    """
    whole = [Part(None, "", where, TASK_COLOURS[0])]
    layers = client.index(index, timeout=timeout).layers
    # An unknown layer is refused by the question itself.
    has_tasks = layer not in layers or task_by in layers[layer].columns
    if task_by is None or not has_tasks:
        if tasks is not None:
            raise InvalidArgumentError(
                f"tasks={list(tasks)} needs a column of tasks; layer {layer!r} has none called "
                f"{task_by!r}",
                field="tasks",
            )
        return whole
    totals = client.sums(layer, query, group_by=task_by, where=where, index=index, timeout=timeout)
    there = with_rows(totals.groups, totals.counts)
    chosen = there if tasks is None else list(tasks)
    unknown = [task for task in chosen if task not in there]
    if unknown:
        raise InvalidArgumentError(
            f"no rows of task {unknown[0]!r}; the tasks are {', '.join(map(repr, there))}",
            field="tasks",
        )
    if len(chosen) > len(TASK_COLOURS):
        raise InvalidArgumentError(
            f"{task_by!r} has {len(chosen)} values, and a figure tells {len(TASK_COLOURS)} apart: "
            "choose some with tasks=, or give task_by=None",
            field="tasks",
        )
    if len(there) < 2:
        return whole
    return [
        Part(task, named(task), _also(where, task_by, task), colour)
        for task, colour in zip(chosen, TASK_COLOURS, strict=False)
    ]


def named(group: Any) -> str:
    """A group as a reader sees it."""
    if group is None:
        return "none"
    return f"{group:g}" if isinstance(group, float) else str(group)


def with_rows(groups: Sequence[Any], counts: npt.NDArray[np.int64]) -> list[Any]:
    """The groups that have rows: those that a filter emptied are answered too."""
    return [group for group, count in zip(groups, counts, strict=True) if count]


def few_groups(count: int, column: str) -> None:
    """Raises InvalidArgumentError for more groups than a figure can show."""
    if count > MAX_GROUPS:
        raise InvalidArgumentError(
            f"{column!r} has {count:,} groups, and a figure shows up to {MAX_GROUPS}: group by a "
            "column with fewer values, or filter with where=",
            field="group_by",
        )


def _also(where: str | Filter | None, column: str, value: Any) -> Filter:
    """`where`, and the column has this value; messages, so that no text needs quoting."""
    mine = parse_filter(f'"{column}" is null')
    if value is not None:
        literal = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else value
        mine = parse_filter(f'"{column}" = {str(literal).lower() if _is_bool(value) else literal}')
    if where is None:
        return mine
    both = Filter()
    both.all_of.filters.append(parse_filter(where) if isinstance(where, str) else where)
    both.all_of.filters.append(mine)
    return both


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)
