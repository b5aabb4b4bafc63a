"""How each kind of question is answered by several machines; a new kind is a line of `ANSWERS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from dualform.engine.api.opened import Opened, asked_contribution, query_tensor
from dualform.engine.api.results import Coverage, Sums, TopGroups, TopK
from dualform.engine.api.totals import check_groups
from dualform.engine.errors import DataLossError, EngineError, FailedPreconditionError
from dualform.engine.groups.best import BestGroups, best_groups
from dualform.engine.groups.ranked import block_queries
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.machines import asked, merging
from dualform.machines.fleet import Lost
from dualform.machines.unions import union
from dualform.questions import (
    Question,
    RowsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)


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
    """

    opened: Opened
    layer: Layer
    ask_all: Callable[..., list[Any]]
    sizes: Sequence[int]
    stop: Stop | None

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


def top_k(spread: Spread, question: TopKQuestion) -> TopK:
    """The best rows: each machine's own best, merged by exact score and row id."""
    query_tensor(spread.layer, question.queries)
    _check_contribution(spread, question)
    parts, missing = spread.ask_some(_partial(question), asked.rows_or_sums, question)
    coverage = spread.coverage([part.coverage for part in parts], missing)
    found = merging.top_k(question, parts, coverage)
    if question.distinct is None:
        return found

    def counts(values: pa.Array, groups: pa.Array | None) -> list[np.ndarray]:
        return spread.ask_some(_partial(question), asked.sharing, question, values, groups)[0]

    return merging.with_counts(question, found, counts)


def sums(spread: Spread, question: SumsQuestion) -> Sums:
    """Total weights: each machine's, added up."""
    query_tensor(spread.layer, question.queries)
    parts, missing = spread.ask_some(_partial(question), asked.rows_or_sums, question)
    coverage = spread.coverage([part.coverage for part in parts], missing)
    return merging.sums(question, parts, coverage)


def top_groups(spread: Spread, question: TopGroupsQuestion) -> TopGroups:
    """The best groups: every group's sums are added up here, for some queries at a time, since a
    group's rows are on all machines."""
    layer = spread.layer
    query_tensor(layer, question.queries)
    known = layer.space.grouping(question.by, "by").values
    check_groups(question, known)
    _check_contribution(spread, question)
    size = block_queries(len(known) * (1 + len(spread.sizes)))
    blocks, found = [], None
    for first in range(0, len(question.queries), size):
        block = _block(question, slice(first, first + size))
        parts, missing = spread.ask_some(_partial(question), asked.sums_of_groups, block)
        coverage = spread.coverage([part.coverage for part in parts], missing)
        groups, numbers = union([part.groups for part in parts])
        found = merging.add_up(groups, numbers, parts, coverage)
        best = best_groups(found.values, found.counts, question.k, question.order)
        blocks.append((best, found))
    assert found is not None
    best = BestGroups.join([best for best, _ in blocks])
    codes = best.codes.reshape(-1)
    return TopGroups(
        groups=found.groups.take(pa.array(codes, mask=codes < 0)),
        scores=best.scores,
        counts=np.append(found.counts, 0)[best.codes],
        coverage=found.coverage,
        plan=found.plan,
    )


def _block(question: TopGroupsQuestion, queries: slice) -> TopGroupsQuestion:
    direction = question.direction
    return replace(
        question,
        queries=question.queries[queries],
        direction=None if direction is None else direction[queries],
    )


def _partial(question: RowsQuestion) -> bool:
    return bool(getattr(question, "partial", False))


def _check_contribution(spread: Spread, question: TopKQuestion | TopGroupsQuestion) -> None:
    """Refuse contributions that need every row in the order of training."""
    if question.rank_by != "contribution":
        return
    contribution, _ = asked_contribution(spread.opened, spread.layer, question)
    if contribution.coefficients is None:
        raise in_order(spread.opened, "contributions")


def in_order(opened: Opened, what: str) -> EngineError:
    """The refusal of what a machine cannot compute of its own rows."""
    return FailedPreconditionError(
        f"{what} under {opened.ledger.family.name} follow every row in the order of training, and "
        "the rows are on several machines; ask for weights (top-k, groups, sums), or serve the "
        "index without --ray on a machine that has all of it",
        reason="NOT_DISTRIBUTED",
    )


ANSWERS: dict[type[Question], Callable[[Spread, Any], Any]] = {
    TopKQuestion: top_k,
    SumsQuestion: sums,
    TopGroupsQuestion: top_groups,
}
"""How each kind of question about rows is answered."""
