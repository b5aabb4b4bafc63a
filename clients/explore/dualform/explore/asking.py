"""The questions behind the page: from a view and a query to an answer, through the SDK."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from dualform.client import (
    AsyncClient,
    DualformError,
    DualOutputResult,
    IndexInfo,
    LayerInfo,
    UnavailableError,
)
from dualform.explore.answers import (
    Answer,
    Behind,
    Group,
    Groups,
    Output,
    Part,
    Parts,
    Query,
    Refused,
)
from dualform.explore.behind import ranked
from dualform.explore.keys import plain
from dualform.explore.view import View, among

UNITS_SHOWN, GROUPS_SHOWN = 10, 24
"""So many are read at a glance; of more, the largest."""
USUAL_COLUMNS = ("label", "task")
_NO_CLASSES = ("example", "slot", "position", "step")

T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Asker:
    """One view's questions.

    Attributes:
        client: Who answers.
        index: As for every question.
        info: What the index says of itself.
        layer: The layer that is looked at.
        view: What is looked at.
        tell: Told what is asked for, as it goes on.
    """

    client: AsyncClient
    index: str | None
    info: IndexInfo
    layer: LayerInfo
    view: View
    tell: Tell

    @property
    def is_last(self) -> bool:
        """The layer's output is the prediction."""
        last = last_layer(self.info)
        return last is not None and last.name == self.layer.name

    def narrowed(self, *more: str | None) -> str | None:
        """The view's filters and more."""
        filters = (*self.view.filters, *(each for each in more if each is not None))
        return replace(self.view, filters=filters).where

    async def output(self, layer: str, query: Any, **more: Any) -> DualOutputResult:
        """The dual output at the view's step."""
        return await self.client.dual_output(
            layer,
            query,
            at_step=self.view.step,
            max_residual=self.view.residual,
            index=self.index,
            **more,
        )


async def answer(
    asker: Asker, query: Query, early: Callable[[Answer], None] | None = None
) -> Answer:
    """All that the page shows of a layer.

    Args:
        asker: Of the view.
        query: What is asked about.
        early: Given what is known once the prediction is, the training rows missing.

    Raises:
        UnavailableError: Nobody answers; what else is refused is refused in its part alone.
    """
    layer, view = asker.layer, asker.view
    columns = class_columns(layer)
    column = view.group if view.group in layer.columns else (columns or [""])[0]
    asker.tell("the output")
    whole = await part(asker.output(layer.name, query.vector))
    output = await part(_output(asker, layer.name, query.vector, whole))
    unit = view.unit
    if unit is None and isinstance(output, Output):
        unit = output.winner[0]
    last = last_layer(asker.info)
    prediction: Part[Output] | None = None
    if last is not None and last.name != layer.name and query.last is not None:
        asker.tell("the prediction")
        other = await part(asker.output(last.name, query.last))
        prediction = await part(_output(asker, last.name, query.last, other))
    found = Answer(query, layer, unit, columns, column, output, prediction, (), (), None, None)
    if early is not None:
        early(found)
    asker.tell("the training examples with the largest weights")
    by_weight = await part(ranked(asker, query.vector, "weight", unit))
    by_contribution: Part[tuple[Behind, ...]] = Refused("the layer has no output to add to")
    if unit is not None:
        asker.tell("the training examples that added most")
        by_contribution = await part(ranked(asker, query.vector, "contribution", unit))
    elif isinstance(output, Refused):
        by_contribution = output
    groups: Part[Groups] | None = None
    parts: Part[Parts] | None = None
    if column:
        asker.tell(f"sums per {column}")
        groups = await part(_groups(asker, query, column, unit))
        if isinstance(groups, Groups) and unit is not None:
            known = whole if isinstance(whole, DualOutputResult) else None
            groups = await _accounted(asker, query, groups, unit, known)
        parts = await _parts(asker, query, column, groups)
    return replace(
        found, by_weight=by_weight, by_contribution=by_contribution, groups=groups, parts=parts
    )


async def part(asked: Awaitable[T]) -> T | Refused:
    """What was asked for, or why it is refused."""
    try:
        return await asked
    except UnavailableError:
        raise
    except DualformError as error:
        return Refused(str(error), "max_residual" in str(error))


def last_layer(info: IndexInfo) -> LayerInfo | None:
    """The layer whose output is the prediction: the last one with values."""
    return next((each for each in reversed(list(info.layers.values())) if each.values), None)


def class_columns(layer: LayerInfo) -> list[str]:
    """Columns whose values may be classes, the usual ones first."""
    found = [name for name in USUAL_COLUMNS if name in layer.columns]
    return found + [
        name
        for name, kind in layer.columns.items()
        if name not in (*found, *_NO_CLASSES) and kind != "float64"
    ]


def in_order(names: Sequence[Any]) -> list[int]:
    """The places of a column's values in their order, that of rows without one last."""
    return sorted(
        range(len(names)),
        key=lambda place: (names[place] is None, 0 if names[place] is None else names[place]),
    )


async def _output(
    asker: Asker, layer: str, query: Any, whole: DualOutputResult | Refused
) -> Output:
    if isinstance(whole, Refused):
        raise DualformError(whole.why)
    values = whole.values[0].astype(np.float64)
    order = np.argsort(-values, kind="stable")[:UNITS_SHOWN]
    unit = asker.view.unit
    if layer == asker.layer.name and unit is not None and unit < len(values) and unit not in order:
        order = np.append(order[:-1], unit)
    winner = int(values.argmax())
    left, after, coverage = None, winner, whole.coverage
    if asker.view.filters:
        asker.tell("the output without the rows that are filtered out")
        masked = await asker.output(layer, query, where=asker.view.where)
        left = tuple(float(masked.values[0, each]) for each in order)
        after, coverage = int(masked.values[0].argmax()), masked.coverage
    size = float(np.linalg.norm(values))
    residual = None
    if whole.residual is not None and size > 0:
        residual = float(np.linalg.norm(whole.residual[0].astype(np.float64))) / size
    return Output(
        layer,
        tuple((int(each), float(values[each])) for each in order),
        left,
        (winner, after),
        len(values),
        residual,
        coverage.rows,
        coverage.total,
    )


async def _groups(asker: Asker, query: Query, column: str, unit: int | None) -> Groups:
    """The classes with the largest sums of weights, and of contributions."""

    async def sums(where: str | None, order: Any, k: int, **more: Any) -> dict[Any, Any]:
        found = await asker.client.top_groups(
            asker.layer.name,
            query.vector,
            by=column,
            k=k,
            order=order,
            where=where,
            index=asker.index,
            **more,
        )
        names = [plain(each) for each in found.groups[0]]
        rows = zip(names, found.scores[0], found.counts[0], strict=True)
        return {name: (float(score), int(count)) for name, score, count in rows if count}

    until = None if asker.view.step is None else f"step < {asker.view.step}"
    weights = await sums(asker.narrowed(until), "absolute", GROUPS_SHOWN + 1)
    added: dict[Any, Any] = {}
    if unit is not None:
        added = await sums(
            asker.view.where,
            "absolute",
            GROUPS_SHOWN + 1,
            rank_by="contribution",
            unit=unit,
            at_step=asker.view.step,
            max_residual=asker.view.residual,
        )
    more = max(len(weights), len(added)) > GROUPS_SHOWN
    best = list(added or weights)[:GROUPS_SHOWN]
    light = [name for name in best if name not in weights]
    if light:  # Their weights are not among the largest.
        some = among(column, light)
        weights |= await sums(asker.narrowed(until, some), "absolute", len(light))
    names = [best[place] for place in in_order(best)]
    found = [
        Group(
            name,
            weights[name][0] if name in weights else None,
            added[name][0] if name in added else None,
            (weights.get(name) or added[name])[1],
        )
        for name in names
    ]
    return Groups(column, tuple(found), more)


async def _accounted(
    asker: Asker, query: Query, groups: Groups, unit: int, whole: DualOutputResult | None
) -> Groups:
    """With what the classes and the rest add up to."""
    if asker.view.filters:
        asker.tell("what is left of the output")
        found = await part(asker.output(asker.layer.name, query.vector, where=asker.view.where))
        whole = None if isinstance(found, Refused) else found
    if whole is None:
        return groups
    initial, output = float(whole.initial[0, unit]), float(whole.values[0, unit])
    residual = None if whole.residual is None else float(whole.residual[0, unit])
    others = None
    if groups.more:
        shown = sum(each.contribution or 0.0 for each in groups.groups)
        others = output - initial - (residual or 0.0) - shown
    return replace(groups, initial=initial, residual=residual, output=output, others=others)


async def _parts(
    asker: Asker, query: Query, column: str, groups: Part[Groups]
) -> Part[Parts] | None:
    """What each class added to each unit, where that is a table that can be read."""
    few = isinstance(groups, Groups) and not groups.more
    if not few or asker.layer.d_out > GROUPS_SHOWN or not asker.layer.values:
        return None
    asker.tell(f"what each {column} added to each unit")
    found = await part(
        asker.output(asker.layer.name, query.vector, where=asker.view.where, group_by=column)
    )
    if isinstance(found, Refused):
        return found
    names = [plain(each) for each in found.groups or []]
    units = list(range(found.values.shape[2]))
    return Parts(column, names, units, found.values[0], found.initial[0])
