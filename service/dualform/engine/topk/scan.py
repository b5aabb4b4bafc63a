"""Top-k by attention weight or contribution: proposed in float32, answered by exact score.

FAISS, sketches, or a scan over tiles propose every row whose float32 score could belong to the k
best, given how far such a score can be from the exact one. Proposals are then scored exactly and
ordered by (score, row id). So the answer depends on neither the order of summation, nor on shards,
tiles, batches, threads, devices or strategies.
"""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.devices import flat
from dualform.engine.errors import DataLossError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Shard, Stop, as_slice, check_stop, tile_rows
from dualform.engine.memory.sketch import best_rows
from dualform.engine.memory.tiles import Tile
from dualform.engine.memory.weights import needs_float64, tile_weights
from dualform.engine.plan.costs import PRUNED_QUERIES, pruning_pays, unpack_seconds
from dualform.engine.threads import over_shards
from dualform.engine.topk.contribution_bounds import Bounds, ContributionBounds, WeightBounds
from dualform.engine.topk.ranking import Ranking
from dualform.engine.topk.top_k import Hits, TopK, candidates

_QUERY_BLOCK = 256
MOST_CANDIDATES = 1 << 21
"""Candidates that a block of queries may have at a time, where all scores are the same."""

MOST_HITS = 100_000
"""Rows that a block of queries may be answered with: sorting them, which nothing interrupts, takes
some 50 ms of a core."""
_LEAST_QUERIES = 16
"""That many are a block all the same: all rows are read for each."""

SPAN = 1 << 22
"""Bounds of neighbouring shards, queries times rows, that are looked at together."""

_FAISS_SLACK = 32
_FEW_QUERIES = 8
# With more groups than this in a shard, finding each one's best rows by sketch costs too much.
_SEEDED_GROUPS = 64


def sketches_apply(layer: Layer, ranking: Ranking) -> str | None:
    """Why sketches can't answer this question; None where they can."""
    try:
        if layer.basis is None:
            return f"layer {layer.name!r} has no sketches"
    except DataLossError as error:  # other strategies do without
        return str(error)
    if ranking.cosine:
        return "sketches bound weights, not cosines"
    contribution = ranking.contribution
    if contribution is not None and contribution.coefficients is None:
        return "sketches bound weights, and each step has its own metric"
    return None


def faiss_applies(layer: Layer, ranking: Ranking, whole: bool) -> str | None:
    """Why FAISS can't answer this question, of all rows or not; None where it can."""
    for given, what in (
        (ranking.grouping, "group_by"),
        (ranking.contribution, "contributions"),
        (ranking.cosine or None, "cosines"),
        (ranking.distinct, "distinct"),
    ):
        if given is not None:
            return f"FAISS proposes rows by weight, without {what}"
    if layer.packed[0]:
        return f"FAISS searches keys as they lie, and those of layer {layer.name!r} are packed"
    if not layer.keys_are_mapped:
        return f"FAISS searches float32 keys, not {layer.manifest.key_encoding}"
    if ranking.order == "absolute":
        return "FAISS knows no absolute order"
    if not whole:
        return "FAISS searches whole shards, not what a filter leaves of them"
    most = flat.MAX_K - _FAISS_SLACK
    return None if ranking.k <= most else f"k is {ranking.k:,}; FAISS is asked for at most {most:,}"


def block_queries(rows: int, groups: int, k: int) -> int:
    """How many queries are answered together over so many rows, for k rows of each group."""
    each = min(rows, candidates(groups, k))
    hits = max(_LEAST_QUERIES, MOST_HITS // max(1, min(rows, groups * k)))
    return max(1, min(_QUERY_BLOCK, MOST_CANDIDATES // max(1, each), hits))


class Scan:
    """One top-k question to one layer.

    Args:
        layer: Whose memory.
        queries: float32 [n, d_in], finite.
        ranking: What is ranked.
        strategy: "certified", "flat" or "scan"; one that applies.
        faiss: Whether FAISS applies: then it takes over where sketches prune badly.
        stop: Asked between tiles.

    Attributes:
        asked: Rows that sketches were asked about.
        kept: Rows of these that they could not rule out.
    """

    def __init__(
        self,
        layer: Layer,
        queries: torch.Tensor,
        ranking: Ranking,
        strategy: str,
        faiss: bool,
        stop: Stop | None,
    ) -> None:
        self._layer = layer
        self._queries = queries
        self._ranking = ranking
        self._use_sketches = strategy == "certified"
        self._use_faiss = strategy == "flat" or (strategy == "certified" and faiss)
        self._stop = stop
        self.asked = self.kept = 0

    @property
    def kept_share(self) -> float | None:
        """Share of the rows that sketches could not rule out; None where they were not asked."""
        return self.kept / self.asked if self.asked else None

    def run(self, selected: np.ndarray) -> Hits:
        """Answer over the selected rows, bool [total]: those whose keys are finite."""
        blocks, first = [], 0
        while first < len(self._queries):
            size = block_queries(self._layer.rows, self._ranking.groups, self._ranking.k)
            size = min(size, PRUNED_QUERIES) if self._use_sketches else size
            block = slice(first, first + size)
            ranking = self._ranking.part(block)
            blocks.append(self._run_block(self._queries[block], ranking, selected))
            first += size
        return Hits.join(blocks)

    def _run_block(self, queries: torch.Tensor, ranking: Ranking, selected: np.ndarray) -> Hits:
        best = TopK(queries, ranking, self._layer, self._stop)
        self.propose(queries, ranking, selected, best)
        return best.result()

    def propose(
        self, queries: torch.Tensor, ranking: Ranking, selected: np.ndarray, best: TopK
    ) -> None:
        """Offer every row that may matter, of the selected ones, bool [total]."""
        searched = []
        for shard in self._unpruned(queries, ranking, selected, best):
            inside = selected[shard.start : shard.start + shard.rows]
            if (
                self._use_faiss
                and inside.all()
                and not needs_float64(best.longest_query, shard.max_norm)
            ):
                searched.append(shard)
            else:
                self._scan(shard, inside, queries, best)
        proposed = self._search(searched, queries, best)
        for shard, last in zip(searched, proposed, strict=True):
            # What FAISS left out is no better than its last proposal.
            unsure = np.flatnonzero(last + best.error >= best.limits()[:, 0])
            if shard.rows > ranking.k + _FAISS_SLACK and unsure.size:
                best.forget(unsure, shard.start, shard.start + shard.rows)
                everything = np.ones(shard.rows, bool)
                self._scan(shard, everything, queries, best, unsure)

    def look_at_all(
        self, queries: torch.Tensor, selected: np.ndarray, best: TopK, which: np.ndarray
    ) -> None:
        """Offer rows to some queries, int64 [n], from a scan of the selected ones, bool [total]."""
        for shard in self._layer.shards:
            inside = selected[shard.start : shard.start + shard.rows]
            if inside.any():
                self._scan(shard, inside, queries, best, which)

    def _search(self, shards: list[Shard], queries: torch.Tensor, best: TopK) -> list[np.ndarray]:
        """Propose what FAISS finds in these shards; each one's last merits, float32 [n]."""
        signed = -queries if self._ranking.order == "smallest" else queries
        k = self._ranking.k + _FAISS_SLACK

        def search(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
            return flat.search(shard, signed, k, self._stop)

        last = []
        for shard, found in zip(shards, over_shards(search, shards, len(queries)), strict=True):
            merits, inside = found
            of_query = np.repeat(np.arange(len(queries)), merits.shape[1])
            best.add_weights(of_query, merits.reshape(-1), inside.reshape(-1) + shard.start)
            last.append(merits[:, -1])
        return last

    def _unpruned(
        self, queries: torch.Tensor, ranking: Ranking, selected: np.ndarray, best: TopK
    ) -> list[Shard]:
        """Propose rows by sketches, and say which shards are left to be searched."""
        basis = self._layer.basis
        if basis is None or not self._use_sketches:
            return list(self._layer.shards)
        sketched: Bounds = (
            WeightBounds(queries, basis, ranking.order)
            if ranking.contribution is None
            else ContributionBounds(
                self._layer, ranking.contribution, queries, basis, ranking.order
            )
        )
        left: list[Shard] = []
        spans: list[list[Shard]] = []
        room = 0
        for shard in self._layer.shards:
            rows = int(np.count_nonzero(selected[shard.start : shard.start + shard.rows]))
            if rows == 0:
                continue
            if needs_float64(best.longest_query, shard.max_norm):
                left.append(shard)
                room = 0
                continue
            room -= rows * len(queries)
            if room < 0:
                spans.append([])
                room = SPAN - rows * len(queries)
            spans[-1].append(shard)
        for number, span in enumerate(spans):
            if not self._scan_pruned(span, selected, queries, sketched, best):
                # What follows searches these shards whole, and offers everything again; between
                # them may be others, of which devices offered rows.
                self._use_sketches = False
                for shard in span:
                    best.forget(np.arange(len(queries)), shard.start, shard.start + shard.rows)
                return left + [shard for rest in spans[number:] for shard in rest]
        return left

    def _scan_pruned(
        self,
        span: list[Shard],
        selected: np.ndarray,
        queries: torch.Tensor,
        sketched: Bounds,
        best: TopK,
    ) -> bool:
        """Propose the rows of neighbouring shards that their sketches can't rule out, if it pays.

        Returns:
            Whether it did; otherwise they are still to be searched.
        """
        check_stop(self._stop)
        where, parts, counts = _asked(span, selected)
        rows = sum(counts)
        bounds = sketched.bounds(parts, counts, where, max(shard.max_norm for shard in span))
        done = self._promising(where, bounds, best)
        self._scan_rows(_positions(where, done), queries, best)
        kept = best.possible(bounds, sketched.allowance, where) & ~done
        if isinstance(sketched, ContributionBounds) and sketched.narrows:
            self._narrow(kept, where, sketched, best)
        width = self._layer.key_bytes
        left = int(np.count_nonzero(kept))
        self.asked += rows
        self.kept += left
        faiss = self._use_faiss and rows == sum(shard.rows for shard in span)
        of_left, of_all = (unpack_seconds(self._layer, read, rows) for read in (left, rows))
        if left and not pruning_pays(left, rows, width, len(queries), faiss, (of_left, of_all)):
            return False
        self._scan_rows(_positions(where, kept), queries, best)
        return True

    def _narrow(
        self, kept: np.ndarray, where: slice | np.ndarray, bounds: ContributionBounds, best: TopK
    ) -> None:
        """Strike out of these rows, bool [rows], what their values rule out."""
        left = np.flatnonzero(kept)
        step = tile_rows(self._layer.d_out, 1)
        for first in range(0, len(left), step):
            check_stop(self._stop)
            which = left[first : first + step]
            positions = which + where.start if isinstance(where, slice) else where[which]
            found = bounds.narrowed(which, positions)
            kept[which] = best.possible(found, bounds.allowance, positions)

    def _promising(self, where: slice | np.ndarray, bounds: torch.Tensor, best: TopK) -> np.ndarray:
        """The rows to score first, bool [rows]: without limits nothing can be ruled out."""
        everything = np.ones(len(bounds), bool)
        found = np.zeros(len(bounds), bool)
        unlimited = np.flatnonzero(np.isinf(best.limits()).any(axis=0))
        ranking = self._ranking
        distinct = best.stands_for(where)
        k = ranking.k
        if bounds.shape[1] <= _FEW_QUERIES:
            # The k largest scores among more rows than k rule out more; of many queries, others do.
            k = 2 * k + 50
        codes = best.codes(where)
        if codes is None:
            if unlimited.size:
                found = best_rows(bounds, k, everything, distinct)
            return found
        present = np.intersect1d(unlimited, codes)
        if len(present) <= _SEEDED_GROUPS:
            for group in present:
                found |= best_rows(bounds, k, codes == group, distinct)
        return found

    def _scan_rows(self, positions: np.ndarray, queries: torch.Tensor, best: TopK) -> None:
        """Propose rows here and there, int64 [n], ascending, for all queries."""
        step = tile_rows(self._layer.d_in, len(queries))
        for first in range(0, len(positions), step):
            check_stop(self._stop)
            chunk = positions[first : first + step]
            keys = self._layer.keys_at(chunk)
            values = self._layer.value_rows(chunk) if best.values else None
            tile = Tile(self._layer.space, chunk, keys, values, best.longest)
            best.update(tile, tile_weights(queries, keys, wide=False))

    def _scan(
        self,
        shard: Shard,
        selected: np.ndarray,
        queries: torch.Tensor,
        best: TopK,
        which: np.ndarray | None = None,
    ) -> None:
        """Propose rows of a shard for all queries, or for those named."""
        asked = queries if which is None else queries[torch.from_numpy(which)]
        wide = needs_float64(best.longest_query, shard.max_norm)
        needs = {"values": best.values, "once": best.once}
        for tile in shard.tiles(selected, len(asked), **needs, stop=self._stop):
            weights = tile_weights(asked, tile.keys, wide=wide, faiss=tile.faiss)
            best.update(tile, weights, which)


def _asked(
    span: list[Shard], selected: np.ndarray
) -> tuple[slice | np.ndarray, list[tuple[torch.Tensor, slice | np.ndarray]], list[int]]:
    """The selected rows of neighbouring shards, some in each: their positions, and of each shard
    its sketches, which of them are meant, and how many."""
    positions, parts, counts = [], [], []
    for shard in span:
        inside = np.flatnonzero(selected[shard.start : shard.start + shard.rows])
        parts.append((shard.sketches(), as_slice(inside)))
        counts.append(len(inside))
        positions.append(shard.start + inside)
    return as_slice(np.concatenate(positions)), parts, counts


def _positions(where: slice | np.ndarray, which: np.ndarray) -> np.ndarray:
    """The positions of those of some rows, bool [rows], ascending."""
    places = np.flatnonzero(which)
    return places + where.start if isinstance(where, slice) else where[places]
