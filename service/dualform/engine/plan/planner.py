"""Which strategy answers a question: the cheapest by the model of `plan.costs`.

Costs are scaled by how long this process's answers took beside their estimates: the choice depends
on ratios alone. What no constant can say, how many rows a layer's sketches leave to be read, is
remembered from earlier questions. docs/decisions/0010-planner.md has the measurements.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.residency import resident
from dualform.engine.plan.costs import (
    PRUNED_QUERIES,
    ByKeys,
    top_k_by_keys_seconds,
    top_k_seconds,
)
from dualform.engine.plan.plan import Plan, check_strategy, chosen

_EXPECTED_KEPT = 0.02
_FORGETS = 0.9


class Planner:
    """Plans for the questions to one index; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[object, ...], float] = {}
        self._pace = 1.0

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

        Raises:
            InvalidArgumentError: The strategy is unknown, or does not apply.
        """
        check_strategy(strategy, refused)
        kept = self._expected(_key(layer, order, hits, queries))
        there = resident(layer)
        costs = top_k_seconds(layer, hits, queries, rows, kept, there)
        if by_keys is not None:
            of_keys = None
            if refused["certified"] is None:
                of_keys = self._expected(_key(layer, order, by_keys.hits, queries, of_keys=True))
            costs["distinct_keys"] = top_k_by_keys_seconds(
                layer, hits, queries, by_keys, of_keys, there
            )
        costs = {
            name: seconds * self._pace for name, seconds in costs.items() if refused[name] is None
        }
        reason = (
            f"sketches are expected to leave {100 * kept:.2g} % of the rows to be read"
            if refused["certified"] is None
            else f"no certified pruning: {refused['certified']}"
        )
        return chosen(strategy, costs, reason)

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
            ratio = seconds / plan.costs[plan.strategy]
            self._pace *= min(2.0, max(0.5, ratio)) ** 0.2

    def _expected(self, key: tuple[object, ...]) -> float:
        with self._lock:
            return self._kept.get(key, _EXPECTED_KEPT)


def _key(
    layer: Layer, order: str, hits: int, queries: int, *, of_keys: bool = False
) -> tuple[object, ...]:
    """Questions that sketches serve alike: by order, and powers of two of queries and hits."""
    together = min(queries, PRUNED_QUERIES)
    return layer.name, order, together.bit_length(), hits.bit_length(), of_keys
