"""What is ranked, and what "best" means.

A row's *merit* is its score, the negated score, or the absolute score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dualform.engine.topk.contribution import Contribution
from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class Ranking:
    """What is ranked, and by what.

    Groups are known beforehand, of all rows, or they are a column's name, and come with the tiles.

    Attributes:
        k: Rows per query (and group).
        order: "largest", "smallest" or "absolute".
        grouping: Rank inside each of these groups, or None.
        contribution: Rank by contribution to one output unit, or along directions; None for the
            attention weight.
        distinct: Of rows with the same value only the best counts; a row without a value stands
            for itself. None where each row counts.
    """

    k: int
    order: str
    grouping: Grouping | str | None = None
    contribution: Contribution | None = None
    distinct: Grouping | str | None = None

    def part(self, queries: slice) -> Ranking:
        """The same for some of the queries."""
        if self.contribution is None:
            return self
        return replace(self, contribution=self.contribution.part(queries))

    @property
    def groups(self) -> int:
        """Number of groups that are known beforehand; 1 without."""
        return len(self.grouping.values) if isinstance(self.grouping, Grouping) else 1

    @property
    def hits(self) -> int:
        """Rows to return per query."""
        return self.k * self.groups


def merit(scores: torch.Tensor, order: str) -> torch.Tensor:
    """What "best" means by this order, of scores of any shape."""
    if order == "largest":
        return scores
    return -scores if order == "smallest" else scores.abs()
