"""Asking all machines about a layer, and what an answer may do without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.engine.api.opened import Opened
from dualform.engine.api.results import Coverage
from dualform.engine.errors import DataLossError, EngineError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.machines import asked, merging
from dualform.machines.fleet import Lost
from dualform.machines.following import FollowedUnits
from dualform.machines.unions import union
from dualform.v1 import attribution_pb2 as pb


@dataclass(frozen=True)
class Spread:
    """Who can be asked about a layer.

    Attributes:
        opened: The index without its rows: states, ledger, what is made of them.
        layer: The layer, whose rows are elsewhere.
        ask_all: Asks every machine that has rows of it for a function of `asked`; gives what each
            found, or Lost.
        sizes: How many rows each has.
        stop: True once nobody waits for the answer.
        ask_machine: Likewise asks one of them, by its place among them.
        units: What is known of output units that were followed through training.
    """

    opened: Opened
    layer: Layer
    ask_all: Callable[..., list[Any]]
    sizes: Sequence[int]
    stop: Stop | None
    ask_machine: Callable[..., Any]
    units: FollowedUnits

    def ask_one(self, machine: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """What one of the machines found.

        Raises:
            DataLossError: Its rows are nowhere.
        """
        found = self.ask_machine(machine, function, *arguments)
        if isinstance(found, Lost):
            raise self._nowhere(found.error, self.sizes[machine])
        return found

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What all machines found.

        Raises:
            DataLossError: One's rows are nowhere.
        """
        found, _ = self.ask_some(False, function, *arguments)
        return found

    def ask_some(
        self, partial: bool, function: Callable[..., Any], *arguments: Any
    ) -> tuple[list[Any], int]:
        """What the machines found, of some of them at least, and how many rows are missing.

        Args:
            partial: Rows may be missing.
            function, arguments: What is asked.

        Raises:
            DataLossError: Rows are nowhere, and none may be missing, or all are.
        """
        found = self.ask_all(function, *arguments)
        there = [each for each in found if not isinstance(each, Lost)]
        for each, rows in zip(found, self.sizes, strict=True):
            if isinstance(each, Lost) and not (partial and there):
                raise self._nowhere(each.error, rows)
        gone = [isinstance(each, Lost) for each in found]
        return there, sum(rows for rows, lost in zip(self.sizes, gone, strict=True) if lost)

    def coverage(self, parts: Sequence[Coverage], missing: int = 0) -> Coverage:
        """Of all parts together."""
        return merging.coverage(parts, self.layer.rows, self.layer.dropped, missing)

    def _nowhere(self, error: EngineError, rows: int) -> EngineError:
        if not isinstance(error, DataLossError):
            return error
        return error.saying(
            f"{rows:,} of the {self.layer.rows:,} rows of layer {self.layer.name!r} are nowhere: "
            f"{error}; ask with partial=True for an answer from the other rows (top-k, groups and "
            "sums), or bring the machine back"
        )


class Counts:
    """Counts rows that pass a filter and lie before a step, once each column is asked about."""

    def __init__(self, spread: Spread, where: pb.Filter | None, before: int | None) -> None:
        self._spread, self._where, self._before = spread, where, before
        self._known: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._coverage: Coverage | None = None

    def coverage(self) -> Coverage:
        """Of these rows; of all of them it is known."""
        layer = self._spread.layer
        if self._where is None and self._before is None:
            return Coverage(layer.rows, layer.rows, layer.nonfinite, layer.dropped)
        if self._coverage is None:
            self._ask([])
        assert self._coverage is not None
        return self._coverage

    def of(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """How many of them each of a column's values has, and how many there are, int64 [groups]
        both."""
        if column not in self._known:
            self._ask([column])
        return self._known[column]

    def _ask(self, columns: list[str]) -> None:
        spread, name = self._spread, self._spread.layer.name
        found = spread.ask(asked.counted, name, self._where, self._before, columns)
        self._coverage = spread.coverage([part.coverage for part in found])
        for column in columns:
            parts = [part.groups[column] for part in found]
            groups, numbers = union([values for values, _, _ in parts])
            selected, whole = np.zeros((2, len(groups)), np.int64)
            for place, (_, some, every) in zip(numbers, parts, strict=True):
                selected[place] += some
                whole[place] += every
            self._known[column] = selected, whole
