"""What a layer saw of a training example: its key, as a query.

No question gives keys; but a row's products with the unit vectors are its key, and weights are the
float32 nearest to the exact product (docs/exactness.md): number by number, what was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.client import AsyncClient, InvalidArgumentError, LayerInfo, NotFoundError, TopKResult
from dualform.explore.view import ExampleId, literal

MOST_NUMBERS = 8192
"""Longer keys are not fetched: d_in queries of d_in numbers would be 256 MiB."""
_BLOCK = 1 << 22  # Numbers of the queries that go into one question: 16 MiB.
_SAME_PLACE = 64  # Rows of one step, slot and position: of a layer that ran so often in it.


@dataclass(frozen=True, eq=False)
class Key:
    """A training row's key.

    Attributes:
        query: float32 [1, d_in].
        row: Its id.
        columns: Its metadata.
        steps: All the steps in which the example has rows, ascending.
        places: Of `columns["step"]`: the positions at which it has rows; empty where it has none.
    """

    query: npt.NDArray[np.float32]
    row: int
    columns: dict[str, Any]
    steps: list[int]
    places: list[int]


async def key_of(
    client: AsyncClient,
    layer: LayerInfo,
    example: ExampleId,
    *,
    seen: int | None = None,
    place: int | None = None,
    index: str | None = None,
) -> Key:
    """The key of an example's row.

    Args:
        client: Who answers.
        layer: Whose key.
        example: The id.
        seen: At which step; None for the last at which it was there.
        place: Its position in a sequence; None for the last one.
        index: As for every question.

    Raises:
        InvalidArgumentError: No such column, or a key too long.
        NotFoundError: No row with a finite key there.
    """
    if "example" not in layer.columns:
        raise InvalidArgumentError(
            f"layer {layer.name} has no column example: training did not say which example a row "
            "is of; recorder.annotate(example=ids) does"
        )
    if layer.d_in > MOST_NUMBERS:
        raise InvalidArgumentError(
            f"keys of layer {layer.name} have {layer.d_in:,} numbers, and up to {MOST_NUMBERS:,} "
            "are fetched; upload the query as .npy"
        )
    where = f"example = {literal(example)}"
    nothing = np.zeros((1, layer.d_in), np.float32)

    async def values(column: str, where: str) -> list[int]:
        found = await client.sums(layer.name, nothing, group_by=column, where=where, index=index)
        some = zip(found.groups, found.counts, strict=True)
        return [group for group, count in some if count and group is not None]

    steps = await values("step", where)
    if not steps:
        raise NotFoundError(f"no row of example {example!r} in layer {layer.name}")
    where += f" and step = {steps[-1] if seen is None else seen}"
    places = await values("position", where)
    if places:
        where += f" and position = {places[-1] if place is None else place}"
    rows = await client.top_k(layer.name, nothing, k=1, where=where, index=index)
    row = int(rows.rows[0, 0])
    if row < 0:
        raise NotFoundError(f"layer {layer.name} has no row with a finite key where {where}")
    columns = {name: plain(column[0, 0]) for name, column in rows.columns.items()}
    query = await _products(client, layer, where, row, index)
    return Key(query, row, columns, steps, places)


async def _products(
    client: AsyncClient, layer: LayerInfo, where: str, row: int, index: str | None
) -> npt.NDArray[np.float32]:
    """A row's weights for all unit vectors, float32 [1, d_in]."""
    units = np.eye(layer.d_in, dtype=np.float32)
    each = max(1, _BLOCK // layer.d_in)
    parts = []
    for first in range(0, layer.d_in, each):
        found = await client.top_k(
            layer.name, units[first : first + each], k=_SAME_PLACE, where=where, index=index
        )
        parts.append(_scores_of(found, row, layer.name))
    return np.concatenate(parts)[None]


def _scores_of(found: TopKResult, row: int, layer: str) -> npt.NDArray[np.float32]:
    here = found.rows == row
    if not bool(np.all(here.sum(axis=1) == 1)):
        raise NotFoundError(
            f"row {row} of layer {layer} is one of more than {_SAME_PLACE} of its step and place"
        )
    scores: npt.NDArray[np.float32] = found.scores[here]
    return scores


def plain(value: Any) -> Any:
    """A metadata value as Python has it."""
    return value.item() if hasattr(value, "item") else value
