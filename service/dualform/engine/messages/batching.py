"""Several requests, alike but for their queries, answered by asking the index once.

Their queries become one question, and its answer is cut into theirs. Each request gets what it
would have got alone: the same rows and scores to the last bit, sums and outputs within their bounds
(docs/exactness.md), its own refusal where its queries are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualform.engine.api.index import Index
from dualform.engine.api.opened import refusals
from dualform.engine.api.results import DualOutput, Sums, TopGroups, TopK
from dualform.engine.errors import EngineError
from dualform.engine.memory.shards import Stop
from dualform.engine.messages.answers import check_size, response_of, take
from dualform.engine.messages.limits import Limits
from dualform.questions import RowsQuestion, TopGroupsQuestion, TopKQuestion, question_of


def answer_together(
    index: Index, requests: Sequence[Any], limits: Limits, stop: Stop | None
) -> list[Any]:
    """Answer requests of one kind.

    Args:
        index: Which all of them ask.
        requests: TopKRequests, TopGroupsRequests, SumsRequests or DualOutputRequests, alike but for
            `queries` and `direction`.
        limits: For each of them, and for how much is worked on at a time.
        stop: Returns True once nobody waits for any answer.

    Returns:
        A response message or an EngineError for each.
    """
    results: list[Any] = [None] * len(requests)
    waiting: list[_Waiting] = []
    for place, request in enumerate(requests):
        try:
            # What is wrong with one request must not fail the others.
            with refusals():
                question: RowsQuestion = question_of(request)
            size = check_size(index, question, limits)
            index.check_queries(question)
            waiting.append(_Waiting(place, question, size))
        except EngineError as error:
            results[place] = error.detached()
    while waiting:
        count = _as_many_as_fit(waiting, limits)
        batch, waiting = waiting[:count], waiting[count:]
        sizes = [len(waiter.question.queries) for waiter in batch]
        first = batch[0].question
        try:
            together = _joined([waiter.question for waiter in batch])
            take(index, together, limits)
            found = index.ask(together, stop)
            answered = [
                response_of(first, _part(found, last - n, last), stop)
                for n, last in zip(sizes, np.cumsum(sizes), strict=True)
            ]
        except EngineError as error:
            answered = [error.detached()] * len(batch)
        for waiter, answer in zip(batch, answered, strict=True):
            results[waiter.place] = answer
    return results


@dataclass(frozen=True)
class _Waiting:
    """A question that waits to be asked: its place among the requests, and bytes per query."""

    place: int
    question: RowsQuestion
    bytes_per_query: int


def _joined(questions: Sequence[RowsQuestion]) -> RowsQuestion:
    """One question with the queries, and directions, of all."""
    first = questions[0]
    queries = np.concatenate([question.queries for question in questions])
    ranked = (TopKQuestion, TopGroupsQuestion)
    if not isinstance(first, ranked) or first.direction is None:
        return replace(first, queries=queries)
    directions = [
        question.direction
        for question in questions
        if isinstance(question, ranked) and question.direction is not None
    ]
    return replace(first, queries=queries, direction=np.concatenate(directions))


def _as_many_as_fit(waiting: Sequence[_Waiting], limits: Limits) -> int:
    """How many of these make one question within the limits; at least one."""
    queries = size = 0
    for count, waiter in enumerate(waiting):
        queries += len(waiter.question.queries)
        size += len(waiter.question.queries) * waiter.bytes_per_query
        if count and (queries > limits.max_queries or size > limits.max_message_bytes):
            return count
    return len(waiting)


def _part(found: Any, first: int, last: int) -> TopK | TopGroups | Sums | DualOutput:
    """The answer to the queries from first to last, of the answer to all."""
    span = slice(first, last)
    if isinstance(found, TopK):
        each = int(np.prod(found.rows.shape[1:]))
        counts = None if found.counts is None else found.counts[span]
        columns = {
            name: column.slice(first * each, (last - first) * each)
            for name, column in found.columns.items()
        }
        return replace(
            found, rows=found.rows[span], scores=found.scores[span], counts=counts, columns=columns
        )
    if isinstance(found, TopGroups):
        each = found.scores.shape[1]
        groups = found.groups.slice(first * each, (last - first) * each)
        return replace(found, groups=groups, scores=found.scores[span], counts=found.counts[span])
    if isinstance(found, Sums):
        return replace(found, values=found.values[span])
    assert isinstance(found, DualOutput)
    return replace(
        found,
        values=found.values[span],
        initial=found.initial[span],
        trained=None if found.trained is None else found.trained[span],
        residual=None if found.residual is None else found.residual[span],
    )
