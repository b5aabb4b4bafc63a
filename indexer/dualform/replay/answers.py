"""What a replay answers: each is there once training has ended as the first one did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.engine.memory.fold import Reducer
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups
from dualform.engine.topk import top_k
from dualform.engine.totals.followed import FOLLOWED_BYTES
from dualform.engine.totals.group_sums import GroupCount, GroupSum, KeySum
from dualform.engine.totals.row_parts import WeightedValues
from dualform.replay.errors import ReplayError

Group = int | float | str | bool | None
"""A value of a metadata column; None where not annotated."""


@dataclass(frozen=True)
class TopKResult:
    """The best rows, by (score in the order asked for, row id ascending).

    Attributes:
        rows: int64 [n, k], or [n, groups, k] with group_by; row ids, -1 where there are fewer.
        scores: float32, the same shape; NaN where there are fewer.
        groups: Their values, ascending, null last; None without group_by.
        columns: By row id, the metadata of every row in `rows`.
    """

    rows: np.ndarray
    scores: np.ndarray
    groups: list[Group] | None
    columns: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class SumsResult:
    """Total attention weight per group.

    Attributes:
        groups: Their values, ascending, null last.
        values: float64 [n, groups].
        counts: int64 [groups], rows per group.
    """

    groups: list[Group]
    values: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class OutputParts:
    """A layer's output split by group; it is `initial` and all of `values` added up.

    Attributes:
        groups: Their values, ascending, null last.
        values: float32 [n, groups, d_out], what each group's rows add.
        initial: float32 [n, d_out], what initial weights, biases and momentum buffers left behind.
        counts: int64 [groups], rows per group.
    """

    groups: list[Group]
    values: np.ndarray
    initial: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class KeySumsResult:
    """Keys added up per group.

    Attributes:
        groups: Their values, ascending, null last.
        keys: float64 [groups, d_in].
        counts: int64 [groups], rows per group.
    """

    groups: list[Group]
    keys: np.ndarray
    counts: np.ndarray

    def sums(self, queries: np.ndarray) -> np.ndarray:
        """Signed total weight per group, float64 [n, groups], of queries float32 [n, d_in]."""
        return np.asarray(queries.astype(np.float64) @ self.keys.T)


class Answer:
    """An answer that is there once training has ended: what it is made of."""

    def __init__(self, *reducers: Reducer) -> None:
        self.reducers: tuple[Reducer, ...] = reducers
        self._finished = False

    def finish(self) -> None:
        """Training has ended and was the first one's: the result may be asked for."""
        self._finished = True

    def _check_finished(self) -> None:
        if not self._finished:
            raise ReplayError(
                "there is no answer yet: it is complete once the recorder of the second training "
                "is closed, after as many steps as the first one"
            )


class TopK(Answer):
    """The best rows.

    Args:
        best: Takes the tiles.
        grouped: Whether groups were asked for.
    """

    def __init__(self, best: top_k.TopK, grouped: bool) -> None:
        super().__init__(best)
        self._best = best
        self._grouped = grouped

    def result(self) -> TopKResult:
        """The answer.

        Raises:
            ReplayError: The replay has not ended.
        """
        self._check_finished()
        hits = self._best.result()
        rows, scores = hits.ids, hits.scores
        if not self._grouped:
            rows, scores = rows[:, 0], scores[:, 0]
        groups = hits.groups.to_pylist() if self._grouped else None
        return TopKResult(rows, scores, groups, hits.columns)


class Sums(Answer):
    """Total attention weight per group.

    Args:
        queries: Their number.
        group_by: A metadata column.
        absolute: Sum |weight|.
    """

    def __init__(self, queries: int, group_by: str, absolute: bool) -> None:
        self._groups = Groups(group_by)
        self._total = GroupSum(queries, self._groups, absolute)
        self._count = GroupCount(self._groups)
        super().__init__(self._total, self._count)

    def result(self) -> SumsResult:
        """The answer.

        Raises:
            ReplayError: The replay has not ended.
        """
        self._check_finished()
        groups = self._groups.ordered()[0].to_pylist()
        return SumsResult(groups, self._total.result(), self._count.result())


class DualOutput(Answer):
    """A layer's output.

    Args:
        initial: float64 [n, d_out], what the state before the first step left behind.
        rows: Adds up what the rows add; None where that is found in another way.
        groups: The groups that it keeps apart.
    """

    def __init__(self, initial: np.ndarray, rows: WeightedValues | None, groups: Groups) -> None:
        self._initial = initial
        self._rows = rows
        self._groups = groups
        self._count = GroupCount(groups)
        super().__init__(*(() if rows is None else (rows,)), self._count)

    def codes(self, tile: Tile) -> np.ndarray:
        """The group of each row of a tile, int64 [rows].

        Raises:
            ReplayError: With it there are more groups than memory.
        """
        if self._groups.by is None:
            return np.zeros(len(tile.positions), np.int64)
        codes = np.asarray(self._groups.codes(tile.table, tile.positions))
        needed = self.nbytes(len(self._groups))
        if needed > FOLLOWED_BYTES:
            raise ReplayError(
                f"{len(self._groups):,} values of {self._groups.by!r} came by step "
                f"{int(tile.steps[0])}: an output by these groups takes {needed / 2**30:,.1f} GiB, "
                f"and at most {FOLLOWED_BYTES / 2**30:g} GiB are taken. Group by a column with "
                "fewer values, or ask for the rows of one value at a time, with where="
            )
        return codes

    def nbytes(self, groups: int) -> int:
        """Memory that it takes with so many groups."""
        return groups * self._initial.size * self._initial.itemsize

    def _of_rows(self) -> np.ndarray:
        """What the rows add: float64 [n, groups, d_out], in the order of the groups' values."""
        assert self._rows is not None
        return self._rows.result()

    def result(self) -> np.ndarray:
        """The output, the initial part and what every row adds: float32 [n, d_out].

        Raises:
            ReplayError: The replay has not ended.
        """
        self._check_finished()
        whole = self._initial + self._of_rows().sum(axis=1)
        return np.asarray(whole.astype(np.float32))

    def parts(self) -> OutputParts:
        """The output split by group.

        Raises:
            ReplayError: The replay has not ended, or was not asked with group_by.
        """
        self._check_finished()
        if self._groups.by is None:
            raise ReplayError("the output was asked for as a whole; ask with group_by=")
        return OutputParts(
            self._groups.ordered()[0].to_pylist(),
            self._of_rows().astype(np.float32),
            self._initial.astype(np.float32),
            self._count.result(),
        )


class KeySums(Answer):
    """Keys added up per group. No query is needed before training ends.

    Memory: 8 d_in bytes per group.

    Args:
        group_by: A metadata column, such as the place of a token in the training text.
    """

    def __init__(self, group_by: str) -> None:
        super().__init__()
        self.group_by = group_by
        self._groups = Groups(group_by)

    def start(self, d_in: int) -> None:
        """The length of a key is known."""
        self._total = KeySum(d_in, self._groups)
        self._count = GroupCount(self._groups)
        self.reducers = (self._total, self._count)

    def result(self) -> KeySumsResult:
        """The sums.

        Raises:
            ReplayError: Training has not ended.
        """
        self._check_finished()
        groups = self._groups.ordered()[0].to_pylist()
        return KeySumsResult(groups, self._total.result(), self._count.result())
