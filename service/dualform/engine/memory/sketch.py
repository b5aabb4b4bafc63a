"""Certified pruning: rows are ruled out of the k best by a few numbers of each, with a proof.

A key's sketch is y = fl(P x), its products with a few directions P, and rho, a number that is at
least the length of the rest, r = x - P'y. For a query q, with z = fl(P q) and s = q - P'z:

    q.x = (P q).y + q.r,   |q.r| <= |s| rho + |z| |P r|

whatever P is. The first term is computed, the second bounded: a row that can't reach the k-th best
score found so far is left out, and its key is never read. docs/decisions/0005 derives the allowance
for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dualform.engine.memory.shards import pick
from dualform.engine.threads import over_shards

_UNIT = 2.0**-24
_NARROW = 3


class Basis:
    """The directions that a layer's sketches project on, and how far from orthonormal they are.

    Args:
        directions: P, float32 [m, d_in].

    Attributes:
        wide: P in float64.
        of_rest: |P r| is at most so many times |x|, from rounding y = P x and from P's defect.
        of_product: Relative rounding of a float32 product with a sketch.
    """

    def __init__(self, directions: torch.Tensor) -> None:
        m, d = directions.shape
        self.wide = directions.double()
        gram = self.wide @ self.wide.T - torch.eye(m, dtype=torch.float64)
        defect = float(torch.linalg.matrix_norm(gram, 2))
        of_y = (d + 4) * _UNIT * 1.01 * float(torch.linalg.matrix_norm(self.wide))
        self.of_rest = of_y + defect * (1 + defect + of_y)
        self.of_product = (m + 6) * _UNIT * 1.01


class SketchedQueries:
    """Queries as the sketches of one layer see them.

    Args:
        queries: float32 [n, d_in].
        basis: The layer's.
        order: "largest", "smallest" or "absolute".
    """

    def __init__(self, queries: torch.Tensor, basis: Basis, order: str) -> None:
        wide = queries.double()
        z = (wide @ basis.wide.T).float()
        rest = torch.linalg.vector_norm(wide - z.double() @ basis.wide, dim=1)
        rest = torch.nextafter((rest * (1 + 1e-9)).float(), torch.tensor(torch.inf))
        size = torch.linalg.vector_norm(z.double(), dim=1)
        product = basis.of_product
        self._allowance = (size * (basis.of_rest + product * 2) + rest.double() * product) * 2
        signs = {"largest": (1,), "smallest": (-1,), "absolute": (1, -1)}[order]
        rows = torch.cat([torch.cat([sign * z, rest[:, None]], dim=1) for sign in signs])
        self._count, self._signs = len(queries), len(signs)
        if len(rows) > _NARROW:
            # A product with a few vectors is slower than one with sixteen.
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16))
        self._rows = rows

    def bounds(
        self, parts: Sequence[tuple[torch.Tensor, slice | np.ndarray]], rows: Sequence[int]
    ) -> torch.Tensor:
        """What merits are at most, `allowance` aside.

        Args:
            parts: Sketches, float32 [any, m + 1] each, and which of them are asked about.
            rows: How many, of each part.

        Returns:
            float32 [rows, n], of all parts.
        """
        ends = np.cumsum([0, *rows])
        bounds = torch.empty((ends[-1], len(self._rows)), dtype=torch.float32)

        def fill(number: int) -> None:
            part = bounds[ends[number] : ends[number + 1]]
            torch.mm(pick(*parts[number]), self._rows.T, out=part)

        over_shards(fill, range(len(parts)), self._count)
        count = self._count
        if self._signs == 1:
            return bounds[:, :count]
        positive = bounds[:, :count]
        return torch.maximum(positive, bounds[:, count : 2 * count], out=positive)

    def allowance(self, longest: float) -> torch.Tensor:
        """What rounding can add to the bounds of keys of this norm at most: float64 [n]."""
        longest = longest * (1 + 1e-6) + 1e-17
        allowance: torch.Tensor = self._allowance * longest + longest * 1e-42 + 1e-30
        return allowance


def best_rows(
    bounds: torch.Tensor, k: int, selected: np.ndarray, distinct: np.ndarray | None
) -> np.ndarray:
    """The selected rows with the k largest bounds of any query.

    Args:
        bounds: float32 [rows, n].
        k: How many; with `distinct`, of how many different values.
        selected: bool [rows].
        distinct: int64 [rows], equal where rows stand for the same; or None.

    Returns:
        bool [rows].
    """
    found = np.zeros(len(selected), bool)
    inside = np.flatnonzero(selected)
    wanted = k
    by_query = bounds if len(inside) == len(selected) else bounds[torch.from_numpy(inside)]
    by_query = by_query.T.contiguous()
    while k < len(inside):
        rows = inside[by_query.topk(k, dim=1).indices.numpy()]
        if distinct is None or _fewest(distinct[rows]) >= wanted:
            found[np.unique(rows)] = True
            return found
        k *= 4
    found[inside] = True
    return found


def _fewest(codes: np.ndarray) -> int:
    """The number of different codes, int64 [n, k], in the row that has fewest."""
    ordered = np.sort(codes, axis=1)
    return 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).min())
