"""Groups ranked by the sums of their rows: all groups are added up, the best are kept.

Sums of weights are those of `totals.sums`, in the cheapest of its ways. Contributions are folded
over tiles; where rows have no coefficients, but each step its own metric, every row is scored. All
groups' sums are held for a block of queries at a time, so that many groups are no problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from dualform.engine.devices.devices import Devices
from dualform.engine.groups.best import BestGroups, best_groups
from dualform.engine.groups.contribution_sum import ContributionSum, CosineSum
from dualform.engine.memory.fold import fold
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.plan import Plan, check_strategy
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.followed_along import FindMetric, check_cost, contributions_along
from dualform.engine.totals import sums
from dualform.engine.totals.sums import PreparedSums

TOTAL_BYTES = 128 << 20
"""Sums of all groups that are held at once, for as many queries as that is; for one at least."""

SCORE_BYTES = 256 << 20
"""Likewise of the scores of all rows, where each is scored by its step's metric."""


@dataclass(frozen=True)
class PreparedRanking:
    """A question for the best groups of one layer, its columns and filter looked up.

    Attributes:
        sums: Queries, groups, and the rows that take part.
        counts: int64 [groups], how many of these each group has.
        k: Groups per query.
        order: "largest", "smallest" or "absolute".
        contribution: What is added up; None for the attention weight.
        cosine: The cosine of query and key is, in place of the weight.
        find: Gives a unit's metric, for contributions without coefficients.
    """

    sums: PreparedSums
    counts: np.ndarray
    k: int
    order: str
    contribution: Contribution | None = None
    cosine: bool = False
    find: FindMetric | None = None


def block_queries(groups: int) -> int:
    """For how many queries the sums of so many groups are held at a time."""
    return max(1, TOTAL_BYTES // (8 * max(1, groups)))


def block_scores(rows: int) -> int:
    """For how many queries the scores of so many rows are."""
    return max(1, SCORE_BYTES // (8 * max(1, rows)))


def rank_groups(
    layer: Layer,
    prepared: PreparedRanking,
    strategy: str,
    devices: Devices,
    stop: Stop | None,
) -> tuple[BestGroups, Plan]:
    """The best groups.

    Args:
        layer: Whose rows.
        prepared: What is asked.
        strategy: How weights are added up, as `totals.sums.plan` takes it.
        devices: Likewise.
        stop: Asked between tiles.

    Raises:
        InvalidArgumentError: The strategy does not apply.
        ResourceExhaustedError: Directions that would take too long where rows have no coefficients.
    """
    asked = prepared.sums
    find, plan, size = _finder(layer, prepared, strategy, devices, stop)
    blocks = []
    for first in range(0, len(asked.queries), size):
        totals = find(slice(first, first + size))
        blocks.append(best_groups(totals, prepared.counts, prepared.k, prepared.order, stop))
    return BestGroups.join(blocks), plan


def group_totals(
    layer: Layer,
    prepared: PreparedRanking,
    strategy: str,
    devices: Devices,
    stop: Stop | None,
) -> tuple[np.ndarray, Plan]:
    """What is ranked of all groups, float64 [n, groups]; arguments as for `rank_groups`."""
    find, plan, _ = _finder(layer, prepared, strategy, devices, stop)
    return find(slice(None)), plan


def _finder(
    layer: Layer,
    prepared: PreparedRanking,
    strategy: str,
    devices: Devices,
    stop: Stop | None,
) -> tuple[Callable[[slice], np.ndarray], Plan, int]:
    """What adds up all groups for a block of the queries, how, and for how many at a time."""
    asked, contribution = prepared.sums, prepared.contribution
    size = block_queries(len(asked.grouping.values))
    if prepared.cosine:

        def cosines(block: slice) -> np.ndarray:
            queries = asked.queries[block]
            total = CosineSum(queries, Groups(asked.grouping))
            fold(layer, queries, asked.selected, [total], stop)
            return total.result()

        why = "a cosine depends on its key's length, so every row is multiplied"
        return cosines, _scan_alone(why, strategy), size
    if contribution is None:
        way = sums.plan(layer, asked, strategy, devices)

        def weights(block: slice) -> np.ndarray:
            part = replace(asked, queries=asked.queries[block])
            return sums.total_weights(layer, part, way, stop)

        return weights, way.plan, size
    plan = _plan_contributions(contribution, strategy)
    if contribution.coefficients is None:
        positions = np.flatnonzero(asked.selected)
        size = min(size, block_scores(len(positions)))
        if contribution.directions is not None:
            check_cost(layer, len(positions), contribution.directions)

    def contributions(block: slice) -> np.ndarray:
        part = replace(asked, queries=asked.queries[block])
        of_block = contribution.part(block)
        return _total_contributions(layer, part, of_block, prepared.find, stop)

    return contributions, plan, size


def _plan_contributions(contribution: Contribution, strategy: str) -> Plan:
    if contribution.coefficients is None:
        why = "each step has its own metric, so every row is scored"
    else:
        why = "what a row added depends on its value, so every row is multiplied"
    return _scan_alone(why, strategy)


def _scan_alone(why: str, strategy: str) -> Plan:
    refused = {"key_sums": why, "distinct_keys": why, "device": why, "scan": None}
    check_strategy(strategy, refused)
    return Plan("scan", why, {})


def _total_contributions(
    layer: Layer,
    asked: PreparedSums,
    contribution: Contribution,
    find: FindMetric | None,
    stop: Stop | None,
) -> np.ndarray:
    """Total contributions, float64 [n, groups]."""
    queries, grouping = asked.queries, asked.grouping
    if contribution.coefficients is not None:
        total = ContributionSum(len(queries), Groups(grouping), contribution)
        fold(layer, queries, asked.selected, [total], stop)
        return total.result()
    assert find is not None
    directions = contribution.directions
    if directions is None:
        directions = torch.zeros((len(queries), layer.d_out))
        directions[:, contribution.unit] = 1
    positions = np.flatnonzero(asked.selected)
    found = contributions_along(layer, queries, directions, find, positions, stop)
    codes, groups = grouping.codes[positions], len(grouping.values)
    return np.stack([np.bincount(codes, of_query, groups) for of_query in found])
