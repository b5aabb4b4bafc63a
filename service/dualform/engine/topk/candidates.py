"""The rows that may still be among the k best, kept until exact scores decide.

A row's *merit* is what "best" means: its score, the negated score, or the absolute score. Proposals
come with merits in float32 or float64 and bounds of their errors; what is returned is scored
exactly. docs/exactness.md has the rules.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.exact import ExactDots, error_bound
from dualform.engine.memory.layer import Layer
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.distinct import Distinct, first_of_each
from dualform.store.grouping import Grouping

_RESCORE_ROWS = 4096
_KEYS_TOGETHER = 1024
_COMPRESS_AT = 1 << 17
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = 2.0**-149


@dataclass(frozen=True)
class Ranking:
    """What is ranked, and by what.

    Attributes:
        k: Rows per query (and group).
        order: "largest", "smallest" or "absolute".
        grouping: Rank inside each of these groups, or None.
        contribution: Rank by contribution to one output unit; None for the attention weight.
        distinct: Of rows with the same value only the best counts; None where each row does.
    """

    k: int
    order: str
    grouping: Grouping | None = None
    contribution: Contribution | None = None
    distinct: Distinct | None = None

    @property
    def groups(self) -> int:
        """Number of groups; 1 without."""
        return 1 if self.grouping is None else len(self.grouping.values)

    @property
    def hits(self) -> int:
        """Rows to return per query."""
        return self.k * self.groups


class Candidates:
    """The rows that may still be among the k best of each query and group.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in].
        ranking: What is ranked.

    Attributes:
        query_norms: float64 [n], Euclidean.
        error: float64 [n], how far a float32 attention weight can be from the exact one.
    """

    def __init__(self, layer: Layer, queries: torch.Tensor, ranking: Ranking) -> None:
        self._layer = layer
        self._queries = queries
        self._k = ranking.k
        self._order = ranking.order
        self._contribution = ranking.contribution
        self._codes = None if ranking.grouping is None else ranking.grouping.codes
        self._groups = ranking.groups
        self._distinct = None if ranking.distinct is None else ranking.distinct.codes
        self.query_norms = torch.linalg.vector_norm(queries.double(), dim=1)
        longest = max((shard.max_norm for shard in layer.shards), default=0.0)
        self.error = error_bound(queries.shape[1], self.query_norms, longest).numpy()
        self._limits = np.full(len(queries) * self._groups, -np.inf)
        self._parts = [_Part.empty()]
        self._pending = 0
        # Until then nothing is known to be too low, and every row is a candidate.
        self._soon = min(_COMPRESS_AT, 8 * ranking.k * len(self._limits) + _RESCORE_ROWS)
        self._compress_at = self._soon

    def limits(self) -> np.ndarray:
        """Merits that are surely below these are not among the k best, float64 [n, groups]."""
        self._compress()
        return self._limits.reshape(-1, self._groups)

    def possible(
        self, bounds: torch.Tensor, allowance: torch.Tensor, where: slice | np.ndarray
    ) -> np.ndarray:
        """Which rows may matter to some query.

        Args:
            bounds: float32 [rows, n]: merits are at most so large, but for
            allowance: float64 [n]. The bounds are overwritten.
            where: Positions of the rows.

        Returns:
            bool [rows].
        """
        limits = torch.from_numpy(self.limits()) - allowance[:, None]
        thresholds = torch.nextafter(limits.float(), torch.tensor(-torch.inf)).T
        if self._codes is not None:
            thresholds = thresholds.contiguous()[torch.from_numpy(self._codes[where])]
        if bounds.shape[1] == 1:
            return np.asarray((bounds >= thresholds)[:, 0].numpy())
        # The largest excess, as `any` is slow along the shorter axis.
        excess = bounds.sub_(thresholds.clamp(-_FLOAT32_MAX, _FLOAT32_MAX))
        return np.asarray((excess.amax(dim=1) >= 0).numpy())

    def add_matrix(self, merits: np.ndarray, positions: np.ndarray) -> None:
        """Take proposals by weight, float32 and int64 [n, m], of a single group."""
        cells = np.repeat(np.arange(len(merits)), merits.shape[1])
        wide = merits.reshape(-1).astype(np.float64)
        self._add(_Part(cells, wide, self.error[cells], positions.reshape(-1)))

    def add_tile(
        self,
        merits: torch.Tensor,
        errors: torch.Tensor,
        positions: np.ndarray,
        which: np.ndarray | None,
    ) -> None:
        """Take the rows of a tile that may matter.

        Args:
            merits: [n, rows].
            errors: float64 [n, 1] or [n, rows], bounds of the merits' errors.
            positions: int64 [rows].
            which: The queries that the merits belong to, int64 [n]; None for all.
        """
        limits = self._limits.reshape(-1, self._groups)
        if which is not None:
            limits = limits[which]
        if self._codes is not None:
            limits = limits[:, self._codes[positions]]
        threshold = torch.from_numpy(limits).to(merits.device) - errors
        if merits.dtype == torch.float32:
            threshold = torch.nextafter(threshold.float(), torch.tensor(-torch.inf))
        query, row = torch.nonzero(merits >= threshold, as_tuple=True)
        if not len(query):
            return
        found = merits[query, row].double().cpu().numpy()
        found_errors = errors.expand(merits.shape)[query, row].cpu().numpy()
        queries, own = query.cpu().numpy(), positions[row.cpu().numpy()]
        if which is not None:
            queries = which[queries]
        cells = queries * self._groups
        if self._codes is not None:
            cells += self._codes[own]
        self._add(_Part(cells, found, found_errors, own))
        if self._pending >= self._compress_at:
            self._compress()
            self._compress_at = max(self._soon, 2 * self._pending)

    def forget(self, queries: np.ndarray, first: int, last: int) -> None:
        """Drop what these queries were offered from positions first to last - 1, before these are
        scanned instead."""
        part = self._joined()
        inside = (part.positions >= first) & (part.positions < last)
        self._replace(part.where(~(inside & np.isin(part.cells // self._groups, queries))))

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions, int64 [n * groups, k], and exact scores, float32; padded with -1 and NaN."""
        self._compress()
        part = self._joined()
        scores = self._exact(part)
        order, rank = self._ranked(part, scores)
        keep = order[rank < self._k]
        own_cells, own_rank = part.cells[keep], rank[rank < self._k]
        out_positions = np.full((len(self._limits), self._k), -1, np.int64)
        out_scores = np.full((len(self._limits), self._k), np.nan, np.float32)
        out_positions[own_cells, own_rank] = part.positions[keep]
        out_scores[own_cells, own_rank] = scores[keep]
        return out_positions, out_scores

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._pending += len(part.cells)

    def _joined(self) -> _Part:
        if len(self._parts) > 1:
            self._parts = [_Part.join(self._parts)]
        return self._parts[0]

    def _replace(self, part: _Part) -> None:
        self._parts = [part]
        self._pending = len(part.cells)

    def _compress(self) -> None:
        """Raise the limits to what the candidates so far prove, and drop what lies below."""
        part = self._joined()
        lows = part.merits - part.errors
        order = self._first(np.lexsort((-lows, part.cells)), part)
        starts = np.searchsorted(part.cells[order], np.arange(len(self._limits) + 1))
        full = np.flatnonzero(np.diff(starts) >= self._k)
        kth = lows[order[starts[full] + self._k - 1]]
        # Beyond float32's range scores are infinite, and ids decide; as they do where scores
        # round to the same float32.
        kth = np.where(kth < -_FLOAT32_MAX, -np.inf, np.minimum(kth, _FLOAT32_MAX))
        self._limits[full] = kth - np.abs(kth) * 2.0**-22 - _FLOAT32_TINY
        part = part.where(part.merits + part.errors >= self._limits[part.cells])
        counts = np.bincount(part.cells, minlength=len(self._limits))
        self._replace(part)
        # Far more candidates than k are ties, which only exact scores and ids resolve.
        crowded = np.flatnonzero(counts > 2 * self._k + _RESCORE_ROWS)
        if crowded.size:
            self._resolve(crowded)

    def _resolve(self, crowded: np.ndarray) -> None:
        """Cut crowded cells down to their k best rows by exact score."""
        part = self._joined()
        keep = np.ones(len(part.cells), bool)
        for cell in crowded:
            own = np.flatnonzero(part.cells == cell)
            order, rank = self._ranked(part.where(own), self._exact(part.where(own)))
            keep[own] = False
            keep[own[order[rank < self._k]]] = True
        self._replace(part.where(keep))

    def _ranked(self, part: _Part, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Order candidates by (cell, merit descending, row id), and each one's rank in its cell."""
        merits = merit(torch.from_numpy(scores), self._order).numpy()
        ids = self._layer.space.ids[part.positions]
        order = self._first(np.lexsort((ids, -merits, part.cells)), part)
        starts = np.searchsorted(part.cells[order], part.cells[order], side="left")
        return order, np.arange(len(order)) - starts

    def _first(self, order: np.ndarray, part: _Part) -> np.ndarray:
        """An order of candidates, int64 [n], without those whose value stood earlier in a cell."""
        if self._distinct is None:
            return order
        first = first_of_each(part.cells[order], self._distinct[part.positions[order]])
        return np.asarray(order[first])

    def _exact(self, part: _Part) -> np.ndarray:
        """Exact scores of candidates, float32."""
        scores = np.empty(len(part.cells), np.float32)
        order = np.lexsort((part.positions, part.cells // self._groups))
        queries = part.cells[order] // self._groups
        ends = np.flatnonzero(np.diff(queries, append=-1)) + 1
        first = 0
        while first < len(order):
            # As many whole queries as fit, so that their keys are read together; or part of one.
            whole = ends[(ends > first) & (ends <= first + _KEYS_TOGETHER)]
            last = int(whole[-1]) if whole.size else min(first + _KEYS_TOGETHER, len(order))
            self._score(part, order[first:last], queries[first:last], scores)
            first = last
        return scores

    def _score(
        self, part: _Part, which: np.ndarray, queries: np.ndarray, scores: np.ndarray
    ) -> None:
        """Score some candidates, ordered by query and position."""
        positions, place = np.unique(part.positions[which], return_inverse=True)
        keys = self._layer.keys_at(positions)
        bounds = np.flatnonzero(np.diff(queries, prepend=-1, append=-1))
        for first, last in itertools.pairwise(bounds):
            own, inside = which[first:last], torch.from_numpy(place[first:last])
            own_keys = keys if last - first == len(keys) else keys[inside]
            dots = ExactDots(own_keys, self._queries[queries[first]])
            if self._contribution is None:
                scores[own] = dots.rounded()
            else:
                factors = self._contribution.at(self._layer, part.positions[own])
                scores[own] = dots.rounded_contributions(*factors)


@dataclass(frozen=True)
class _Part:
    """Candidates as parallel arrays; a cell is a (query, group)."""

    cells: np.ndarray
    merits: np.ndarray
    errors: np.ndarray
    positions: np.ndarray

    @classmethod
    def empty(cls) -> _Part:
        return cls(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))

    @classmethod
    def join(cls, parts: list[_Part]) -> _Part:
        names = ("cells", "merits", "errors", "positions")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def where(self, which: np.ndarray) -> _Part:
        return _Part(
            self.cells[which], self.merits[which], self.errors[which], self.positions[which]
        )


def merit(scores: torch.Tensor, order: str) -> torch.Tensor:
    """What "best" means by this order, of scores of any shape."""
    if order == "largest":
        return scores
    return -scores if order == "smallest" else scores.abs()
