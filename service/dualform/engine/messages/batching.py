"""Requests that differ in nothing but their queries, answered by one question of all of them.

Each gets what it would have got alone: the same rows and scores to the last bit, sums and outputs
within their bounds (docs/exactness.md), its own refusal where its queries are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dualform.engine.api.index import Index
from dualform.engine.api.results import DualOutput, Sums, TopK
from dualform.engine.errors import EngineError
from dualform.engine.memory.shards import Stop
from dualform.engine.messages.limits import Limits
from dualform.engine.messages.questions import QUESTIONS, Checked


def answer_together(
    index: Index, requests: Sequence[Any], limits: Limits, stop: Stop | None
) -> list[Any]:
    """Answer requests of one kind.

    Args:
        index: Which all of them ask.
        requests: TopKRequests, SumsRequests or DualOutputRequests, alike but for `queries`.
        limits: For each of them, and for how much is worked on at a time.
        stop: Returns True once nobody waits for any answer.

    Returns:
        A response message or an EngineError for each.
    """
    question = QUESTIONS[type(requests[0])]
    results: list[Any] = [None] * len(requests)
    waiting: list[tuple[int, Checked]] = []
    for place, request in enumerate(requests):
        try:
            # What is wrong with one request must not fail the others.
            checked = question.check(index, request, limits)
            index.check_queries(request.layer, checked.queries)
            waiting.append((place, checked))
        except EngineError as error:
            results[place] = error.detached()
    while waiting:
        count = _as_many_as_fit([checked for _, checked in waiting], limits)
        batch, waiting = waiting[:count], waiting[count:]
        sizes = [len(checked.queries) for _, checked in batch]
        whole = replace(
            batch[0][1], queries=np.concatenate([checked.queries for _, checked in batch])
        )
        try:
            found = question.ask(index, requests[0], whole, stop)
            parts = [
                _part(found, last - n, last)
                for n, last in zip(sizes, np.cumsum(sizes), strict=True)
            ]
            answered = [question.respond(requests[0], part) for part in parts]
        except EngineError as error:
            answered = [error.detached()] * len(batch)
        for (place, _), answer in zip(batch, answered, strict=True):
            results[place] = answer
    return results


def _as_many_as_fit(waiting: Sequence[Checked], limits: Limits) -> int:
    """How many of these make one question within the limits; at least one."""
    queries = size = 0
    for count, checked in enumerate(waiting):
        queries += len(checked.queries)
        size += len(checked.queries) * checked.bytes_per_query
        if count and (queries > limits.max_queries or size > limits.max_message_bytes):
            return count
    return len(waiting)


def _part(found: Any, first: int, last: int) -> TopK | Sums | DualOutput:
    """The answer to the queries from first to last, of the answer to all."""
    own = slice(first, last)
    if isinstance(found, TopK):
        each = int(np.prod(found.rows.shape[1:]))
        counts = None if found.counts is None else found.counts[own]
        columns = {
            name: column.slice(first * each, (last - first) * each)
            for name, column in found.columns.items()
        }
        return replace(
            found, rows=found.rows[own], scores=found.scores[own], counts=counts, columns=columns
        )
    if isinstance(found, Sums):
        return replace(found, values=found.values[own])
    assert isinstance(found, DualOutput)
    return replace(
        found,
        values=found.values[own],
        initial=found.initial[own],
        trained=None if found.trained is None else found.trained[own],
        residual=None if found.residual is None else found.residual[own],
    )
