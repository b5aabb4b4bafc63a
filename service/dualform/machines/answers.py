"""How each kind of question is answered by several machines; a new kind is a line of `ANSWERS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.api.opened import asked_contribution, last_step, query_tensor
from dualform.engine.api.results import DualOutput, SelfInfluence, Sums, TopGroups, TopK
from dualform.engine.api.totals import check_groups, influenced_groups, output_of
from dualform.engine.groups.best import BestGroups, best_groups
from dualform.engine.groups.ranked import block_queries
from dualform.engine.groups.self_influence import self_influence_of_rows
from dualform.engine.topk.followed_along import check_cost
from dualform.engine.totals import outputs
from dualform.engine.totals.coefficients import step_coefficients
from dualform.engine.totals.followed import Way
from dualform.engine.totals.outputs import PreparedOutput
from dualform.engine.totals.stored_parts import made_of
from dualform.machines import asked, merging
from dualform.machines.asking import Counts, Spread
from dualform.machines.following import follow_layer
from dualform.machines.machine import Each
from dualform.machines.unions import union
from dualform.questions import (
    MAX_RESIDUAL,
    OutputQuestion,
    Question,
    SelfInfluenceQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.store.grouping import Grouping


def top_k(spread: Spread, question: TopKQuestion) -> TopK:
    """The best rows: each machine's own best, merged by exact score and row id."""
    query_tensor(spread.layer, question.queries)
    units = _units(spread, question)
    parts, missing = spread.ask_some(question.partial, asked.rows_or_sums, question, units)
    coverage = spread.coverage([part.coverage for part in parts], missing)
    found = merging.top_k(question, parts, coverage)
    if question.distinct is None:
        return found

    def counts(values: pa.Array, groups: pa.Array | None) -> list[np.ndarray]:
        return spread.ask_some(question.partial, asked.sharing, question, values, groups)[0]

    return merging.with_counts(question, found, counts)


def sums(spread: Spread, question: SumsQuestion) -> Sums:
    """Total weights: each machine's, added up."""
    query_tensor(spread.layer, question.queries)
    parts, missing = spread.ask_some(question.partial, asked.rows_or_sums, question)
    coverage = spread.coverage([part.coverage for part in parts], missing)
    return merging.sums(question, parts, coverage)


def top_groups(spread: Spread, question: TopGroupsQuestion) -> TopGroups:
    """The best groups: every group's sums are added up here, for some queries at a time, since a
    group's rows are on all machines."""
    layer = spread.layer
    query_tensor(layer, question.queries)
    known = layer.space.grouping(question.by, "by").values
    check_groups(question.by, known)
    units = _units(spread, question)
    size = block_queries(len(known) * (1 + len(spread.sizes)))
    blocks, found = [], None
    for first in range(0, len(question.queries), size):
        block = _block(question, slice(first, first + size))
        parts, missing = spread.ask_some(question.partial, asked.sums_of_groups, block, units)
        coverage = spread.coverage([part.coverage for part in parts], missing)
        groups, numbers = union([part.groups for part in parts])
        found = merging.add_up(groups, numbers, parts, coverage)
        best = best_groups(found.values, found.counts, question.k, question.order)
        blocks.append((best, found))
    assert found is not None
    best = BestGroups.join([best for best, _ in blocks])
    codes = best.codes.reshape(-1)
    return TopGroups(
        groups=found.groups.take(pa.array(codes, mask=codes < 0)),
        scores=best.scores,
        counts=np.append(found.counts, 0)[best.codes],
        coverage=found.coverage,
        plan=found.plan,
    )


def self_influence(spread: Spread, question: SelfInfluenceQuestion) -> SelfInfluence:
    """What groups' rows did to their own part of the loss: each machine's, added up; of a step
    that several have rows of, a group's rows are put together here."""
    layer, opened = spread.layer, spread.opened
    first, last, total = influenced_groups(opened, layer, question)
    groups = layer.space.grouping(question.by, "by").values[first:last]
    shared, before = set(), -1
    for of_first, of_last in spread.ask(asked.steps_of, layer.name):
        shared |= {of_first} & {before}
        before = of_last
    parts = spread.ask(asked.influence, question, groups, sorted(shared))
    found = self_influence_of_rows(
        torch.from_numpy(np.concatenate([part.keys for part in parts])),
        torch.from_numpy(np.concatenate([part.values for part in parts])),
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.steps for part in parts]),
        step_coefficients(opened.ledger, layer.manifest),
        len(groups),
        spread.stop,
    )
    return SelfInfluence(
        groups=groups,
        scores=found + sum(part.scores for part in parts),
        counts=np.asarray(sum(part.counts for part in parts)),
        total=total,
        coverage=spread.coverage([part.coverage for part in parts]),
    )


def dual_output(spread: Spread, question: OutputQuestion) -> DualOutput:
    """The output: what is stored of all rows, here; what has to be added up, by the machines."""
    layer, opened, where = spread.layer, spread.opened, question.where
    queries = query_tensor(layer, question.queries)
    end = last_step(layer, opened.ledger, question.at_step)
    groups = None
    if question.group_by is not None:
        groups = layer.space.grouping(question.group_by).values
    rows = Counts(spread, where, None if question.at_step is None else end)

    def elsewhere(start: int, grouped: bool) -> np.ndarray:
        parts = spread.ask(asked.added, question, start, grouped)
        if groups is None or not grouped:
            return np.asarray(sum(part.values for part in parts))
        return _by_groups(groups, parts)

    def follow(way: Way, start: int, end: int, grouped: bool) -> Way:
        return follow_layer(spread, question, way, start, end, groups if grouped else None)

    prepared = PreparedOutput(
        queries=queries,
        at_step=question.at_step,
        end=end,
        grouping=None if groups is None else Grouping(groups, np.zeros(0, np.int32)),
        selected=layer.space.everything,
        filtered=where is not None,
        parts="what all rows add up to is stored",
        strategy=question.strategy,
        max_residual=MAX_RESIDUAL if question.max_residual is None else question.max_residual,
        explained=opened.ledger.family.explains,
        elsewhere=elsewhere,
        followed_elsewhere=follow,
        about=_about(question),
    )
    if question.strategy == "parts" or outputs.why_not_rebuilt(layer.manifest, prepared):
        parts = made_of(layer.manifest, question.at_step, question.group_by, rows.of)
        prepared = replace(prepared, parts=parts)
    coverage = rows.coverage()
    plan = outputs.plan(layer, prepared, coverage.rows, "each machine asks its own")
    found = opened.outputs.answer(layer, prepared, spread.stop)
    counts = None if question.group_by is None else rows.of(question.group_by)[0]
    return output_of(prepared, found, counts, coverage, plan)


def _about(question: OutputQuestion) -> bytes:
    """Equal for outputs of the same rows in the same groups; the filter as it is spelt."""
    where = b"" if question.where is None else question.where.SerializeToString(deterministic=True)
    return repr((where, question.at_step, question.group_by)).encode()


def _by_groups(groups: pa.Array, parts: Sequence[asked.Added]) -> np.ndarray:
    """What the parts' rows add, float64 [n, groups, d_out], by the groups of all."""
    joined, (places, *numbers) = union([groups, *(part.groups for part in parts)])
    n, _, d_out = parts[0].values.shape
    values = np.zeros((n, len(joined), d_out))
    for place, part in zip(numbers, parts, strict=True):
        values[:, place] += part.values
    return values[:, places]


def _block(question: TopGroupsQuestion, queries: slice) -> TopGroupsQuestion:
    direction = question.direction
    return replace(
        question,
        queries=question.queries[queries],
        direction=None if direction is None else direction[queries],
    )


def _units(spread: Spread, question: TopKQuestion | TopGroupsQuestion) -> Each | None:
    """What the machines have to know of the output units that contributions are asked to; None
    where rows have coefficients."""
    if question.rank_by != "contribution":
        return None
    contribution, end = asked_contribution(spread.opened, spread.layer, question)
    if contribution.coefficients is not None:
        return None
    directions = contribution.directions
    if directions is None:
        return spread.units.find(spread, [contribution.unit], end)
    rows = Counts(spread, question.where, end).coverage().rows
    check_cost(spread.layer, rows, directions)
    units = torch.nonzero((directions != 0).any(dim=0))[:, 0].tolist()
    return spread.units.find(spread, units, end)


ANSWERS: dict[type[Question], Callable[[Spread, Any], Any]] = {
    TopKQuestion: top_k,
    SumsQuestion: sums,
    TopGroupsQuestion: top_groups,
    OutputQuestion: dual_output,
}
"""How each kind of question about rows is answered."""
