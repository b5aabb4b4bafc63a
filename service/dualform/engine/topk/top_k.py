"""Top-k as a reducer: rows are proposed in float32 and answered by exact score.

Proposals come with merits in float32 or float64 and bounds of their errors, from tiles, sketches or
FAISS; a row that may still be among the k best of its cell stays a candidate. What is returned is
scored exactly and ordered by (score, row id): docs/exactness.md has the rules. Where the memory can
be read again, candidates are scored at the end; tiles of a live run are gone by then, and theirs at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.memory.exact import error_bound
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.candidates import Candidates, Kept
from dualform.engine.topk.distinct import first_of_each, value_codes
from dualform.engine.topk.ranking import Cosines, Ranking, merit
from dualform.engine.topk.scoring import Scores

RESCORE_ROWS = 4096
COMPRESS_AT = 1 << 17
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = 2.0**-149


def candidates(groups: int, k: int) -> int:
    """How many candidates a query may have for k rows of each group, where all scores are the
    same."""
    return groups * (2 * k + RESCORE_ROWS)


@dataclass(frozen=True)
class Hits:
    """The best rows, in order; padded where fewer match.

    Attributes:
        ids: int64 [n, groups, k], row ids, -1 where padded.
        scores: float32, the same shape, NaN where padded.
        positions: int64, the same shape: where in the layer the rows are; -1 where padded, and
            where they are in another memory.
        groups: [groups], the groups' values, ascending, null last.
        columns: Metadata of the rows that are not in the layer, by row id and by column.
    """

    ids: np.ndarray
    scores: np.ndarray
    positions: np.ndarray
    groups: pa.Array
    columns: dict[int, dict[str, Any]]

    @classmethod
    def join(cls, parts: Sequence[Hits]) -> Hits:
        """Answers to further queries about one layer, one after the other."""
        names = ("ids", "scores", "positions")
        ids, scores, positions = (
            np.concatenate([getattr(part, name) for part in parts]) for name in names
        )
        return cls(ids, scores, positions, parts[0].groups, parts[0].columns)


class TopK:
    """Keeps the rows that may be among the k best of each query and group: a reducer.

    Args:
        queries: float32 [n, d_in], finite.
        ranking: What is ranked.
        layer: Where its rows can be read again; None where tiles are gone once they are taken.
        stop: Asked while rows are read again, and between the steps of sorting candidates.

    Attributes:
        values, once: As a Reducer has them.
        longest_query: The largest Euclidean norm of a query.
        longest: At least that of the layer's finite keys.
        error: float64 [n], how far a float32 attention weight can be from the exact one for these.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        ranking: Ranking,
        layer: Layer | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.values = ranking.contribution is not None
        self.once = ranking.contribution is None or ranking.contribution.directions is None
        self._layer = layer
        self._stop = stop
        self._queries = queries
        self._ranking = ranking
        self._k = ranking.k
        self._order = ranking.order
        self._contribution = ranking.contribution
        self._cosines = Cosines(queries) if ranking.cosine else None
        self._groups = Groups(ranking.grouping)
        self._distinct = None if ranking.distinct is None else Groups(ranking.distinct)
        self._kept = Kept()
        self._norms = torch.linalg.vector_norm(queries.double(), dim=1)
        self.longest_query = float(self._norms.max())
        shards = () if layer is None else layer.shards
        self.longest = max((shard.max_norm for shard in shards), default=0.0)
        self._scores = Scores(
            queries, ranking.contribution, layer, self.longest, cosine=ranking.cosine, stop=stop
        )
        self._bound = (self.longest, error_bound(queries.shape[1], self._norms, self.longest))
        self.error = self._bound[1].numpy()
        self._limits = np.full(len(queries) * len(self._groups), -np.inf)
        self._parts: list[Candidates] = []
        self._pending = 0
        self._compress_at = self._soon()

    def limits(self) -> np.ndarray:
        """Merits that are surely below these are not among the k best, float64 [n, groups]."""
        self._compress()
        return self._by_query()

    def possible(
        self, bounds: torch.Tensor, allowance: torch.Tensor, where: slice | np.ndarray
    ) -> np.ndarray:
        """Which rows may matter to some query.

        Args:
            bounds: float32 [rows, n]: merits are at most so large, but for
            allowance: float64 [n]. The bounds are overwritten.
            where: Positions of the rows in the layer.

        Returns:
            bool [rows].
        """
        limits = torch.from_numpy(self.limits()) - allowance[:, None]
        thresholds = torch.nextafter(limits.float(), torch.tensor(-torch.inf)).T
        codes = self.codes(where)
        if codes is not None:
            thresholds = thresholds.contiguous()[torch.from_numpy(codes)]
        if bounds.shape[1] == 1:
            return np.asarray((bounds >= thresholds)[:, 0].numpy())
        # The largest excess, as `any` is slow along the shorter axis.
        excess = bounds.sub_(thresholds.clamp(-_FLOAT32_MAX, _FLOAT32_MAX))
        return np.asarray((excess.amax(dim=1) >= 0).numpy())

    def codes(self, where: slice | np.ndarray) -> np.ndarray | None:
        """The groups of the layer's rows at these positions, int32 [rows]; None without groups."""
        grouping = self._ranking.grouping
        assert not isinstance(grouping, str)
        return None if grouping is None else grouping.codes[where]

    def stands_for(self, where: slice | np.ndarray) -> np.ndarray | None:
        """What the layer's rows at these positions stand for, int64 [rows]; None for themselves."""
        if self._distinct is None:
            return None
        assert self._layer is not None
        positions = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        return value_codes(self._distinct, self._layer.space, positions)

    def add_weights(self, queries: np.ndarray, merits: np.ndarray, positions: np.ndarray) -> None:
        """Take proposals by weight, of a single group of the layer.

        Args:
            queries: int64 [m], whose.
            merits: float32 [m].
            positions: int64 [m]; those of a query differ.
        """
        assert self._layer is not None
        ids, values = self._layer.space.ids[positions], self.stands_for(positions)
        self._add(
            Candidates(
                queries,
                merits.astype(np.float64),
                self.error[queries],
                ids,
                positions,
                np.zeros_like(ids) if values is None else values,
                np.full(len(ids), np.nan, np.float32),
            )
        )

    def update(self, tile: Tile, weights: torch.Tensor, which: np.ndarray | None = None) -> None:
        """Take the rows of a tile that may matter.

        Args:
            tile: Of the layer, if there is one.
            weights: [n, rows].
            which: The queries that the weights belong to, int64 [n]; None for all.
        """
        errors = self._errors(tile.max_norm)[:, None]
        if which is not None:
            errors = errors[torch.from_numpy(which)]
        if tile.finite is not None:
            # NaN is never ranked.
            weights = torch.where(torch.from_numpy(tile.finite), weights, torch.nan)
        if self._contribution is not None:
            weights, errors = self._contribution.of_tile(tile, weights, errors, which)
        elif self._cosines is not None:
            weights = self._cosines.of_tile(tile, weights, which)
            errors = torch.full_like(errors, self._cosines.error)
        merits = merit(weights, self._order)
        codes = None
        if self._groups.by is not None:
            codes = self._groups.codes(tile.table, tile.positions)
            self._grow()
        limits = self._by_query()
        if which is not None:
            limits = limits[which]
        if codes is not None:
            limits = np.ascontiguousarray(limits)[:, codes]
        possible = merits >= _threshold(torch.from_numpy(limits), errors, merits.dtype)
        if self._layer is None:
            self._cut(possible, merits, errors, codes)
        query, row = torch.nonzero(possible, as_tuple=True)
        # Without limits that is every row: what is sorted at once is bounded, for who gives up.
        for first in range(0, len(query), COMPRESS_AT):
            part = slice(first, first + COMPRESS_AT)
            self._take(tile, merits, errors, codes, which, query[part], row[part])

    def _take(
        self,
        tile: Tile,
        merits: torch.Tensor,
        errors: torch.Tensor,
        codes: np.ndarray | None,
        which: np.ndarray | None,
        query: torch.Tensor,
        row: torch.Tensor,
    ) -> None:
        """Offer rows of a tile, int64 [m], to queries, the same shape, by their places in merits.

        Args:
            tile, which: As `update` has them.
            merits: [n, rows].
            errors: float64, of these.
            codes: The rows' groups, if there are some.
            query, row: Which merits.
        """
        found = merits[query, row].double().numpy()
        found_errors = errors.expand(merits.shape)[query, row].numpy()
        queries, rows = query.numpy(), row.numpy()
        if which is not None:
            queries = which[queries]
        cells = queries
        if codes is not None:
            cells = codes[rows].astype(np.int64) * len(self._queries) + queries
        positions = tile.positions[rows]
        ids, values = tile.table.ids[positions], np.zeros(len(rows), np.int64)
        if self._distinct is not None:
            values = value_codes(self._distinct, tile.table, positions)
        if self._layer is None:
            scores = self._scores.in_tile(tile, queries, rows)
            found, found_errors = self._merits(scores), np.zeros(len(rows))
            gone = np.full(len(rows), -1)
            self._offer(Candidates(cells, found, found_errors, ids, gone, values, scores))
            held, offered = np.concatenate([part.ids for part in self._parts]), np.unique(positions)
            self._kept.add(tile.table, offered[np.isin(tile.table.ids[offered], held)])
        else:
            scores = np.full(len(rows), np.nan, np.float32)
            self._offer(Candidates(cells, found, found_errors, ids, positions, values, scores))

    def forget(self, queries: np.ndarray, first: int, last: int) -> None:
        """Drop what these queries were offered from positions first to last - 1, before these are
        scanned instead."""
        part = self._joined()
        inside = (part.positions >= first) & (part.positions < last)
        self._replace(part.where(~(inside & np.isin(part.cells % len(self._queries), queries))))

    def merge(self, other: TopK) -> None:
        """Take the best rows of another memory, or of other rows of this one.

        Args:
            other: Of the same question.

        Raises:
            ValueError: It is of another one.
        """
        ours, theirs = self._ranking, other._ranking
        same = (ours.k, ours.order, ours.cosine) == (theirs.k, theirs.order, theirs.cosine)
        same &= (ours.contribution is None) == (theirs.contribution is None)
        if ours.contribution is not None and theirs.contribution is not None:
            same &= ours.contribution.same_question(theirs.contribution)
        same &= (ours.distinct is None) == (theirs.distinct is None)
        if not same or not torch.equal(self._queries, other._queries):
            raise ValueError("only answers to the same question can be merged")
        part, _ = other._settled()
        groups = self._groups.join(other._groups)
        self._grow()
        group, query = np.divmod(part.cells, len(self._queries))
        part = replace(part, cells=groups[group].astype(np.int64) * len(self._queries) + query)
        if self._distinct is not None and other._distinct is not None:
            # Negative codes are rows that stand for themselves, by id.
            numbers = self._distinct.join(other._distinct).astype(np.int64)
            known = part.values >= 0
            values = part.values.copy()
            values[known] = numbers[part.values[known]]
            part = replace(part, values=values)
        self._kept.merge(other._kept)
        if other._layer is not self._layer:
            if other._layer is not None:
                self._kept.add(other._layer.space, np.unique(part.positions[part.positions >= 0]))
            part = replace(part, positions=np.full(len(part), -1))
        self._offer(part)

    def result(self) -> Hits:
        """The k best rows of each query and group."""
        part, rank = self._settled()
        check_stop(self._stop)
        groups, order = self._groups.ordered()
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        shape = (len(self._queries), len(order), self._k)
        ids, positions = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        scores = np.full(shape, np.nan, np.float32)
        group, query = np.divmod(part.cells, len(self._queries))
        where = (query, place[group], rank)
        ids[where], positions[where], scores[where] = part.ids, part.positions, part.scores
        return Hits(ids, scores, positions, groups, self._kept.of(part.ids))

    def _errors(self, max_norm: float) -> torch.Tensor:
        """How far float32 attention weights of keys up to this norm can be off: float64 [n]."""
        if self._bound[0] != max_norm:
            self._bound = (
                max_norm,
                error_bound(self._queries.shape[1], self._norms, max_norm),
            )
        return self._bound[1]

    def _by_query(self) -> np.ndarray:
        """The limits, float64 [n, groups]."""
        return np.asarray(self._limits.reshape(len(self._groups), len(self._queries)).T)

    def _grow(self) -> None:
        """Make room for the groups that have come."""
        missing = len(self._groups) * len(self._queries) - len(self._limits)
        if missing:
            self._limits = np.concatenate([self._limits, np.full(missing, -np.inf)])
            self._compress_at = self._soon()

    def _soon(self) -> int:
        """At how many candidates to look at them again, having few."""
        if self._layer is None:
            # Exact scores cost far more than sorting them, and higher limits save some.
            return self._pending + self._pending // 16 + 1
        # Until then nothing is known to be too low, and every row is a candidate.
        return min(COMPRESS_AT, 8 * self._k * len(self._limits) + RESCORE_ROWS)

    def _add(self, part: Candidates) -> None:
        self._parts.append(part)
        self._pending += len(part)

    def _offer(self, part: Candidates) -> None:
        """Add candidates, and look at all of them again where they are many."""
        self._add(part)
        if self._pending >= self._compress_at:
            self._compress()

    def _joined(self) -> Candidates:
        if len(self._parts) != 1:
            self._parts = [Candidates.join(self._parts) if self._parts else Candidates.empty()]
        return self._parts[0]

    def _replace(self, part: Candidates) -> None:
        self._parts = [part]
        self._pending = len(part)

    def _compress(self) -> None:
        """Raise the limits to what the candidates so far prove, and drop what lies below."""
        part = self._joined()
        if self._layer is None:
            part, rank = self._settled()
            last = rank == self._k - 1
            self._limits[part.cells[last]] = _limits(part.merits[last])
        else:
            lows = part.merits - part.errors
            check_stop(self._stop)
            order = self._first(_by_cell(part.cells, lows), part)
            check_stop(self._stop)
            starts = np.searchsorted(part.cells[order], np.arange(len(self._limits) + 1))
            full = np.flatnonzero(np.diff(starts) >= self._k)
            self._limits[full] = _limits(lows[order[starts[full] + self._k - 1]])
            part = part.where(part.merits + part.errors >= self._limits[part.cells])
            counts = np.bincount(part.cells, minlength=len(self._limits))
            self._replace(part)
            # Far more candidates than k are ties, which only exact scores and ids resolve.
            crowded = np.flatnonzero(counts > 2 * self._k + RESCORE_ROWS)
            if crowded.size:
                self._resolve(crowded)
        self._compress_at = self._soon()
        if self._layer is not None:
            self._compress_at = max(self._compress_at, 2 * self._pending)
        if len(self._kept) > RESCORE_ROWS + 4 * self._pending:
            self._kept.prune(part.ids)

    def _resolve(self, crowded: np.ndarray) -> None:
        """Cut crowded cells down to their k best rows by exact score."""
        part = self._joined()
        keep = np.ones(len(part), bool)
        for cell in crowded:
            members = np.flatnonzero(part.cells == cell)
            order, rank = self._ranked(part.where(members), self._scores.of(part.where(members)))
            keep[members] = False
            keep[members[order[rank < self._k]]] = True
        self._replace(part.where(keep))

    def _settled(self) -> tuple[Candidates, np.ndarray]:
        """The k best rows of each cell by exact score, in order; and each one's rank, int64 [m]."""
        if self._layer is not None:
            self._compress()
        part = self._joined()
        check_stop(self._stop)
        scores = self._scores.of(part)
        check_stop(self._stop)
        order, rank = self._ranked(part, scores)
        check_stop(self._stop)
        best = rank < self._k
        keep = order[best]
        scores = scores[keep]
        part = Candidates(
            part.cells[keep],
            self._merits(scores),
            np.zeros(len(keep)),
            part.ids[keep],
            part.positions[keep],
            part.values[keep],
            scores,
        )
        self._replace(part)
        return part, rank[best]

    def _ranked(self, part: Candidates, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Order candidates by (cell, merit descending, row id), and each one's rank in its cell."""
        order = np.lexsort((part.ids, -self._merits(scores), part.cells))
        order = self._first(order, part)
        cells = part.cells[order]
        return order, np.arange(len(order)) - np.searchsorted(cells, cells, side="left")

    def _first(self, order: np.ndarray, part: Candidates) -> np.ndarray:
        """An order of candidates, int64 [n], without those whose value stood earlier in a cell."""
        if self._distinct is None:
            return order
        return np.asarray(order[first_of_each(part.cells[order], part.values[order])])

    def _merits(self, scores: np.ndarray) -> np.ndarray:
        return np.asarray(merit(torch.from_numpy(scores), self._order).double().numpy())

    def _cut(
        self,
        possible: torch.Tensor,
        merits: torch.Tensor,
        errors: torch.Tensor,
        codes: np.ndarray | None,
    ) -> None:
        """Rule out what a tile's own k best rows do.

        Keys grow while training, so that whole tiles are better than all rows before.
        """
        groups = np.zeros(1) if codes is None else np.unique(codes)
        many = 2 * self._k * len(merits) * len(groups)
        if self._distinct is not None or int(possible.sum()) <= many:
            return
        alike = errors.shape[1] == 1
        lows = torch.where(possible, merits if alike else merits - errors, -torch.inf)
        for group in groups.tolist():
            members: slice | torch.Tensor = slice(None)
            if codes is not None:
                members = torch.from_numpy(np.flatnonzero(codes == group))
            inside = lows[:, members]
            if inside.shape[1] <= self._k:
                continue
            kth = torch.topk(inside, self._k, dim=1).values[:, -1:].double()
            limits = torch.from_numpy(_limits((kth - errors if alike else kth).numpy()))
            group_errors = errors if alike else errors[:, members]
            least = _threshold(limits, group_errors, merits.dtype)
            possible[:, members] &= merits[:, members] >= least


def _by_cell(cells: np.ndarray, merits: np.ndarray) -> np.ndarray:
    """An order by (cell, merit descending), int64 [n]; equal ones in any."""
    order = np.argsort(-merits)
    few = len(cells) and int(cells.max()) < 1 << 16  # of 16 bits NumPy sorts by radix
    ordered = cells[order].astype(np.uint16) if few else cells[order]
    return np.asarray(order[np.argsort(ordered, kind="stable")])


def _limits(kth: np.ndarray) -> np.ndarray:
    """What a merit must reach, float64, where the k-th is surely at least `kth`."""
    # Beyond float32's range scores are infinite, and ids decide; as they do where scores round to
    # the same float32.
    kth = np.where(kth < -_FLOAT32_MAX, -np.inf, np.minimum(kth, _FLOAT32_MAX))
    return np.asarray(kth - np.abs(kth) * 2.0**-22 - _FLOAT32_TINY)


def _threshold(limits: torch.Tensor, errors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a proposal with such an error must reach, in the dtype of its merit."""
    threshold = limits - errors
    if dtype == torch.float32:
        return torch.nextafter(threshold.float(), torch.tensor(-torch.inf))
    return threshold
