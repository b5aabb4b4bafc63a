"""Certified pruning: which rows' sketches prove that they can't be among the k best.

With y and rho of a key x (|x - P'y| <= rho), z = fl(P q) and s = q - P'z:

    q.x = (P q).y + q.r,  r = x - P'y,  |q.r| <= |s| rho + |z| |P r|

holds for any P. docs/decisions/0005 derives the allowance for rounding.
"""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.shards import Shard

_UNIT = 2.0**-24


class SketchedQueries:
    """Queries as the sketches of one layer see them.

    Args:
        queries: float32 [n, d_in].
        directions: P, float32 [m, d_in].
        order: "largest", "smallest" or "absolute".
    """

    def __init__(self, queries: torch.Tensor, directions: torch.Tensor, order: str) -> None:
        wide, basis = queries.double(), directions.double()
        m, d = directions.shape
        z = (wide @ basis.T).float()
        rest = torch.linalg.vector_norm(wide - z.double() @ basis, dim=1)
        rest = torch.nextafter((rest * (1 + 1e-9)).float(), torch.tensor(torch.inf))
        size = torch.linalg.vector_norm(z.double(), dim=1)
        # |P r| <= rounding of y = P x, and how far P is from orthonormal.
        gram = basis @ basis.T - torch.eye(m, dtype=torch.float64)
        defect = float(torch.linalg.matrix_norm(gram, 2))
        spectral = 1 + defect
        of_y = (d + 4) * _UNIT * 1.01 * float(torch.linalg.matrix_norm(basis))
        left = of_y + defect * (spectral + of_y)
        product = (m + 6) * _UNIT * 1.01
        self._allowance = (size * (left + product * 2) + rest.double() * product) * 2
        signs = {"largest": (1,), "smallest": (-1,), "absolute": (1, -1)}[order]
        self._rows = [torch.cat([sign * z, rest[:, None]], dim=1) for sign in signs]

    def bounds(self, shard: Shard, sketches: torch.Tensor) -> torch.Tensor:
        """Upper bounds of the merits of a shard's rows.

        Args:
            shard: Whose rows.
            sketches: float32 [rows, m + 1].

        Returns:
            float32 [n, rows].
        """
        bounds = self._rows[0] @ sketches.T
        for other in self._rows[1:]:
            torch.maximum(bounds, other @ sketches.T, out=bounds)
        longest = shard.max_norm * (1 + 1e-6) + 1e-17
        allowance = (self._allowance * longest + longest * 1e-42 + 1e-30).float()[:, None]
        return bounds.add_(torch.nextafter(allowance, torch.tensor(torch.inf)))


def best_rows(
    bounds: torch.Tensor, k: int, selected: np.ndarray, distinct: np.ndarray | None
) -> np.ndarray:
    """The selected rows with the k largest bounds of any query.

    Args:
        bounds: float32 [n, rows].
        k: How many; with `distinct`, of how many different values.
        selected: bool [rows].
        distinct: int64 [rows], equal where rows stand for the same; or None.

    Returns:
        bool [rows].
    """
    found = np.zeros(len(selected), bool)
    inside = np.flatnonzero(selected)
    wanted = k
    own = bounds if len(inside) == len(selected) else bounds[:, torch.from_numpy(inside)]
    while k < len(inside):
        rows = inside[own.topk(k, dim=1).indices.numpy()]
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
