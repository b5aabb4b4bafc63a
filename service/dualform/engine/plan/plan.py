"""A plan: the strategy that answers a question, with its reason and what the others would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualform.engine.errors import InvalidArgumentError


@dataclass(frozen=True)
class Plan:
    """How a question is answered, and why.

    Attributes:
        strategy: "scan", "flat", "certified", "key_sums", "distinct_keys", "device", "rebuilt" or
            "parts".
        reason: One sentence.
        costs: Estimated seconds by strategy, of those that apply.
    """

    strategy: str
    reason: str
    costs: Mapping[str, float]

    def without(self, strategy: str) -> float:
        """The least that another strategy costs; 0 where none was estimated."""
        return min((cost for name, cost in self.costs.items() if name != strategy), default=0.0)


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
