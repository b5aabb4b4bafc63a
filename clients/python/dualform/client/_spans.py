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
    runs = _Runs(places, width, order)
    found: list[tuple[int, int, float]] = []
    while len(found) < count and (best := runs.best()) is not None:
        found.append((best, best + runs.width - 1, runs.sums[best]))
        runs.take_out(best)
    return found


class _Runs:
    """Runs of so many places, by their first: those at which the sum changes, of each stretch of
    equal sums the one that begins it.

    Attributes:
        width: Places of each.
        sums: Of each its score.
    """

    def __init__(self, places: Sequence[tuple[int, float]], width: int, order: str) -> None:
        there = sorted(places)
        self._places = [place for place, _ in there]
        self._scores = np.array([score for _, score in there])
        self._order = order
        low, high = self._places[0], self._places[-1]
        self.width = min(width, high - low + 1)
        self._last = high - self.width + 1
        self.sums: dict[int, float] = {}
        # A run's sum changes only where a place comes into it, or goes out.
        changes = {low, *(p - self.width + 1 for p in self._places), *(p + 1 for p in self._places)}
        self._left = sorted(first for first in changes if low <= first <= self._last)
        self._taken: list[int] = []
        for first in self._left:
            self._add(first)

    def best(self) -> int | None:
        """The first one of those with the largest merit; None where none has any."""
        found = max(self._left, key=self._merit, default=None)
        return None if found is None or self._merit(found) <= 0 else found

    def take_out(self, best: int) -> None:
        """Leave out what overlaps with one; what was equal to the last of it begins behind it."""
        self._taken.append(best)
        after = best + self.width
        self._left = [first for first in self._left if abs(first - best) >= self.width]
        free = all(abs(after - first) >= self.width for first in self._taken)
        if free and after <= self._last and after not in self.sums:
            self._add(after)
            insort(self._left, after)

    def _add(self, first: int) -> None:
        begin, end = (bisect_left(self._places, at) for at in (first, first + self.width))
        self.sums[first] = float(self._scores[begin:end].sum())

    def _merit(self, first: int) -> float:
        score = self.sums[first]
        return {"largest": score, "smallest": -score, "absolute": abs(score)}[self._order]
