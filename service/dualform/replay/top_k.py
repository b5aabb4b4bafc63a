"""The k best rows of a live run, scored exactly as they pass by (docs/exactness.md, rules 1, 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dualform.engine.memory.exact import ExactDots, error_bound
from dualform.engine.topk.ranking import merit
from dualform.replay.errors import ReplayError
from dualform.replay.groups import Group, Groups
from dualform.replay.reducer import Pending
from dualform.replay.tiles import LiveTile

ORDERS = ("largest", "smallest", "absolute")
_PAIRS = 4096
_UNIT = 2.0**-53


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


class TopK(Pending):
    """Keeps the k best rows of each query and group, and nothing else.

    Args:
        queries: float32 [n, d_in], finite.
        k: At least 1.
        order: "largest", "smallest" or "absolute".
        group_by: A metadata column, or None.
    """

    def __init__(self, queries: torch.Tensor, k: int, order: str, group_by: str | None) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ReplayError(f"k is {k!r}; at least 1 is needed")
        if order not in ORDERS:
            raise ReplayError(f"order is {order!r}; allowed are {', '.join(ORDERS)}")
        self._queries = queries
        self._wide = queries.double()
        self._norms = torch.linalg.vector_norm(self._wide, dim=1)
        self._k = k
        self._order = order
        self._groups = Groups(group_by)
        self._best: list[_Best] = []
        self._columns: dict[int, dict[str, Any]] = {}

    def update(self, tile: LiveTile, weights: torch.Tensor) -> None:
        """Take a tile: propose by float32 weights with slack, keep by exact scores."""
        codes = self._groups.codes(tile)
        while len(self._best) < len(self._groups):
            self._best.append(_Best(len(self._queries), self._k))
        error = error_bound(tile.keys.shape[1], self._norms, tile.max_norm)[:, None]
        merits = merit(weights, self._order)
        if tile.finite is not None:
            merits = torch.where(tile.finite, merits, -torch.inf)
        new: set[int] = set()
        for code in np.unique(codes).tolist():
            best = self._best[code]
            if len(self._best) == 1:
                query, rows = self._proposed(best, merits, error)
            else:
                own = torch.from_numpy(np.flatnonzero(codes == code))
                query, row = self._proposed(best, merits[:, own], error)
                rows = own[row]
            scores = self._exact(tile.keys, query, rows)
            new.update(best.take(query.numpy(), scores, rows.numpy() + tile.start, self._order))
        self._remember(tile, new)

    def result(self) -> TopKResult:
        """The answer.

        Raises:
            ReplayError: The replay has not ended.
        """
        self._check_finished()
        groups, order = self._groups.ordered()
        shape = (len(self._queries), 0, self._k)
        rows, scores = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        if len(order):
            rows = np.stack([self._best[number].rows for number in order], 1)
            scores = np.stack([self._best[number].scores for number in order], 1)
        if self._groups.column is None:
            rows, scores = rows[:, 0], scores[:, 0]
        kept = {int(row) for row in np.unique(rows) if row >= 0}
        columns = {row: self._columns[row] for row in sorted(kept)}
        return TopKResult(rows, scores, groups if self._groups.column else None, columns)

    def _proposed(
        self, best: _Best, merits: torch.Tensor, error: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of query and row that may be among the k best."""
        possible = merits >= _below(
            torch.from_numpy(best.limits(self._order))[:, None] - error, merits
        )
        # Keys grow while training, so that whole tiles are better than all rows before: then the
        # tile's own k-th merit is the better limit.
        if int(possible.sum()) > 2 * self._k * len(merits):
            kth = torch.topk(merits, self._k, dim=1).values[:, -1:].double()
            possible &= merits >= _below(kth - 2 * error, merits)
        query, row = torch.nonzero(possible, as_tuple=True)
        return query, row

    def _exact(self, keys: torch.Tensor, query: torch.Tensor, row: torch.Tensor) -> np.ndarray:
        """Scores of pairs: the float32 nearest to the exact dot product, as `engine.exact`."""
        scores = np.empty(len(query), np.float32)
        for start in range(0, len(query), _PAIRS):
            part = slice(start, start + _PAIRS)
            terms = keys[row[part]].double().mul_(self._wide[query[part]])
            sums = terms.sum(1).numpy()
            bound = terms.abs_().sum(1).numpy() * ((keys.shape[1] + 2) * _UNIT)
            with np.errstate(over="ignore"):
                own = sums.astype(np.float32)
                unsure = (sums - bound).astype(np.float32) != (sums + bound).astype(np.float32)
            for i in np.flatnonzero(unsure) + start:
                dots = ExactDots(keys[row[i]][None], self._queries[query[i]])
                own[i - start] = dots.rounded()[0]
            scores[part] = own + np.float32(0)
        return scores

    def _remember(self, tile: LiveTile, rows: set[int]) -> None:
        """Keep the metadata of rows that are among the best, and of no others for long."""
        if not rows:
            return
        ordered = sorted(rows)
        kept = tile.columns.take([row - tile.start for row in ordered]).to_pylist()
        self._columns.update(zip(ordered, kept, strict=True))
        if len(self._columns) > 4096 + 2 * len(self._best) * len(self._queries) * self._k:
            best = set(np.unique([each.rows for each in self._best]).tolist())
            self._columns = {row: own for row, own in self._columns.items() if row in best}


class _Best:
    """The k best rows of each query: rows int64 and scores float32 [n, k], padded, in order."""

    def __init__(self, queries: int, k: int) -> None:
        self.rows = np.full((queries, k), -1, np.int64)
        self.scores = np.full((queries, k), np.nan, np.float32)

    def limits(self, order: str) -> np.ndarray:
        """Merits that must be reached, float64 [n]; -inf while there are fewer than k rows."""
        last = merit(torch.from_numpy(self.scores[:, -1]), order).double().numpy()
        return np.asarray(np.where(self.rows[:, -1] < 0, -np.inf, last))

    def take(
        self, query: np.ndarray, scores: np.ndarray, rows: np.ndarray, order: str
    ) -> Sequence[int]:
        """Take scored rows, all of them later than those before; returns those that are kept."""
        # A tie goes to the earlier row.
        better = (self.rows[query, -1] < 0) | (_merits(scores, order) > self.limits(order)[query])
        query, scores, rows = query[better], scores[better], rows[better]
        if not len(query):
            return ()
        k = self.rows.shape[1]
        touched = np.unique(query)
        all_queries = np.concatenate([np.repeat(touched, k), query])
        all_rows = np.concatenate([self.rows[touched].ravel(), rows])
        all_scores = np.concatenate([self.scores[touched].ravel(), scores])
        merits = np.where(all_rows < 0, -np.inf, _merits(all_scores, order))
        padding = all_rows < 0
        best = np.lexsort((all_rows, -merits, padding, all_queries))
        first = np.searchsorted(all_queries[best], touched)
        chosen = best[first[:, None] + np.arange(k)]
        self.rows[touched] = all_rows[chosen]
        self.scores[touched] = all_scores[chosen]
        kept: list[int] = np.intersect1d(self.rows[touched], rows).tolist()
        return kept


def _below(limits: torch.Tensor, merits: torch.Tensor) -> torch.Tensor:
    """Limits in the merits' dtype, low enough to let through what rounds to the same float32."""
    limits = limits - (limits.abs() * 2.0**-22 + 2.0**-149)
    lowest = torch.finfo(merits.dtype).min
    limits = torch.where(torch.isfinite(limits), limits, lowest).to(merits.dtype)
    downwards = torch.tensor(-torch.inf, dtype=merits.dtype)
    return torch.nextafter(limits, downwards).clamp_min(lowest)


def _merits(scores: np.ndarray, order: str) -> np.ndarray:
    return np.asarray(merit(torch.from_numpy(scores), order).double().numpy())
