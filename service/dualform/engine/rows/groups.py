"""The rows of a tile, group by group, as contiguous runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class Runs:
    """A tile's columns ordered so that each group's rows lie together.

    Attributes:
        order: int64 [rows], or None where the tile's own order will do.
        spans: (group, first, last) of each run, half-open, in that order.
    """

    order: torch.Tensor | None
    spans: list[tuple[int, int, int]]


def tile_runs(grouping: Grouping | None, positions: np.ndarray) -> Runs:
    """The runs of the rows at these positions, int64 [rows]; without groups, one of group 0."""
    if grouping is None:
        return Runs(None, [(0, 0, len(positions))])
    return runs(grouping.codes[positions])


def runs(codes: np.ndarray) -> Runs:
    """Runs of equal codes, int32 [rows]; shards lie grouped by label, so most tiles have few."""
    order = None
    edges = np.flatnonzero(np.diff(codes)) + 1
    if len(edges) > 64:
        sorted_order = np.argsort(codes, kind="stable")
        codes = codes[sorted_order]
        edges = np.flatnonzero(np.diff(codes)) + 1
        order = torch.from_numpy(sorted_order)
    bounds = [0, *edges.tolist(), len(codes)]
    return Runs(order, [(int(codes[a]), a, b) for a, b in pairwise(bounds)])
