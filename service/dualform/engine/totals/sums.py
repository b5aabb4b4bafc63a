"""Total attention weight per group, in the cheapest of these ways.

- Key sums. Adding the weights q.x of many rows is multiplying q with the sum of their keys. The
  index stores that sum for each run, the neighbouring rows of a shard with the same task and label:
  where a whole run takes part and belongs to one group, one product stands for all its rows. That
  holds for absolute weights too, where no number in these keys or in the query is negative.
- Distinct keys. Rows with the same key have the same weight: one product, times how many they are.
- A scan of every row: float32 weights, added in float64, on the CPU or on devices.

Rows that no key sum stands for take one of the other ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dualform.engine.devices.devices import Devices
from dualform.engine.errors import DataLossError
from dualform.engine.memory.fold import fold
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.costs import distinct_keys_seconds, key_sums_seconds, sums_seconds
from dualform.engine.plan.plan import Plan, check_strategy, chosen
from dualform.engine.rows.groups import Groups
from dualform.engine.totals.distinct_keys import DistinctSum, Pairs, first_rows
from dualform.engine.totals.group_sums import GroupSum
from dualform.engine.totals.on_devices import OnDevices, for_sums, weights_added
from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class PreparedSums:
    """A question for sums over one layer, its columns and filter looked up.

    Attributes:
        queries: float32 [n, d_in], finite.
        grouping: The groups.
        groups_of_runs: int32 [runs], the group of each run's rows; negative where they differ.
        absolute: Add |weight|.
        selected: bool [total], the rows that take part, each in some group.
    """

    queries: torch.Tensor
    grouping: Grouping
    groups_of_runs: np.ndarray
    absolute: bool
    selected: np.ndarray


def whole_runs(layer: Layer, prepared: PreparedSums) -> np.ndarray:
    """The runs whose stored key sums can stand for their rows, bool [runs]."""
    selected, starts = prepared.selected, layer.space.run_starts
    signless = layer.nonnegative and bool((prepared.queries >= 0).all())
    if not _has_run_sums(layer) or (prepared.absolute and not signless):
        return np.zeros(len(starts), bool)
    whole = prepared.groups_of_runs >= 0
    if selected is not layer.space.everything:
        whole &= np.logical_and.reduceat(selected, starts)
    return whole


def _has_run_sums(layer: Layer) -> bool:
    try:
        return layer.run_sums is not None
    except DataLossError:  # other strategies do without
        return False


def left_to_scan(layer: Layer, prepared: PreparedSums, summed: np.ndarray) -> np.ndarray:
    """The selected rows, bool [total], that are in none of the summed runs, bool [runs]."""
    if not summed.any():
        return prepared.selected
    lengths = np.diff(layer.space.run_starts, append=layer.rows)
    return np.asarray(prepared.selected & ~np.repeat(summed, lengths))


@dataclass(frozen=True)
class Way:
    """How sums are computed.

    Attributes:
        plan: The strategy, and why.
        summed: bool [runs], whose key sums are taken.
        rest: bool [total], the other rows that take part; None for none.
        standing: bool [total], the rows that are multiplied in their place, one for each distinct
            key; None where each is multiplied itself.
        on: How devices multiply the rest; None where the CPU does.
    """

    plan: Plan
    summed: np.ndarray
    rest: np.ndarray | None
    standing: np.ndarray | None
    on: OnDevices | None = None


def plan(layer: Layer, prepared: PreparedSums, strategy: str, devices: Devices) -> Way:
    """How to compute sums.

    Args:
        layer: Whose rows.
        prepared: What is asked.
        strategy: How, or "auto".
        devices: Where rows lie beside the host's memory.

    Raises:
        InvalidArgumentError: The strategy is unknown, or does not apply.
    """
    whole = whole_runs(layer, prepared)
    rest = None if whole.all() else left_to_scan(layer, prepared, whole)
    rows = 0 if rest is None else int(np.count_nonzero(rest))
    equal, no_distinct_keys = (None, None) if strategy == "scan" else _equal_keys(layer)
    refused = {
        "key_sums": _no_key_sums(layer, prepared, whole, rows),
        "distinct_keys": no_distinct_keys,
        "device": devices.why_not(),
        "scan": None,
    }
    check_strategy(strategy, refused)
    queries, all_rows = len(prepared.queries), int(np.count_nonzero(prepared.selected))
    if refused["key_sums"] is None and strategy in ("auto", "key_sums"):
        costs = {
            "key_sums": key_sums_seconds(layer, queries, int(np.count_nonzero(whole))),
            "scan": sums_seconds(layer, queries, all_rows),
        }
        reason = "every row is in a run whose key sum stands for it"
        return Way(Plan("key_sums", reason, costs), whole, None, None)
    if strategy != "auto":
        whole, rest, rows = np.zeros_like(whole), prepared.selected, all_rows
    assert rest is not None
    beside = 0.0
    if whole.any():
        beside = key_sums_seconds(layer, queries, int(np.count_nonzero(whole)))
    costs = {"scan": beside + sums_seconds(layer, queries, rows)}
    standing, keys = None, 0
    if equal is not None:
        standing = first_rows(equal, rest)
        keys = int(np.count_nonzero(standing))
        costs["distinct_keys"] = beside + distinct_keys_seconds(layer, queries, rows, keys)
    costs = {name: seconds * devices.cpu_pace for name, seconds in costs.items()}
    on = for_sums(devices, layer, prepared.queries, rest, strategy)
    if on is not None:
        costs["device"] = beside * devices.cpu_pace + on.seconds
    choice = chosen(strategy, costs, str(refused["key_sums"]))
    devices.note(layer, costs["scan"])
    if choice.strategy != "distinct_keys":
        standing = None
    choice = _explained(choice, strategy, all_rows if whole.any() else None, rows, keys)
    return Way(choice, whole, rest, standing, on if choice.strategy == "device" else None)


def _explained(choice: Plan, strategy: str, all_rows: int | None, rows: int, keys: int) -> Plan:
    """The plan with what stands for how many rows: of so many, or all, where key sums stand for
    the others."""
    if all_rows is not None:
        left = f"the other {rows:,} are multiplied"
        if choice.strategy == "distinct_keys":
            left = f"{keys:,} distinct keys for the other {rows:,}"
        reason = f"key sums stand for {all_rows - rows:,} rows, {left}"
        return replace(choice, reason=reason)
    if choice.strategy == "distinct_keys" and strategy == "auto":
        return replace(choice, reason=f"{keys:,} distinct keys stand for {rows:,} rows")
    return choice


def _equal_keys(layer: Layer) -> tuple[np.ndarray | None, str | None]:
    """`Layer.first_equal`, or why distinct keys can't answer without it."""
    if layer.manifest.equal_keys is None:
        return None, (
            f"the index does not know which keys of layer {layer.name!r} are equal: either few "
            "come again, or it was built before this was looked for"
        )
    try:
        return layer.first_equal, None
    except DataLossError as error:  # other strategies do without
        return None, str(error)


def _no_key_sums(layer: Layer, prepared: PreparedSums, whole: np.ndarray, rows: int) -> str | None:
    """Why key sums of whole runs, bool [runs], can't answer alone where so many rows are left."""
    if rows == 0:
        return None
    if not _has_run_sums(layer):
        return f"layer {layer.name!r} has no key sums"
    if prepared.absolute and not whole.any():
        return "absolute weights are no product with a key sum"
    return f"{rows:,} rows are in no run whose key sum can stand for them"


def total_weights(layer: Layer, prepared: PreparedSums, way: Way, stop: Stop | None) -> np.ndarray:
    """Total attention weights.

    Args:
        layer: Whose rows.
        prepared: What is asked.
        way: How, by `plan`.
        stop: Asked between tiles.

    Returns:
        float64 [n, groups].
    """
    queries, grouping = prepared.queries, prepared.grouping
    total = GroupSum(len(queries), Groups(grouping), prepared.absolute)
    if way.summed.any():
        assert layer.run_sums is not None
        weights = queries.double().numpy() @ layer.run_sums[way.summed].T
        total.add_runs(prepared.groups_of_runs[way.summed], weights)
    if way.rest is None:
        return total.result()
    if way.on is not None:
        added, left = weights_added(
            way.on, layer, queries, grouping, way.rest, prepared.absolute, stop
        )
        fold(layer, queries, left, [total], stop)
        return np.asarray(total.result() + added)
    if way.standing is None:
        fold(layer, queries, way.rest, [total], stop)
        return total.result(stop)
    assert layer.first_equal is not None
    pairs = Pairs.count(layer.first_equal, way.rest, grouping)
    distinct = DistinctSum(len(queries), grouping, pairs, prepared.absolute)
    fold(layer, queries, way.standing, [distinct], stop)
    totals = total.result(stop)
    totals += distinct.result()
    return totals
