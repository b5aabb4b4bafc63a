"""The answer to a large batch from the answers to its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from dualform.client._results import (
    DualOutputResult,
    Explanation,
    SumsResult,
    TopGroupsResult,
    TopKResult,
)
from dualform.client.errors import FailedPreconditionError, bad_answer

Result = TypeVar("Result", TopKResult, TopGroupsResult, SumsResult, DualOutputResult)

_BY_QUERY: dict[type, tuple[str, ...]] = {
    TopKResult: ("rows", "scores", "counts"),
    TopGroupsResult: ("groups", "scores", "counts"),
    SumsResult: ("values",),
    DualOutputResult: ("values", "initial", "trained", "residual"),
}
"""What has a row for each query, or is None."""


def join(parts: Sequence[Result]) -> Result:
    """The answer to a batch from the answers to its parts, in order.

    Raises:
        FailedPreconditionError: The parts come from different memories.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(_memory(part) != _memory(first) for part in parts):
        raise FailedPreconditionError(
            "the index changed while this batch was answered in parts; ask again",
            reason="INDEX_CHANGED",
        )
    joined: dict[str, Any] = {}
    for name in _BY_QUERY[type(first)]:
        arrays = [getattr(part, name) for part in parts]
        present = [array for array in arrays if array is not None]
        if len({array.shape[1:] for array in present}) > 1 or len(present) not in (0, len(parts)):
            raise bad_answer(f"its parts have {name} of different sizes")
        if present:
            joined[name] = np.concatenate(present)
    if isinstance(first, TopKResult):
        joined["columns"] = {
            name: np.concatenate([part[name] for part in parts])  # type: ignore[index]
            for name in first.columns
        }
    return dataclasses.replace(first, **joined)


def join_explanations(parts: Sequence[Explanation]) -> Explanation:
    """As `join`, of each answer."""
    first = parts[0]
    return Explanation(
        None if first.top_k is None else join([part.top_k for part in parts if part.top_k]),
        None if first.sums is None else join([part.sums for part in parts if part.sums]),
        None if first.output is None else join([part.output for part in parts if part.output]),
        first.index_version,
    )


def _memory(
    part: TopKResult | TopGroupsResult | SumsResult | DualOutputResult,
) -> tuple[object, ...]:
    if isinstance(part, TopGroupsResult):  # each query has groups of its own
        return repr(part.coverage), part.index_version
    # Groups as text: a NaN group is not equal to itself.
    columns = sorted(part.columns) if isinstance(part, TopKResult) else None
    trained = getattr(part, "trained", None) is None
    return repr(part.groups), repr(part.coverage), columns, trained, part.index_version
