"""Top-k of distinct keys: equal keys have equal weights, so one row is looked at for each of them.

The best are found among the rows with the lowest id of each key, and bring the other rows of their
keys with them. That is enough: a row whose key is not among the k best keys, by (score, lowest id),
has at least one row of each of these before it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from dualform.engine.errors import DataLossError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.plan import costs
from dualform.engine.rows.equal_rows import KeyRows
from dualform.engine.topk.ranking import Ranking, merit
from dualform.engine.topk.scan import Scan
from dualform.engine.topk.top_k import Hits
from dualform.store.grouping import Grouping

_MORE_KEYS = 1.5
"""How many times as many keys are asked for as hold k rows on average."""


def distinct_keys_apply(layer: Layer, ranking: Ranking) -> str | None:
    """Why one row of each key can't answer this question; None where it can."""
    if layer.manifest.equal_keys is None:
        return (
            f"the index does not know which keys of layer {layer.name!r} are equal: either few "
            "come again, or it was built before this was looked for"
        )
    if ranking.contribution is not None:
        return "rows with the same key have contributions of their own"
    try:
        equal = layer.equal_rows
    except DataLossError as error:  # other strategies do without
        return str(error)
    assert equal is not None
    for column, what in ((ranking.grouping, "group_by"), (ranking.distinct, "distinct")):
        assert not isinstance(column, str)
        if column is not None and not equal.agree(column):
            return f"rows with the same key differ in the column of {what}"
    distinct = ranking.distinct
    if isinstance(distinct, Grouping) and distinct.values.null_count:
        return "rows without a value in the column of distinct count each by itself"
    return None


def by_distinct_keys(layer: Layer, ranking: Ranking, rows: int, whole: bool) -> costs.ByKeys:
    """What the answer over so many rows, all or not, is expected to cost."""
    assert layer.manifest.equal_keys is not None
    keys = costs.distinct_keys_of(rows, layer.manifest.equal_keys.distinct)
    find = ranking.k if ranking.distinct is not None else _keys_to_find(ranking.k, rows, keys)
    return costs.ByKeys(keys, find * ranking.groups, 0 if whole else rows)


def _keys_to_find(k: int, rows: int, keys: int) -> int:
    """How many keys to look for so that their rows are k: of so many rows with so many keys."""
    return min(k, math.ceil(_MORE_KEYS * k * keys / max(1, rows)) + 8)


class DistinctKeys:
    """One top-k question to one layer, by distinct keys.

    Args:
        layer: Whose memory.
        queries: float32 [n, d_in], finite.
        ranking: What is ranked.
        strategy: How the keys are found: "certified" or "scan".
        stop: Asked between tiles.

    Attributes:
        asked, kept: As `Scan` has them.
        keys: How many distinct keys took part.
    """

    def __init__(
        self,
        layer: Layer,
        queries: torch.Tensor,
        ranking: Ranking,
        strategy: str,
        stop: Stop | None,
    ) -> None:
        self._layer = layer
        self._queries = queries
        self._ranking = ranking
        self._strategy = strategy
        self._stop = stop
        self.asked = self.kept = self.keys = 0

    @property
    def kept_share(self) -> float | None:
        """As `Scan` has it."""
        return self.kept / self.asked if self.asked else None

    def run(self, selected: np.ndarray) -> Hits:
        """Answer over the selected rows, bool [total]: those whose keys are finite."""
        equal, ranking, queries = self._layer.equal_rows, self._ranking, self._queries
        assert equal is not None
        rows = equal.selected(selected)
        self.keys = len(rows.names)
        standing = np.zeros(len(selected), bool)
        standing[rows.standing] = True
        if ranking.distinct is not None:  # of a key's rows the first alone counts
            return self._find(queries, ranking.k, standing)
        found: Hits | None = None
        left = np.arange(len(queries))
        k = _keys_to_find(ranking.k, len(rows.positions), self.keys)
        while True:
            part = self._find(queries[torch.from_numpy(left)], k, standing)
            whole, enough = self._with_their_rows(part, rows)
            if found is None:
                found = whole
            else:
                found.ids[left] = whole.ids
                found.scores[left] = whole.scores
                found.positions[left] = whole.positions
            left = left[~enough]
            if not len(left):
                return found
            k = min(ranking.k, 4 * k)

    def _find(self, queries: torch.Tensor, k: int, standing: np.ndarray) -> Hits:
        """The k best of the rows that stand for their keys, bool [total]."""
        ranking = replace(self._ranking, k=k)
        scan = Scan(self._layer, queries, ranking, self._strategy, False, self._stop)
        hits = scan.run(standing)
        self.asked += scan.asked
        self.kept += scan.kept
        return hits

    def _with_their_rows(self, keys: Hits, rows: KeyRows) -> tuple[Hits, np.ndarray]:
        """The best rows, from the best keys.

        Args:
            keys: What was found among the rows that stand for their keys.
            rows: All that take part.

        Returns:
            The k best rows of each query and group, and of which queries these are surely all,
            bool [n].
        """
        equal, k = self._layer.equal_rows, self._ranking.k
        assert equal is not None
        check_stop(self._stop)
        shape, found = keys.positions.shape, keys.positions >= 0
        place, counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        place[found] = equal.places(rows, keys.positions[found])
        counts[found] = rows.counts[place[found]]
        merits = merit(torch.from_numpy(keys.scores), self._ranking.order).numpy()
        # Keys that were not looked for are no better than the last of those that were.
        better = np.where(merits > merits[..., -1:], counts, 0).sum(axis=-1)
        enough = (better >= k) | ~found[..., -1] | (shape[-1] == k)
        # Those of which rows are among the k best, and those that tie with the last of these.
        needed = found & (counts.cumsum(axis=-1) - counts < k)
        last = np.where(needed, merits, np.inf).min(axis=-1, keepdims=True, initial=np.inf)
        taken = found & (merits >= last)
        check_stop(self._stop)
        query, group, _ = np.nonzero(taken)
        cells, lengths = query * shape[1] + group, counts[taken]
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = rows.positions[np.repeat(rows.starts[place[taken]], lengths) + inside]
        scores, merits = np.repeat(keys.scores[taken], lengths), np.repeat(merits[taken], lengths)
        hits = self._ordered(np.repeat(cells, lengths), merits, scores, positions, keys)
        return hits, enough.all(axis=-1)

    def _ordered(
        self,
        cells: np.ndarray,
        merits: np.ndarray,
        scores: np.ndarray,
        positions: np.ndarray,
        keys: Hits,
    ) -> Hits:
        """The k best of rows, [rows] each, by (cell, merit, row id); cells as in `candidates`, but
        query * groups + group, and queries and groups as `keys` has them."""
        check_stop(self._stop)
        k, ids = self._ranking.k, self._layer.space.ids[positions]
        order = np.lexsort((ids, -merits, cells))
        check_stop(self._stop)
        cells = cells[order]
        rank = np.arange(len(cells)) - np.searchsorted(cells, cells, side="left")
        best = rank < k
        where, order = (cells[best], rank[best]), order[best]
        queries, groups, _ = keys.positions.shape
        shape, whole = (queries * groups, k), (queries, groups, k)
        found_ids, found = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        found_scores = np.full(shape, np.nan, np.float32)
        found_ids[where], found[where] = ids[order], positions[order]
        found_scores[where] = scores[order]
        return Hits(
            found_ids.reshape(whole),
            found_scores.reshape(whole),
            found.reshape(whole),
            keys.groups,
            {},
        )
