"""Which strategy answers a question: the cheapest by a model of costs with measured constants.

Costs are seconds on the two cores that docs/benchmarks.md describes, scaled by how long this
process's answers took beside their estimates: the choice depends on ratios alone. What no constant
can say, how many rows a layer's sketches leave to be read, is remembered from earlier questions.
docs/decisions/0010-planner.md has the measurements.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from dualform.engine.candidates import Ranking
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.layer import Layer
from dualform.engine.residency import resident

# Seconds per byte of keys: read once, for each of the first eight queries, for each further one.
_SCAN = (0.086e-9, 0.014e-9, 0.004e-9)
_FLAT = (0.062e-9, 0.009e-9, 0.002e-9)
# Rows that sketches leave lie apart: each costs more than in a scan.
_SCATTERED = 1.6
# Seconds per row that sketches leave and query: its score is compared with what is known so far.
_PAIR = 2e-8
# Seconds per row for its sketch, and for each query.
_SKETCH = (1.3e-8, 1.2e-9)
# Seconds per row to return: kept as a candidate and scored exactly; by FAISS's heaps, per shard.
_CANDIDATE = 4e-6
_FLAT_HIT = 6e-7
# Seconds per row to be counted with the rows of the same key.
_COUNTED = 2e-8
# Outputs add float64 products of the values too.
_OUTPUT = 2.0
# Seconds per byte of a key sum or of a product with a weight.
_PRODUCT = 0.3e-9
_CALL = 1e-4
# Seconds per byte that the page cache does not hold; rows that lie apart bring whole pages.
_DISK = 1 / 0.3e9
_PAGE = 4096

PRUNED_QUERIES = 32
"""So many queries are pruned together: of more, too many rows matter to one or another, and their
bounds take memory."""

_EXPECTED_KEPT = 0.02
_FORGETS = 0.9


@dataclass(frozen=True)
class Plan:
    """How a question is answered, and why.

    Attributes:
        strategy: "scan", "flat", "certified", "key_sums", "distinct_keys" or "rebuilt".
        reason: One sentence.
        costs: Estimated seconds by strategy, of those that apply.
    """

    strategy: str
    reason: str
    costs: Mapping[str, float]


def scan_seconds(size: float, queries: int) -> float:
    """To multiply `size` bytes of keys with so many queries."""
    return _seconds(_SCAN, size, queries)


def flat_seconds(size: float, queries: int) -> float:
    """For FAISS to search `size` bytes of keys."""
    return _seconds(_FLAT, size, queries)


def pruning_pays(kept: int, rows: int, width: int, queries: int, faiss: bool) -> bool:
    """Whether reading what sketches left of a shard is cheaper than searching all of it.

    Args:
        kept, rows: How many rows are left, and how many take part.
        width: Bytes of a key.
        queries: How many.
        faiss: Whether FAISS would search the shard.
    """
    whole = flat_seconds if faiss else scan_seconds
    return left_seconds(kept, width, queries) < whole(rows * width, queries)


def left_seconds(rows: float, width: int, queries: int) -> float:
    """To score so many rows that sketches left, of so many bytes each."""
    return _SCATTERED * scan_seconds(rows * width, queries) + _PAIR * rows * queries


class Planner:
    """Plans for the questions to one index; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[object, ...], float] = {}
        self._pace = 1.0

    def top_k(
        self,
        layer: Layer,
        ranking: Ranking,
        queries: int,
        rows: int,
        refused: Mapping[str, str | None],
        strategy: str,
    ) -> Plan:
        """Plan a top-k.

        Args:
            layer: Whose memory.
            ranking: What is ranked.
            queries: How many.
            rows: How many rows take part.
            refused: Why each strategy does not apply; None where it does.
            strategy: One of them, or "auto".

        Raises:
            InvalidArgumentError: The strategy is unknown, or does not apply.
        """
        check_strategy(strategy, refused)
        size, hits = rows * 4 * layer.d_in, queries * ranking.k * ranking.groups
        cold = (1 - resident(layer)) * size * _DISK
        kept = self._expected(_key(layer, ranking, queries))
        blocks = -(-queries // PRUNED_QUERIES)
        costs = {
            "scan": scan_seconds(size, queries) + cold + _CANDIDATE * hits,
            "flat": flat_seconds(size, queries) + cold + _FLAT_HIT * hits * len(layer.shards),
            "certified": rows * (_SKETCH[0] * blocks + _SKETCH[1] * queries)
            + blocks * left_seconds(kept * rows, 4 * layer.d_in, queries // blocks)
            + min(1.0, kept * max(1.0, _PAGE / (4 * layer.d_in))) * cold
            + _CANDIDATE * hits,
        }
        costs = {
            name: (seconds + _CALL) * self._pace
            for name, seconds in costs.items()
            if refused[name] is None
        }
        reason = (
            f"sketches are expected to leave {100 * kept:.2g} % of the rows to be read"
            if refused["certified"] is None
            else f"no certified pruning: {refused['certified']}"
        )
        return chosen(strategy, costs, reason)

    def joins(self, plan: Plan, queries: int, rows: int) -> bool:
        """Whether a top-k is cheaper from the tiles of a scan that another answer needs anyway than
        by sketches.

        Args:
            plan: The top-k's, by itself.
            queries, rows: As for `top_k`.
        """
        return _PAIR * rows * queries * self._pace <= plan.costs.get("certified", math.inf)

    def learn(
        self, layer: Layer, ranking: Ranking, queries: int, plan: Plan, kept: float | None,
        seconds: float,
    ) -> None:  # fmt: skip
        """Take in how a top-k went.

        Args:
            layer, ranking, queries: As for `top_k`.
            plan: What `top_k` said.
            kept: Share of the rows that sketches left; None where they were not asked.
            seconds: How long the answer took.
        """
        key = _key(layer, ranking, queries)
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


def key_sums_seconds(layer: Layer, queries: int, runs: int) -> float:
    """For sums from so many runs' key sums."""
    return _CALL + _PRODUCT * runs * 8 * layer.d_in * queries


def sums_seconds(layer: Layer, queries: int, rows: int) -> float:
    """For sums by a scan of so many rows."""
    size = rows * 4 * layer.d_in
    return _CALL + scan_seconds(size, queries) + (1 - resident(layer)) * size * _DISK


def distinct_keys_seconds(layer: Layer, queries: int, rows: int, keys: int) -> float:
    """For sums over so many rows, which have so many distinct keys."""
    key = 4 * layer.d_in
    cold = (1 - resident(layer)) * keys * max(key, _PAGE) * _DISK
    return _CALL + _COUNTED * rows + _SCATTERED * scan_seconds(keys * key, queries) + cold


def output_costs(layer: Layer, queries: int, rows: int) -> dict[str, float]:
    """Estimated seconds for outputs: from the rebuilt weight, or by a scan of so many rows."""
    size = rows * 4 * (layer.d_in + layer.d_out)
    cold = (1 - resident(layer)) * size * _DISK
    return {
        "rebuilt": _CALL + _PRODUCT * 8 * layer.d_in * layer.d_out * queries,
        "scan": _CALL + _OUTPUT * scan_seconds(size, queries) + cold,
    }


def chosen(strategy: str, costs: Mapping[str, float], reason: str) -> Plan:
    """The plan by a strategy that was asked for, or by the cheapest."""
    if strategy != "auto":
        return Plan(strategy, "it was asked for", costs)
    best = min(costs, key=lambda name: costs[name])
    others = "the only one that applies" if len(costs) == 1 else "the cheapest by estimate"
    return Plan(best, f"{others}; {reason}", costs)


def check_strategy(strategy: str, refused: Mapping[str, str | None]) -> None:
    """Refuse a strategy that is unknown or does not apply.

    Args:
        strategy: "auto", or one of `refused`.
        refused: Why each does not apply; None where it does.

    Raises:
        InvalidArgumentError: With the reason.
    """
    if strategy == "auto":
        return
    if strategy not in refused:
        raise InvalidArgumentError(
            f"strategy is {strategy!r}; for this question it is one of auto, {', '.join(refused)}",
            field="strategy",
        )
    reason = refused[strategy]
    if reason is not None:
        raise InvalidArgumentError(
            f"strategy {strategy!r} does not apply: {reason}; leave it out, and what does is "
            "chosen",
            field="strategy",
        )


def _key(layer: Layer, ranking: Ranking, queries: int) -> tuple[object, ...]:
    """Questions that sketches serve alike: by order, and powers of two of queries and hits."""
    hits = ranking.k * ranking.groups
    together = min(queries, PRUNED_QUERIES)
    return layer.name, ranking.order, together.bit_length(), hits.bit_length()


def _seconds(pace: tuple[float, float, float], size: float, queries: int) -> float:
    once, few, more = pace
    return size * (once + few * min(queries, 8) + more * max(queries - 8, 0))
