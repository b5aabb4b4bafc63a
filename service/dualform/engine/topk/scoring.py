"""Exact scores of candidates: of rows that can be read again, or of a tile that is here now."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dualform.engine.memory.exact import ExactDots
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.tiles import Tile
from dualform.engine.topk.candidates import Candidates
from dualform.engine.topk.contribution import Contribution

KEYS_TOGETHER = 1024
"""So many keys are held while they are scored, at most."""


class Scores:
    """Scores rows exactly (docs/exactness.md, rule 1).

    Args:
        queries: float32 [n, d_in], finite.
        contribution: What is scored; None for the attention weight.
        layer: Where candidates can be read; None without.
    """

    def __init__(
        self, queries: torch.Tensor, contribution: Contribution | None, layer: Layer | None
    ) -> None:
        self._queries = queries
        self._contribution = contribution
        self._layer = layer

    def in_tile(self, tile: Tile, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Scores of pairs of a query and a row of a tile, int64 [m] both: float32 [m]."""
        scores = np.empty(len(rows), np.float32)
        for first in range(0, len(rows), KEYS_TOGETHER):
            part = slice(first, first + KEYS_TOGETHER)
            keys = tile.keys[torch.from_numpy(rows[part]).to(tile.keys.device)].cpu()
            dots = ExactDots(keys, self._queries[torch.from_numpy(queries[part])])
            if self._contribution is None:
                scores[part] = dots.rounded()
            else:
                factors = self._contribution.inside(tile, rows[part], queries[part])
                scores[part] = dots.rounded_contributions(*factors)
        return scores

    def of(self, part: Candidates) -> np.ndarray:
        """Scores of candidates, those known and those yet to be read: float32 [m]."""
        scores = part.scores.copy()
        unknown = np.flatnonzero(np.isnan(scores))
        order = unknown[
            np.lexsort((part.positions[unknown], part.cells[unknown] % len(self._queries)))
        ]
        queries = part.cells[order] % len(self._queries)
        ends = np.flatnonzero(np.diff(queries, append=-1)) + 1
        first = 0
        while first < len(order):
            # As many whole queries as fit, so that their keys are read together; or part of one.
            whole = ends[(ends > first) & (ends <= first + KEYS_TOGETHER)]
            last = int(whole[-1]) if whole.size else min(first + KEYS_TOGETHER, len(order))
            self._score(part, order[first:last], queries[first:last], scores)
            first = last
        return np.asarray(scores)

    def _score(
        self, part: Candidates, which: np.ndarray, queries: np.ndarray, scores: np.ndarray
    ) -> None:
        """Score some candidates of the layer, ordered by query and position."""
        assert self._layer is not None
        positions, place = np.unique(part.positions[which], return_inverse=True)
        keys = self._layer.keys_at(positions)
        bounds = np.flatnonzero(np.diff(queries, prepend=-1, append=-1))
        for first, last in itertools.pairwise(bounds):
            of_query, inside = which[first:last], torch.from_numpy(place[first:last])
            inside_keys = keys if last - first == len(keys) else keys[inside]
            dots = ExactDots(inside_keys, self._queries[queries[first]])
            if self._contribution is None:
                scores[of_query] = dots.rounded()
            else:
                about = (part.positions[of_query], int(queries[first]))
                factors = self._contribution.at(self._layer, *about)
                scores[of_query] = dots.rounded_contributions(*factors)
