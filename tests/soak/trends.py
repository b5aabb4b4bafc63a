"""Whether what was measured again and again grows, or only goes up and down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCKS = 10
# Of Student's t with BLOCKS - 2 degrees of freedom: passed by chance once in a thousand times.
_T = 4.501


class Trend(NamedTuple):
    """A straight line through measurements.

    Attributes:
        slope: By how much they grow in a unit of time.
        margin: By how much the slope may be off, by their own noise.
    """

    slope: float
    margin: float

    @property
    def grows(self) -> bool:
        """Whether noise does not explain it."""
        return self.slope > self.margin

    def __str__(self) -> str:
        return f"{self.slope:+.3f} ± {self.margin:.3f}"


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of the means of BLOCKS equal spans of time.

    Measurements that follow one another within a second are of the same streams and connections:
    an interval that took each for independent would be far too narrow, and find growth where there
    is none. Means over longer than whatever comes and goes are nearly independent. So the blocks
    are to be several times as long as that.
    """
    at, measured = np.asarray(times, np.float64), np.asarray(values, np.float64)
    edges = np.linspace(at[0], at[-1], BLOCKS + 1)
    block = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, BLOCKS - 1)
    counts = np.bincount(block, minlength=BLOCKS)
    x = np.bincount(block, at) / counts
    y = np.bincount(block, measured) / counts
    away = x - x.mean()
    spread = float(away @ away)
    slope = float(away @ y) / spread
    rest = y - y.mean() - slope * away
    return Trend(slope, _T * float(np.sqrt(rest @ rest / (BLOCKS - 2) / spread)))
