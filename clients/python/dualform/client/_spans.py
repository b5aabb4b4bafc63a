"""Where in a document: of places with scores, the runs of neighbouring ones that did most."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def best_spans(
    places: Sequence[tuple[int, float]], count: int, width: int, order: str
) -> list[tuple[int, int, float]]:
    """Of all runs of so many neighbouring places those with the best sums, none overlapping.

    Memory and time are of the places that are there, however far apart they lie.

    Args:
        places: Each place with its score; those that are not there have none.
        count: At most so many.
        width: Places of a run; fewer where all are.
        order: "largest", "smallest" or "absolute".

    Returns:
        First and last place, and the sum.
    """
    if not places:
        return []
    there = sorted(places)
    known, scores = [place for place, _ in there], np.array([score for _, score in there])
    low, last_first = known[0], max(known[0], known[-1] - width + 1)
    width = min(width, known[-1] - low + 1)
    # A run's sum changes only where a place comes into it, or goes out.
    changes = {low, *(place - width + 1 for place in known), *(place + 1 for place in known)}
    firsts = sorted(first for first in changes if low <= first <= last_first)

    def merit(first: int) -> tuple[float, float]:
        inside = slice(bisect_left(known, first), bisect_left(known, first + width))
        score = float(scores[inside].sum())
        return {"largest": score, "smallest": -score, "absolute": abs(score)}[order], score

    merits = {first: merit(first) for first in firsts}
    found: list[tuple[int, int, float]] = []
    while len(found) < count and firsts:
        best = max(firsts, key=lambda first: merits[first][0])
        if merits[best][0] <= 0:
            break
        found.append((best, best + width - 1, merits[best][1]))
        after = best + width
        firsts = [first for first in firsts if not best - width < first < after]
        if after <= last_first and after not in merits:
            merits[after] = merit(after)
            if all(abs(after - first) >= width for first, _, _ in found):
                insort(firsts, after)
    return found
