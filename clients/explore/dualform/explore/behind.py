"""The training examples behind an output, by weight and by contribution, each with both numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dualform.client import AsyncClient, DualformError, UnavailableError
from dualform.explore.answers import Behind
from dualform.explore.keys import plain
from dualform.explore.payloads import Nothing, Payload, Text, payload_of, shortened
from dualform.explore.tokens import Marked, marked
from dualform.explore.view import ExampleId, literal

if TYPE_CHECKING:
    from dualform.explore.asking import Asker

RankBy = Literal["weight", "contribution"]
Vector = npt.NDArray[np.float32]
_MOST_TOKENS = 4096
_OF_ROWS = ("step", "slot", "position")


async def ranked(
    asker: Asker, query: Vector, rank_by: RankBy, unit: int | None
) -> tuple[Behind, ...]:
    """The k best examples, or rows, by weight or contribution.

    Args:
        asker: Whose view says how many, and whether an example's rows are added up.
        query: float32 [1, d_in].
        rank_by: By what.
        unit: That contributions go to; None where they are not known.

    Raises:
        DualformError: The ranking itself is refused; the other number alone may be missing.
    """
    examples = asker.view.by == "example" and "example" in asker.layer.columns
    find = _examples if examples else _rows
    found = await find(asker, query, rank_by, unit)
    ids = [each.example for each in found]
    payloads = await payloads_of(asker.client, ids, asker.index)
    shown = []
    for each, payload in zip(found, payloads, strict=True):
        text = None
        if isinstance(payload, Text):
            text = await _tokens(asker, query, each, payload.text, rank_by, unit)
        shown.append(
            Behind(
                each.example,
                each.row,
                each.weight,
                each.contribution,
                each.count,
                each.columns,
                shortened(payload),
                text,
            )
        )
    return tuple(shown)


async def payloads_of(
    client: AsyncClient, ids: Iterable[ExampleId | None], index: str | None
) -> list[Payload]:
    """What was kept of examples; where all together are refused, one after the other."""
    asked = list(ids)
    if not any(each is not None for each in asked):
        return [Nothing("training did not say which example it is") for _ in asked]
    try:
        return [payload_of(each) for each in await client.examples(asked, index=index)]
    except UnavailableError:
        raise
    except DualformError:  # too much at a time, or one of them is damaged
        pass
    found: list[Payload] = []
    for each in asked:
        try:
            found.append(payload_of((await client.examples([each], index=index))[0]))
        except UnavailableError:
            raise
        except DualformError as error:
            found.append(Nothing("what was kept can't be read", str(error)))
    return found


def _scored(asker: Asker, rank_by: RankBy, unit: int | None) -> dict[str, Any]:
    if rank_by == "weight":
        return {"rank_by": "weight"}
    return {
        "rank_by": "contribution",
        "unit": unit,
        "at_step": asker.view.step,
        "max_residual": asker.view.residual,
    }


def _where(asker: Asker, rank_by: RankBy, *more: str) -> str | None:
    """Weights do not change with the step, but rows after it have none yet."""
    until = asker.view.step
    before = f"step < {until}" if until is not None and rank_by == "weight" else None
    return asker.narrowed(before, *more)


def _other(rank_by: RankBy) -> RankBy:
    return "contribution" if rank_by == "weight" else "weight"


async def _examples(asker: Asker, query: Vector, rank_by: RankBy, unit: int | None) -> list[Behind]:
    layer = asker.layer.name

    async def sums(by: RankBy, k: int, *more: str) -> list[tuple[Any, float, int]]:
        found = await asker.client.top_groups(
            layer,
            query,
            by="example",
            k=k,
            where=_where(asker, by, *more),
            index=asker.index,
            **_scored(asker, by, unit),
        )
        names = [plain(each) for each in found.groups[0]]
        rows = zip(names, found.scores[0], found.counts[0], strict=True)
        return [(name, float(score), int(count)) for name, score, count in rows if count]

    best = await sums(rank_by, asker.view.k)
    ids = [name for name, _, _ in best if name is not None]
    if not ids:
        return [_behind(None, score, None, count, {}, rank_by) for _, score, count in best]
    among = f"example in ({', '.join(map(literal, ids))})"
    others: dict[Any, float] = {}
    if unit is not None:
        try:
            found = await sums(_other(rank_by), len(ids), among)
            others = {name: score for name, score, _ in found}
        except UnavailableError:
            raise
        except DualformError:
            pass
    columns = await columns_of(asker, ids)
    return [
        _behind(name, score, others.get(name), count, columns.get(name, {}), rank_by)
        for name, score, count in best
    ]


async def columns_of(asker: Asker, ids: Sequence[Any]) -> dict[Any, dict[str, Any]]:
    """By example, what its first row says of it, but for numbers that its rows differ in; nothing
    where the layer has no ids."""
    if not ids or "example" not in asker.layer.columns:
        return {}
    among = f"example in ({', '.join(map(literal, ids))})"
    nothing = np.zeros((1, asker.layer.d_in), np.float32)
    first = await asker.client.top_k(
        asker.layer.name, nothing, k=len(ids), where=among, distinct="example", index=asker.index
    )
    columns: dict[Any, dict[str, Any]] = {}
    for place in np.flatnonzero(first.rows[0] >= 0):
        said = {name: plain(column[0, place]) for name, column in first.columns.items()}
        columns[said["example"]] = {
            name: value
            for name, value in said.items()
            if name not in _OF_ROWS and not isinstance(value, float)  # such as the step's loss
        }
    return columns


async def _rows(asker: Asker, query: Vector, rank_by: RankBy, unit: int | None) -> list[Behind]:
    async def top(by: RankBy, k: int, *more: str) -> Any:
        return await asker.client.top_k(
            asker.layer.name,
            query,
            k=k,
            where=_where(asker, by, *more),
            index=asker.index,
            **_scored(asker, by, unit),
        )

    best = await top(rank_by, asker.view.k)
    places = np.flatnonzero(best.rows[0] >= 0)
    columns = [
        {name: plain(column[0, place]) for name, column in best.columns.items()} for place in places
    ]
    others: dict[int, float] = {}
    if unit is not None and columns:
        # Of these steps and slots; the rows among them are told by their ids.
        steps = sorted({each["step"] for each in columns})
        slots = sorted({each["slot"] for each in columns})
        among = [
            f"{name} in ({', '.join(map(str, values))})"
            for name, values in (("step", steps), ("slot", slots))
        ]
        try:
            found = await top(_other(rank_by), 4096, *among)
            scores = zip(found.rows[0].tolist(), found.scores[0].tolist(), strict=True)
            others = {row: score for row, score in scores if row >= 0}
        except UnavailableError:
            raise
        except DualformError:
            pass
    return [
        _behind(
            said.get("example"),
            float(best.scores[0, place]),
            others.get(int(best.rows[0, place])),
            1,
            said,
            rank_by,
            int(best.rows[0, place]),
        )
        for place, said in zip(places, columns, strict=True)
    ]


def _behind(
    example: Any,
    score: float,
    other: float | None,
    count: int,
    columns: dict[str, Any],
    rank_by: RankBy,
    row: int | None = None,
) -> Behind:
    weight, contribution = (score, other) if rank_by == "weight" else (other, score)
    return Behind(example, row, weight, contribution, count, columns, Nothing(""))


async def _tokens(
    asker: Asker, query: Vector, each: Behind, text: str, rank_by: RankBy, unit: int | None
) -> Marked:
    """A text's tokens with what each added; of one row only that token."""
    if "position" not in asker.layer.columns or each.example is None:
        return marked(text, {}, 0)
    if each.row is not None:
        step, place = each.columns["step"], each.columns["position"]
        score = each.weight if rank_by == "weight" else each.contribution
        if place is None or score is None:
            return marked(text, {}, 0)
        count = await places_in(asker, each.example, step)
        return marked(text, {place: score}, count)
    try:
        found = await asker.client.top_groups(
            asker.layer.name,
            query,
            by="position",
            k=_MOST_TOKENS,
            order="absolute",
            where=_where(asker, rank_by, f"example = {literal(each.example)}"),
            index=asker.index,
            **_scored(asker, rank_by, unit),
        )
    except UnavailableError:
        raise
    except DualformError:
        return marked(text, {}, 0)  # a column without values: no sequence
    scores = {
        int(place): float(score)
        for place, score, count in zip(
            found.groups[0], found.scores[0], found.counts[0], strict=True
        )
        if count and place is not None
    }
    return marked(text, scores, max(scores, default=-1) + 1)


async def places_in(asker: Asker, example: ExampleId, step: int) -> int:
    """How many positions an example has in a step."""
    nothing = np.zeros((1, asker.layer.d_in), np.float32)
    try:
        found = await asker.client.sums(
            asker.layer.name,
            nothing,
            group_by="position",
            where=f"example = {literal(example)} and step = {step}",
            index=asker.index,
        )
    except UnavailableError:
        raise
    except DualformError:
        return 0
    places = [g for g, n in zip(found.groups, found.counts, strict=True) if n and g is not None]
    return max(places, default=-1) + 1
