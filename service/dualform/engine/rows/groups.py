"""The groups that reducers keep apart: known beforehand, or numbered as their values come.

An index knows the groups of all its rows. A live training run, or a memory on another machine,
does not: there a value gets the next number when it first comes, and two sets of numbers are joined
by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.rows.table import Table
from dualform.store.grouping import Grouping, group

FEW_SPANS = 64
"""Up to so many runs of a tile are taken one by one."""


class Groups:
    """Numbers for the groups of rows.

    Args:
        by: The groups of all rows of a table, by position; a column's name, whose values are
            numbered as they come; None for one group of all rows.

    Attributes:
        in_order: The numbers are known to be in the order of the values.
        null: The number of the rows without a value; None as long as there are none.
    """

    def __init__(self, by: Grouping | str | None) -> None:
        self.by = by
        self._values = by.values if isinstance(by, Grouping) else pa.nulls(1 if by is None else 0)
        self._numbers: dict[object, int] | None = None
        self.in_order = not isinstance(by, str)
        self.null: int | None = None
        if isinstance(by, Grouping) and by.values.null_count:
            self.null = len(by.values) - 1

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> pa.Array:
        """The groups' values, by number: [groups]."""
        return self._values

    def codes(self, table: Table, positions: np.ndarray) -> np.ndarray:
        """The number of the group of each row at these positions: int [rows].

        The table's other values get numbers too: a group is there even where a filter leaves none
        of its rows.

        Raises:
            InvalidArgumentError: The table has no such column.
        """
        if isinstance(self.by, Grouping):
            return np.asarray(self.by.codes[positions])
        if self.by is None:
            return np.zeros(len(positions), np.int32)
        found = table.grouping(self.by)
        return np.asarray(self._take(found.values)[found.codes[positions]])

    def join(self, other: Groups) -> np.ndarray:
        """Take in another memory's groups; returns the number here of each of them, int [groups].

        Raises:
            ValueError: One groups rows, and the other does not.
        """
        if (self.by is None) != (other.by is None):
            raise ValueError("one of the two groups its rows, the other does not")
        if self.by is None or (self.by is other.by and isinstance(self.by, Grouping)):
            return np.arange(len(other), dtype=np.int32)
        return self._take(other.values)

    def ordered(self) -> tuple[pa.Array, np.ndarray]:
        """The values ascending, null last, and the number of each, int64 [groups]."""
        if self.in_order or not len(self):
            return self._values, np.arange(len(self))
        order = np.argsort(group(self._values).codes, kind="stable").astype(np.int64)
        return self._values.take(pa.array(order)), order

    def _take(self, values: pa.Array) -> np.ndarray:
        """Numbers of values, each of them once: int32 [values]."""
        if self._numbers is None:
            self._numbers = {_key(v): i for i, v in enumerate(self._values.to_pylist())}
        numbers = np.empty(len(values), np.int32)
        new = []
        for place, value in enumerate(values.to_pylist()):
            key = _key(value)
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                new.append(place)
                self.null = number if value is None else self.null
            numbers[place] = number
        if new:
            added = values.take(pa.array(new))
            self._values = pa.concat_arrays([self._values.cast(added.type), added])
            self.in_order = False
        return numbers


def in_line(groupings: Sequence[Grouping]) -> list[Grouping]:
    """The same groupings with the values of all of them, ascending, null last.

    Raises:
        ValueError: Numbers in one are text in another.
    """
    if all(grouping is groupings[0] for grouping in groupings):
        return list(groupings)
    known = {grouping.values.type for grouping in groupings} - {pa.null()}
    kind = pa.null() if not known else next(iter(known))
    if pa.large_string() in known and known <= {pa.string(), pa.large_string()}:
        kind = pa.large_string()
    elif len(known) > 1:
        raise ValueError(" and ".join(sorted(map(str, known))))
    whole = group(pa.concat_arrays([grouping.values.cast(kind) for grouping in groupings]))
    edges = np.cumsum([0, *(len(grouping.values) for grouping in groupings)])
    return [
        Grouping(whole.values, whole.codes[first:last][grouping.codes])
        for grouping, (first, last) in zip(groupings, pairwise(edges), strict=True)
    ]


def _key(value: object) -> object:
    """What stands for a value in a dict: NaN does not equal itself."""
    return ("nan",) if value != value else value


@dataclass(frozen=True)
class Runs:
    """A tile's columns ordered so that each group's rows lie together.

    Attributes:
        order: int64 [rows], or None where the tile's own order will do.
        spans: (group, first, last) of each run, half-open, in that order.
    """

    order: torch.Tensor | None
    spans: list[tuple[int, int, int]]


def tile_runs(groups: Groups, table: Table, positions: np.ndarray) -> Runs:
    """The runs of the rows at these positions, int64 [rows]; without groups, one of group 0."""
    if groups.by is None:
        return Runs(None, [(0, 0, len(positions))])
    return runs(groups.codes(table, positions))


def few_runs(codes: np.ndarray, groups: int) -> Runs | None:
    """Runs of equal codes, int32 [rows], below `groups`; None where they may be more than
    FEW_SPANS."""
    few = min(groups, len(codes)) <= FEW_SPANS
    return runs(codes) if few or np.count_nonzero(codes[1:] != codes[:-1]) < FEW_SPANS else None


def runs(codes: np.ndarray) -> Runs:
    """Runs of equal codes, int32 [rows]; shards lie grouped by label, so most tiles have few."""
    if not len(codes):
        return Runs(None, [])
    order = None
    edges = np.flatnonzero(np.diff(codes)) + 1
    if len(edges) > FEW_SPANS:
        sorted_order = np.argsort(codes, kind="stable")
        codes = codes[sorted_order]
        edges = np.flatnonzero(np.diff(codes)) + 1
        order = torch.from_numpy(sorted_order)
    bounds = [0, *edges.tolist(), len(codes)]
    return Runs(order, [(int(codes[a]), a, b) for a, b in pairwise(bounds)])
