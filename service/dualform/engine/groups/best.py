"""The best groups of each query, by (sum, the group's place among the values)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.topk.ranking import merit


@dataclass(frozen=True)
class BestGroups:
    """The best groups of some queries.

    Attributes:
        codes: int64 [n, k], the groups; -1 where fewer have rows that take part.
        scores: float64 [n, k], their sums; NaN there.
    """

    codes: np.ndarray
    scores: np.ndarray

    @classmethod
    def join(cls, blocks: Sequence[BestGroups]) -> BestGroups:
        """The answer to all queries from those to blocks of them, in order."""
        return cls(
            np.concatenate([block.codes for block in blocks]),
            np.concatenate([block.scores for block in blocks]),
        )


def best_groups(
    totals: np.ndarray, counts: np.ndarray, k: int, order: str, stop: Stop | None = None
) -> BestGroups:
    """The k best groups of each query; of equal sums the lower group comes first.

    Args:
        totals: float64 [n, groups], by the groups' numbers, which are in the order of their values.
        counts: int64 [groups], the rows of each that take part. A group without any is never
            ranked, and neither is one whose sum is not finite, as a row of it then is not.
        k: How many.
        order: "largest", "smallest" or "absolute".
        stop: Asked before each query; True raises CancelledError.
    """
    codes = np.full((len(totals), k), -1, np.int64)
    scores = np.full(codes.shape, np.nan)
    present = np.flatnonzero(counts)
    for number, sums in enumerate(totals):
        check_stop(stop)
        among = present[np.isfinite(sums[present])]
        merits = merit(torch.from_numpy(sums[among]), order).numpy()
        if len(among) > k:
            kth = np.partition(merits, len(merits) - k)[len(merits) - k]
            near = np.flatnonzero(merits >= kth)
            among, merits = among[near], merits[near]
        best = among[np.argsort(-merits, kind="stable")[:k]]
        codes[number, : len(best)] = best
        scores[number, : len(best)] = sums[best] + 0.0  # -0 never occurs
    return BestGroups(codes, scores)
