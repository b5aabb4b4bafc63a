"""Top-k by attention weight: proposals in float32, answers by exact score (docs/exactness.md).

FAISS, or a scan over tiles, proposes every row whose float32 score could belong to the k best,
given how far such a score can be from the exact one. Proposals are then scored exactly and ordered
by (score, row id). So the answer depends on neither the order of summation, nor on shards, tiles,
batches, threads or devices.

Inside, a row's *merit* is what "best" means: its score, the negated score, or the absolute score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dualform.engine import flat
from dualform.engine.exact import error_bound, exact_scores
from dualform.engine.shards import Shard, Stop
from dualform.engine.weights import needs_float64, tile_weights
from dualform.store.grouping import Grouping

if TYPE_CHECKING:
    from dualform.engine.index import Layer

_QUERY_BLOCK = 256
_RESCORE_ROWS = 4096
_COMPRESS_AT = 1 << 17
_FAISS_SLACK = 32
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Scan:
    """One top-k question to one layer.

    Args:
        layer: Whose memory.
        queries: float32 [n, d_in], finite.
        k: Rows per query (and group).
        order: "largest", "smallest" or "absolute".
        grouping: Rank inside each of these groups, or None.
        device: Where tiles are multiplied.
        use_faiss: Let FAISS propose where whole shards take part.
        stop: Asked between tiles.
    """

    def __init__(
        self,
        layer: Layer,
        queries: torch.Tensor,
        k: int,
        order: str,
        grouping: Grouping | None,
        device: torch.device,
        use_faiss: bool,
        stop: Stop | None,
    ) -> None:
        self._layer = layer
        self._queries = queries
        self._k = k
        self._order = order
        self._grouping = grouping
        self._device = device
        self._stop = stop
        self._use_faiss = (
            use_faiss
            and grouping is None
            and order != "absolute"
            and device.type == "cpu"
            and k + _FAISS_SLACK <= flat.MAX_K
        )

    def run(self, selected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Answer over the selected rows, bool [total], none of them with a key that is not finite.

        Returns:
            Positions, int64 [n * groups, k], -1 where fewer rows match, and scores, float32 of the
            same shape, NaN there.
        """
        blocks = [
            self._run_block(self._queries[first : first + _QUERY_BLOCK], selected)
            for first in range(0, len(self._queries), _QUERY_BLOCK)
        ]
        positions, scores = zip(*blocks, strict=True)
        return np.concatenate(positions), np.concatenate(scores)

    def _run_block(
        self, queries: torch.Tensor, selected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        best = Candidates(self._layer, queries, self._k, self._order, self._grouping)
        proposed: list[tuple[Shard, np.ndarray]] = []
        for shard in self._layer.shards:
            own = selected[shard.start : shard.start + shard.rows]
            if self._use_faiss and own.all() and not needs_float64(best.query_norms, shard):
                signed = -queries if self._order == "smallest" else queries
                merits, inside = flat.search(shard, signed, self._k + _FAISS_SLACK, self._stop)
                best.add_matrix(merits, inside + shard.start)
                proposed.append((shard, merits[:, -1]))
            else:
                self._scan(shard, own, queries, best)
        for shard, last in proposed:
            # What FAISS left out is no better than its last proposal.
            unsure = np.flatnonzero(last >= best.limits()[:, 0])
            if shard.rows > self._k + _FAISS_SLACK and unsure.size:
                best.forget(unsure, shard)
                everything = np.ones(shard.rows, bool)
                self._scan(shard, everything, queries, best, unsure)
        return best.result()

    def _scan(
        self,
        shard: Shard,
        selected: np.ndarray,
        queries: torch.Tensor,
        best: Candidates,
        which: np.ndarray | None = None,
    ) -> None:
        """Propose rows of a shard for all queries, or for those named."""
        own = queries if which is None else queries[torch.from_numpy(which)]
        own = own.to(self._device)
        wide = needs_float64(best.query_norms, shard)
        for tile in shard.tiles(selected, device=self._device, stop=self._stop):
            merits = _merit(tile_weights(own, tile.keys, wide=wide), self._order)
            best.add_tile(merits, tile.positions, which)


class Candidates:
    """The rows that may still be among the k best of each query and group.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in].
        k: Rows per query and group.
        order: "largest", "smallest" or "absolute".
        grouping: Groups, or None for a single one.
    """

    def __init__(
        self, layer: Layer, queries: torch.Tensor, k: int, order: str, grouping: Grouping | None
    ) -> None:
        self._layer = layer
        self._queries = queries
        self._k = k
        self._order = order
        self._codes = None if grouping is None else grouping.codes
        self._groups = 1 if grouping is None else len(grouping.values)
        self.query_norms = torch.linalg.vector_norm(queries.double(), dim=1)
        longest = max((shard.max_norm for shard in layer.shards), default=0.0)
        self._error = error_bound(queries.shape[1], self.query_norms, longest).numpy()
        self._limits = np.full(len(queries) * self._groups, -np.inf)
        # A cell is a (query, group); parallel arrays of cell, merit and position per candidate.
        self._cells = [np.zeros(0, np.int64)]
        self._merits = [np.zeros(0)]
        self._positions = [np.zeros(0, np.int64)]
        self._pending = 0
        self._compress_at = _COMPRESS_AT

    def limits(self) -> np.ndarray:
        """Merits below these can't be among the k best, float64 [n, groups]."""
        self._compress()
        return self._limits.reshape(-1, self._groups)

    def add_matrix(self, merits: np.ndarray, positions: np.ndarray) -> None:
        """Take proposals, float32 and int64 [n, m], of a single group."""
        cells = np.repeat(np.arange(len(merits)), merits.shape[1])
        self._add(cells, merits.reshape(-1).astype(np.float64), positions.reshape(-1))

    def add_tile(
        self, merits: torch.Tensor, positions: np.ndarray, which: np.ndarray | None
    ) -> None:
        """Take the rows of a tile that may matter; merits [n, rows], positions int64 [rows]."""
        limits = self._limits.reshape(-1, self._groups)
        if which is not None:
            limits = limits[which]
        if self._codes is not None:
            limits = limits[:, self._codes[positions]]
        threshold = torch.from_numpy(limits).to(merits.device)
        if merits.dtype == torch.float32:
            threshold = torch.nextafter(threshold.float(), torch.tensor(-torch.inf))
        query, row = torch.nonzero(merits >= threshold, as_tuple=True)
        if not len(query):
            return
        found = merits[query, row].double().cpu().numpy()
        queries, own = query.cpu().numpy(), positions[row.cpu().numpy()]
        if which is not None:
            queries = which[queries]
        cells = queries * self._groups
        self._add(cells if self._codes is None else cells + self._codes[own], found, own)
        if self._pending >= self._compress_at:
            self._compress()
            self._compress_at = max(_COMPRESS_AT, 2 * sum(map(len, self._cells)))

    def forget(self, queries: np.ndarray, shard: Shard) -> None:
        """Drop what these queries were offered from a shard, before it is scanned instead."""
        cells, merits, positions = self._arrays()
        inside = (positions >= shard.start) & (positions < shard.start + shard.rows)
        self._replace(~(inside & np.isin(cells, queries)), cells, merits, positions)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions, int64 [n * groups, k], and exact scores, float32; padded with -1 and NaN."""
        self._compress()
        cells, _, positions = self._arrays()
        scores = self._exact(cells, positions)
        order, rank = self._ranked(cells, positions, scores)
        keep = order[rank < self._k]
        own_cells, own_rank = cells[keep], rank[rank < self._k]
        out_positions = np.full((len(self._limits), self._k), -1, np.int64)
        out_scores = np.full((len(self._limits), self._k), np.nan, np.float32)
        out_positions[own_cells, own_rank] = positions[keep]
        out_scores[own_cells, own_rank] = scores[keep]
        return out_positions, out_scores

    def _add(self, cells: np.ndarray, merits: np.ndarray, positions: np.ndarray) -> None:
        self._cells.append(cells)
        self._merits.append(merits)
        self._positions.append(positions)
        self._pending += len(cells)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parts = (self._cells, self._merits, self._positions)
        cells, merits, positions = (np.concatenate(part) for part in parts)
        return cells, merits, positions

    def _replace(
        self, keep: np.ndarray, cells: np.ndarray, merits: np.ndarray, positions: np.ndarray
    ) -> None:
        self._cells, self._merits = [cells[keep]], [merits[keep]]
        self._positions = [positions[keep]]
        self._pending = len(self._cells[0])

    def _compress(self) -> None:
        """Raise the limits to what the candidates so far prove, and drop what lies below."""
        cells, merits, positions = self._arrays()
        order = np.lexsort((-merits, cells))
        starts = np.searchsorted(cells[order], np.arange(len(self._limits) + 1))
        full = np.flatnonzero(np.diff(starts) >= self._k)
        kth = merits[order[starts[full] + self._k - 1]]
        # Beyond float32's range scores are infinite, and ids decide.
        kth = np.where(kth < -_FLOAT32_MAX, -np.inf, np.minimum(kth, _FLOAT32_MAX))
        error = self._error[full // self._groups]
        # Two errors, and the rounding of a score to float32, under which ids decide.
        self._limits[full] = kth - 2 * error - np.abs(kth) * 2.0**-22
        keep = merits >= self._limits[cells]
        crowded = self._crowded(cells[keep])
        self._replace(keep, cells, merits, positions)
        if crowded.size:
            self._resolve(crowded)

    def _crowded(self, cells: np.ndarray) -> np.ndarray:
        """Cells with far more candidates than k: ties, which only exact scores and ids resolve."""
        return np.flatnonzero(
            np.bincount(cells, minlength=len(self._limits)) > 2 * self._k + _RESCORE_ROWS
        )

    def _resolve(self, crowded: np.ndarray) -> None:
        """Cut crowded cells down to their k best rows by exact score."""
        cells, merits, positions = self._arrays()
        keep = np.ones(len(cells), bool)
        for cell in crowded:
            own = np.flatnonzero(cells == cell)
            scores = self._exact(cells[own], positions[own])
            order, rank = self._ranked(cells[own], positions[own], scores)
            keep[own[order[rank >= self._k]]] = False
            merits[own] = _merit(torch.from_numpy(scores), self._order).double().numpy()
        self._replace(keep, cells, merits, positions)

    def _ranked(
        self, cells: np.ndarray, positions: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Order candidates by (cell, merit descending, row id), and each one's rank in its cell."""
        merits = _merit(torch.from_numpy(scores), self._order).numpy()
        order = np.lexsort((self._layer.space.ids[positions], -merits, cells))
        starts = np.searchsorted(cells[order], cells[order], side="left")
        return order, np.arange(len(order)) - starts

    def _exact(self, cells: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Exact scores of candidates, float32."""
        scores = np.empty(len(cells), np.float32)
        order = np.lexsort((positions, cells // self._groups))
        queries = cells[order] // self._groups
        for query in np.unique(queries):
            own = order[np.searchsorted(queries, query) : np.searchsorted(queries, query, "right")]
            for first in range(0, len(own), _RESCORE_ROWS):
                part = own[first : first + _RESCORE_ROWS]
                keys = self._layer.keys_at(positions[part])
                scores[part] = exact_scores(keys, self._queries[query])
        return scores


def _merit(scores: torch.Tensor, order: str) -> torch.Tensor:
    if order == "largest":
        return scores
    return -scores if order == "smallest" else scores.abs()
