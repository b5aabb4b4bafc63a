"""Which strategy answers a question: the cheapest by the model of `plan.costs`.

Costs are scaled by how long this process's answers took beside their estimates: the choice depends
on ratios alone. What no constant can say, how many rows a layer's sketches leave to be read, is
remembered from earlier questions. docs/decisions/0010-planner.md has the measurements.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dualform.engine.memory.layer import Layer, resident
from dualform.engine.plan.costs import (
    PRUNED_QUERIES,
    ByKeys,
    device_top_k_seconds,
    top_k_by_keys_seconds,
    top_k_seconds,
)
from dualform.engine.plan.offer import Offer
from dualform.engine.plan.plan import Plan, check_strategy, chosen

_EXPECTED_KEPT = 0.02
_FORGETS = 0.9


class Planner:
    """Plans for the questions to one index; thread-safe.

    Args:
        pace: How many times as long as the model says the CPU takes, where that was measured.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[object, ...], float] = {}
        self._pace = pace
        self._of_devices = 1.0

    def top_k(
        self,
        layer: Layer,
        order: str,
        hits: int,
        queries: int,
        rows: int,
        refused: Mapping[str, str | None],
        strategy: str,
        by_keys: ByKeys | None = None,
        offer: Offer | None = None,
    ) -> Plan:
        """Plan a top-k.

        Args:
            layer: Whose memory.
            order: "largest", "smallest" or "absolute".
            hits: Rows to return per query.
            queries: How many.
            rows: How many rows take part.
            refused: Why each strategy does not apply; None where it does.
            strategy: One of them, or "auto".
            by_keys: What a search by distinct keys comes to; None where it does not apply.
            offer: What devices would do; None where they do not apply.

        Raises:
            InvalidArgumentError: The strategy is unknown, or does not apply.
        """
        check_strategy(strategy, refused)
        key = _key(layer, order, hits, queries)
        of_key = key if by_keys is None else _key(layer, order, by_keys.hits, queries, of_keys=True)
        kept = self._expected(key, of_key)
        there = resident(layer)
        costs = top_k_seconds(layer, hits, queries, rows, kept, there)
        if by_keys is not None:
            of_keys = None
            if refused["certified"] is None:
                of_keys = self._expected(of_key, key)
            costs["distinct_keys"] = top_k_by_keys_seconds(
                layer, hits, queries, by_keys, of_keys, there
            )
        costs = {
            name: seconds * self._pace for name, seconds in costs.items() if refused[name] is None
        }
        if offer is not None and refused["device"] is None:
            rest = self.cpu_seconds(layer, hits, queries, offer.left, kept, refused)
            by_devices = device_top_k_seconds(offer, hits, queries, min(rest.values()))
            costs["device"] = self._of_devices * by_devices
        reason = (
            f"sketches are expected to leave {100 * kept:.2g} % of the rows to be read"
            if refused["certified"] is None
            else f"no certified pruning: {refused['certified']}"
        )
        return chosen(strategy, costs, reason)

    def cpu_seconds(
        self,
        layer: Layer,
        hits: int,
        queries: int,
        rows: int,
        kept: float,
        refused: Mapping[str, str | None],
    ) -> dict[str, float]:
        """What the CPU's own ways take for so many rows, of those that apply."""
        costs = top_k_seconds(layer, hits, queries, rows, kept, resident(layer))
        return {name: cost * self._pace for name, cost in costs.items() if refused[name] is None}

    def rest(
        self, layer: Layer, order: str, hits: int, queries: int, offer: Offer,
        refused: Mapping[str, str | None],
    ) -> tuple[str, bool]:  # fmt: skip
        """The CPU's way for what lies on no device, and whether to bring that to one instead."""
        kept = self._expected(_key(layer, order, hits, queries))
        costs = self.cpu_seconds(layer, hits, queries, offer.left, kept, refused)
        best = min(costs, key=lambda name: costs[name])
        return best, offer.streams(costs[best])

    def learn(
        self, layer: Layer, order: str, hits: int, queries: int, plan: Plan, kept: float | None,
        seconds: float,
    ) -> None:  # fmt: skip
        """Take in how a top-k went.

        Args:
            layer, order, hits, queries: As for `top_k`; of distinct keys, the hits that these are.
            plan: What `top_k` said.
            kept: Share of the rows that sketches left; None where they were not asked.
            seconds: How long the answer took.
        """
        by_keys = plan.strategy == "distinct_keys"
        key = _key(layer, order, hits, queries, of_keys=by_keys)
        with self._lock:
            if kept is not None:
                self._kept[key] = (self._kept.get(key, kept) + kept) / 2
            elif key in self._kept and "certified" in plan.costs:
                # Another query may fare better: what is remembered against pruning fades.
                self._kept[key] *= _FORGETS
            correction = min(2.0, max(0.5, seconds / plan.costs[plan.strategy])) ** 0.2
            if plan.strategy == "device":
                self._of_devices *= correction
            else:
                self._pace *= correction
                # A device that was busy may be faster next time.
                self._of_devices = 1 + (self._of_devices - 1) * _FORGETS

    def _expected(self, *keys: tuple[object, ...]) -> float:
        """What is remembered under the first of these that anything is."""
        with self._lock:
            known = (self._kept[key] for key in keys if key in self._kept)
            return next(known, _EXPECTED_KEPT)


def _key(
    layer: Layer, order: str, hits: int, queries: int, *, of_keys: bool = False
) -> tuple[object, ...]:
    """Questions that sketches serve alike: by order, and powers of two of queries and hits."""
    together = min(queries, PRUNED_QUERIES)
    return layer.name, order, together.bit_length(), hits.bit_length(), of_keys
