"""Exact scores of candidates: of rows that can be read again, or of a tile that is here now."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from dualform.engine.memory.exact import ExactDots
from dualform.engine.memory.float64 import lengths
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.tiles import Tile
from dualform.engine.threads import shared_out
from dualform.engine.topk.candidates import Candidates
from dualform.engine.topk.contribution import Contribution

KEYS_TOGETHER = 1024
"""So many keys are held while they are scored, at most."""

MANY_KEYS = 64
"""So many of one query are multiplied with it; fewer, of several queries, are scored together."""


class Scores:
    """Scores rows exactly (docs/exactness.md, rule 1).

    Args:
        queries: float32 [n, d_in], finite.
        contribution: What is scored; None for the attention weight.
        layer: Where candidates can be read; None without.
        longest: At least the norm of the layer's finite keys.
        cosine: The cosine is scored in place of the weight.
        stop: Asked between some keys and the next.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        contribution: Contribution | None,
        layer: Layer | None,
        longest: float,
        cosine: bool = False,
        stop: Stop | None = None,
    ) -> None:
        self._stop = stop
        self._longest = longest
        self._lengths = lengths(queries.numpy()) if cosine else None
        self._queries = queries
        self._contribution = contribution
        self._layer = layer

    def in_tile(self, tile: Tile, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Scores of pairs of a query and a row of a tile, int64 [m] both: float32 [m]."""
        scores = np.empty(len(rows), np.float32)
        for first in range(0, len(rows), KEYS_TOGETHER):
            part = slice(first, first + KEYS_TOGETHER)
            keys = tile.keys[torch.from_numpy(rows[part])]
            asked = self._queries[torch.from_numpy(queries[part])]
            dots = ExactDots(keys, asked, tile.max_norm, self._stop)
            if self._contribution is None:
                scores[part] = self._rounded(dots, keys, queries[part])
            else:
                factors = self._contribution.inside(tile, rows[part], queries[part])
                scores[part] = dots.rounded_contributions(*factors)
        return scores

    def of(self, part: Candidates) -> np.ndarray:
        """Scores of candidates, those known and those yet to be read: float32 [m]."""
        scores: np.ndarray = part.scores.copy()
        unknown = np.flatnonzero(np.isnan(scores))
        queries = part.cells[unknown] % len(self._queries)
        order = unknown[np.lexsort((part.positions[unknown], queries))]
        queries = part.cells[order] % len(self._queries)
        together = _together(queries)

        def score(some: Sequence[slice]) -> None:
            room = torch.empty((KEYS_TOGETHER, self._queries.shape[1]), dtype=torch.float32)
            for each in some:
                which, asked = order[each], queries[each]
                if asked[0] == asked[-1] and len(asked) >= MANY_KEYS:
                    self._score(part, which, int(asked[0]), scores, room)
                else:
                    self._score_pairs(part, which, asked, scores)

        shared_out(score, together)
        return scores

    def _score(
        self,
        part: Candidates,
        which: np.ndarray,
        query: int,
        scores: np.ndarray,
        room: torch.Tensor,
    ) -> None:
        """Score some of one query's candidates, in the order of their positions.

        Args:
            part: All candidates.
            which: int64 [n], some of them.
            query: Whose.
            scores: Where their scores go, float32 [all].
            room: float32 [at least n, d_in], for their keys.
        """
        assert self._layer is not None
        check_stop(self._stop)
        positions = part.positions[which]
        keys = self._layer.keys_at(positions, room)
        dots = ExactDots(keys, self._queries[query], self._longest, self._stop)
        queries = np.full(len(which), query)
        if self._contribution is None:
            scores[which] = self._rounded(dots, keys, queries)
        else:
            factors = self._contribution.at(self._layer, positions, queries)
            scores[which] = dots.rounded_contributions(*factors)

    def _score_pairs(
        self, part: Candidates, which: np.ndarray, queries: np.ndarray, scores: np.ndarray
    ) -> None:
        """Score candidates of several queries, int64 [n] both, whose keys are read together."""
        assert self._layer is not None
        check_stop(self._stop)
        positions, place = np.unique(part.positions[which], return_inverse=True)
        keys = self._layer.keys_at(positions)[torch.from_numpy(place)]
        asked = self._queries[torch.from_numpy(queries)]
        dots = ExactDots(keys, asked, self._longest, self._stop)
        if self._contribution is None:
            scores[which] = self._rounded(dots, keys, queries)
        else:
            factors = self._contribution.at(self._layer, positions[place], queries)
            scores[which] = dots.rounded_contributions(*factors)

    def _rounded(self, dots: ExactDots, keys: torch.Tensor, queries: np.ndarray) -> np.ndarray:
        """Weights, or cosines, of keys with their queries, int64 [m]: float32 [m]."""
        if self._lengths is None:
            return dots.rounded()
        return dots.rounded_cosines(lengths(keys.numpy()) * self._lengths[queries])


def _together(queries: np.ndarray) -> list[slice]:
    """Which candidates are scored together, of so many queries' in order, int64 [n]: up to
    `KEYS_TOGETHER` of one query with many, or of several with a few each."""
    found = []
    bounds = np.flatnonzero(np.diff(queries, prepend=-1, append=-1)).tolist()
    few = 0  # those of queries with a few, not taken yet, begin here
    for first, last in itertools.pairwise(bounds):
        if last - first >= MANY_KEYS or last - few > KEYS_TOGETHER:
            found.append(slice(few, first))
            few = first
        if last - first >= MANY_KEYS:
            starts = range(first, last, KEYS_TOGETHER)
            found += [slice(start, min(last, start + KEYS_TOGETHER)) for start in starts]
            few = last
    found.append(slice(few, len(queries)))
    return [each for each in found if each.start < each.stop]
