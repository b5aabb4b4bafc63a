"""Total attention weight per group: float32 weights per tile, added in float64.

A signed sum is linear in the key: where all rows of a run take part and belong to one group, one
product with the run's stored key sum stands for them. Likewise an absolute sum where neither keys
nor query have a sign to drop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from dualform.engine.fold import fold
from dualform.engine.groups import runs
from dualform.engine.layer import Layer
from dualform.engine.planner import Plan, check_strategy, chosen, sums_costs
from dualform.engine.shards import Stop, Tile
from dualform.store.grouping import Grouping

Strategy = Literal["auto", "key_sums", "scan"]


class GroupSum:
    """Adds up weights per group: a reducer.

    Args:
        queries: Number of queries.
        grouping: The groups.
        absolute: Add |weight|.
        device: Where the weights are.
    """

    values = False

    def __init__(
        self, queries: int, grouping: Grouping, absolute: bool, device: torch.device
    ) -> None:
        self._grouping = grouping
        self._absolute = absolute
        shape = (len(grouping.values), queries)
        self._totals = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, [n, rows]."""
        codes = self._grouping.codes[tile.positions]
        if self._absolute:
            weights = weights.abs()
        found = runs(codes)
        if len(found.spans) > 64:
            groups = torch.from_numpy(codes).to(weights.device)
            self._totals.index_add_(0, groups, weights.T.double())
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


@dataclass(frozen=True)
class Question:
    """Sums to compute.

    Attributes:
        queries: float32 [n, d_in], finite.
        grouping: The groups.
        run_codes: int32 [runs], the group of each run's rows; negative where they differ.
        absolute: Add |weight|.
        selected: bool [total], the rows that take part, each in some group.
    """

    queries: torch.Tensor
    grouping: Grouping
    run_codes: np.ndarray
    absolute: bool
    selected: np.ndarray


def whole_runs(layer: Layer, question: Question) -> np.ndarray:
    """The runs whose stored key sums can stand for their rows, bool [runs]."""
    selected, starts = question.selected, layer.space.run_starts
    signless = layer.nonnegative and bool((question.queries >= 0).all())
    if layer.run_sums is None or (question.absolute and not signless):
        return np.zeros(len(starts), bool)
    whole = question.run_codes >= 0
    if selected is not layer.space.everything:
        whole &= np.logical_and.reduceat(selected, starts)
    return whole


def left_to_scan(layer: Layer, question: Question, summed: np.ndarray) -> np.ndarray:
    """The selected rows, bool [total], that are in none of the summed runs, bool [runs]."""
    if not summed.any():
        return question.selected
    lengths = np.diff(layer.space.run_starts, append=layer.rows)
    return np.asarray(question.selected & ~np.repeat(summed, lengths))


def plan(
    layer: Layer, question: Question, strategy: str
) -> tuple[Plan, np.ndarray, np.ndarray | None]:
    """How to compute sums.

    Returns:
        The plan, and what `total_weights` takes as `summed` and `scanned`.

    Raises:
        InvalidArgumentError: The strategy is unknown, or does not apply.
    """
    whole = whole_runs(layer, question)
    rows = 0
    if not whole.all():
        scanned = left_to_scan(layer, question, whole)
        rows = int(np.count_nonzero(scanned))
    refused = None
    if rows:
        refused = f"{rows:,} rows are in no run whose key sum can stand for them"
        if layer.run_sums is None:
            refused = f"layer {layer.name!r} has no key sums"
        elif question.absolute and not whole.any():
            refused = "absolute weights are no product with a key sum"
    check_strategy(strategy, {"key_sums": refused, "scan": None})
    all_rows = int(np.count_nonzero(question.selected))
    costs = sums_costs(layer, len(question.queries), int(np.count_nonzero(whole)), all_rows)
    if strategy == "scan" or (refused is not None and not whole.any()):
        del costs["key_sums"]
        return chosen(strategy, costs, str(refused)), np.zeros_like(whole), question.selected
    if refused is None:
        reason = "every row is in a run whose key sum stands for it"
        return Plan("key_sums", reason, costs), whole, None
    part = sums_costs(layer, len(question.queries), int(np.count_nonzero(whole)), rows)
    costs = {"scan": part["scan"] + part["key_sums"]}
    reason = f"key sums stand for {all_rows - rows:,} rows, the other {rows:,} are multiplied"
    return Plan("scan", reason, costs), whole, scanned


def total_weights(
    layer: Layer,
    question: Question,
    summed: np.ndarray,
    scanned: np.ndarray | None,
    device: torch.device,
    stop: Stop | None,
) -> np.ndarray:
    """Total attention weights.

    Args:
        layer: Whose rows.
        question: What is asked.
        summed: bool [runs], which runs' key sums are taken.
        scanned: bool [total], the other rows that take part; None for none.
        device: Where tiles are multiplied.
        stop: Asked between tiles.

    Returns:
        float64 [n, groups].
    """
    queries = question.queries
    total = GroupSum(len(queries), question.grouping, question.absolute, device)
    if summed.any():
        assert layer.run_sums is not None
        weights = queries.double().numpy() @ layer.run_sums[summed].T
        total.add_runs(question.run_codes[summed], weights)
    if scanned is not None:
        fold(layer, queries, scanned, [total], device, stop)
    return total.result()
