"""Total attention weight per group: float32 weights per tile, added in float64.

A signed sum is linear in the key: where all rows of a run take part and belong to one group, one
product with the run's stored key sum stands for them. Likewise an absolute sum where neither keys
nor query have a sign to drop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dualform.engine.groups import runs
from dualform.engine.shards import Stop
from dualform.engine.weights import needs_float64, tile_weights
from dualform.store.grouping import Grouping

if TYPE_CHECKING:
    from dualform.engine.index import Layer


class GroupSum:
    """Adds up weights per group.

    Args:
        queries: Number of queries.
        grouping: The groups.
        absolute: Add |weight|.
        device: Where the weights are.
    """

    def __init__(
        self, queries: int, grouping: Grouping, absolute: bool, device: torch.device
    ) -> None:
        self._grouping = grouping
        self._absolute = absolute
        shape = (len(grouping.values), queries)
        self._totals = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, positions: np.ndarray, weights: torch.Tensor) -> None:
        """Take a tile: positions int64 [rows], weights [n, rows]."""
        if self._absolute:
            weights = weights.abs()
        found = runs(self._grouping.codes[positions])
        if len(found.spans) > 64:
            codes = torch.from_numpy(self._grouping.codes[positions]).to(weights.device)
            self._totals.index_add_(0, codes, weights.T.double())
            return
        if found.order is not None:
            weights = weights[:, found.order.to(weights.device)]
        for group, first, last in found.spans:
            self._totals[group] += weights[:, first:last].sum(1, dtype=torch.float64)

    def add_runs(self, groups: np.ndarray, weights: np.ndarray) -> None:
        """Take whole runs: their groups, int32 [runs], and total weights, float64 [n, runs]."""
        parts = torch.from_numpy(np.ascontiguousarray(weights.T)).to(self._totals.device)
        self._totals.index_add_(0, torch.from_numpy(groups).to(self._totals.device), parts)

    def result(self) -> np.ndarray:
        """float64 [n, groups]."""
        return np.ascontiguousarray(self._totals.T.cpu().numpy())


def total_weights(
    layer: Layer,
    queries: torch.Tensor,
    grouping: Grouping,
    run_codes: np.ndarray,
    absolute: bool,
    selected: np.ndarray,
    device: torch.device,
    stop: Stop | None,
) -> np.ndarray:
    """Total attention weights.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in].
        grouping: The groups.
        run_codes: int32 [runs], the group of each run's rows; negative where they differ.
        absolute: Add |weight|.
        selected: bool [total], the rows that take part, each in some group.
        device: Where tiles are multiplied.
        stop: Asked between tiles.

    Returns:
        float64 [n, groups].
    """
    total = GroupSum(len(queries), grouping, absolute, device)
    run_sums = layer.run_sums
    signless = layer.nonnegative and bool((queries >= 0).all())
    if run_sums is not None and (signless or not absolute):
        codes, whole = run_codes, np.array(True)
        if selected is not layer.space.everything:
            whole = np.logical_and.reduceat(selected, layer.space.run_starts)
        usable = (codes >= 0) & whole
        total.add_runs(codes[usable], queries.double().numpy() @ run_sums[usable].T)
        if usable.all():
            return total.result()
        lengths = np.diff(layer.space.run_starts, append=layer.rows)
        selected = selected & ~np.repeat(usable, lengths)
    norms = torch.linalg.vector_norm(queries.double(), dim=1)
    own = queries.to(device)
    for shard in layer.shards:
        wide = needs_float64(norms, shard)
        inside = selected[shard.start : shard.start + shard.rows]
        for tile in shard.tiles(inside, len(queries), device=device, stop=stop):
            total.update(tile.positions, tile_weights(own, tile.keys, wide=wide))
    return total.result()
