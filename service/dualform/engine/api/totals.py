"""The answers to SumsQuestion, TopGroupsQuestion, SelfInfluenceQuestion and OutputQuestion: groups
and filters looked up, totals computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dualform.engine.api.opened import Opened, asked_contribution, last_step, query_tensor
from dualform.engine.api.results import Coverage, DualOutput, SelfInfluence, Sums, TopGroups
from dualform.engine.errors import FailedPreconditionError, InvalidArgumentError
from dualform.engine.groups.best import BestGroups
from dualform.engine.groups.ranked import PreparedRanking, group_totals, rank_groups
from dualform.engine.groups.self_influence import self_influence as influence_of
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.plan import Plan
from dualform.engine.rows.bins import binned
from dualform.engine.totals import outputs
from dualform.engine.totals import sums as totals
from dualform.engine.totals.coefficients import step_coefficients
from dualform.engine.totals.on_devices import OnDevices, for_outputs
from dualform.engine.totals.outputs import PreparedOutput
from dualform.engine.totals.stored_parts import whole_groups
from dualform.engine.totals.sums import PreparedSums
from dualform.questions import (
    MAX_RESIDUAL,
    OutputQuestion,
    SelfInfluenceQuestion,
    SumsQuestion,
    TopGroupsQuestion,
)


@dataclass(frozen=True)
class CountedSums:
    """Sums to compute, with the rows per group.

    Attributes:
        prepared: The sums.
        counts: int64 [groups].
    """

    prepared: PreparedSums
    counts: np.ndarray


def sums(opened: Opened, layer: Layer, question: SumsQuestion, stop: Stop | None) -> Sums:
    """Total attention weight per group.

    A key that is not finite makes its group's total NaN: nothing is left out silently.
    """
    counted = prepare_sums(layer, question, stop)
    way = totals.plan(layer, counted.prepared, question.strategy, opened.devices)
    found = totals.total_weights(layer, counted.prepared, way, stop)
    return sums_result(layer, counted, found, way.plan)


def prepare_sums(layer: Layer, question: SumsQuestion, stop: Stop | None) -> CountedSums:
    """A question for sums, its column, edges and filter looked up."""
    queries, column = query_tensor(layer, question.queries), question.group_by
    grouping = layer.space.grouping(column)
    selected = layer.space.select(question.where, stop=stop)
    if question.bins is None:
        runs, counts = layer.space.groups_of_runs(column), layer.space.count(column, selected)
    else:
        grouping = binned(column, layer.space.columns[column], question.bins)
        selected = selected & (grouping.codes >= 0)
        runs = layer.space.groups_of_runs_by(grouping)
        groups = len(question.bins) - 1
        counts = np.bincount(grouping.codes[selected], minlength=groups).astype(np.int64)
    prepared = PreparedSums(queries, grouping, runs, question.absolute, selected)
    return CountedSums(prepared, counts)


def sums_result(layer: Layer, counted: CountedSums, found: np.ndarray, plan: Plan) -> Sums:
    """The answer, of totals float64 [n, groups]."""
    prepared = counted.prepared
    coverage = Coverage.of(layer, prepared.selected)
    return Sums(prepared.grouping.values, found, counted.counts, coverage, plan)


def top_groups(
    opened: Opened, layer: Layer, question: TopGroupsQuestion, stop: Stop | None
) -> TopGroups:
    """The groups of a column whose rows' weights, or contributions, add up to most.

    A row that is not finite makes its group's total so, and the group is never ranked.
    """
    check_groups(question.by, layer.space.grouping(question.by, "by").values)
    ranking = _ranking(opened, layer, question, stop)
    found, plan = rank_groups(layer, ranking, question.strategy, opened.devices, stop)
    return _groups_result(layer, ranking, found, plan)


def check_groups(by: str, values: pa.Array) -> None:
    """Refuse a column of these values, [groups], where no row has any."""
    if len(values) and values.null_count == len(values):
        raise InvalidArgumentError(
            f"no row has a value in column {by!r}, so there are no groups to rank; name "
            "another, or record it with annotate()",
            field="by",
            reason="EMPTY_COLUMN",
        )


def all_groups(
    opened: Opened, layer: Layer, question: TopGroupsQuestion, stop: Stop | None
) -> Sums:
    """What the best groups are chosen from: every group's sums."""
    ranking = _ranking(opened, layer, question, stop)
    found, plan = group_totals(layer, ranking, question.strategy, opened.devices, stop)
    coverage = Coverage.of(layer, ranking.sums.selected)
    return Sums(ranking.sums.grouping.values, found, ranking.counts, coverage, plan)


def _ranking(
    opened: Opened, layer: Layer, question: TopGroupsQuestion, stop: Stop | None
) -> PreparedRanking:
    """A question for the best groups, its columns and filter looked up."""
    queries = query_tensor(layer, question.queries)
    grouping = layer.space.grouping(question.by, "by")
    contribution = end = find = None
    if question.rank_by == "contribution":
        contribution, end = asked_contribution(opened, layer, question)
        find = opened.metric_finder(layer, end, stop)
    selected = layer.space.select(question.where, end, stop)
    counts = layer.space.count(question.by, selected)
    added = PreparedSums(
        queries, grouping, layer.space.groups_of_runs(question.by), False, selected
    )
    cosine = question.rank_by == "cosine"
    return PreparedRanking(added, counts, question.k, question.order, contribution, cosine, find)


def _groups_result(
    layer: Layer, ranking: PreparedRanking, found: BestGroups, plan: Plan
) -> TopGroups:
    """The answer, of the groups' numbers."""
    codes, values = found.codes.reshape(-1), ranking.sums.grouping.values
    counts = np.append(ranking.counts, 0)[found.codes]  # -1 is the last
    return TopGroups(
        groups=values.take(pa.array(codes, mask=codes < 0)),
        scores=found.scores,
        counts=counts,
        coverage=Coverage.of(layer, ranking.sums.selected),
        plan=plan,
    )


def self_influence(
    opened: Opened, layer: Layer, question: SelfInfluenceQuestion, stop: Stop | None
) -> SelfInfluence:
    """What the rows of some groups did to their own part of the loss.

    Raises:
        FailedPreconditionError: Each step has its own metric, or the layer has no values.
    """
    first, last, total = influenced_groups(opened, layer, question)
    grouping = layer.space.grouping(question.by, "by")
    selected = layer.space.select(question.where, stop=stop)
    inside = selected & (grouping.codes >= first) & (grouping.codes < last)
    codes = grouping.codes - first
    coefficients = step_coefficients(opened.ledger, layer.manifest)
    return SelfInfluence(
        groups=grouping.values[first:last],
        scores=influence_of(layer, codes, inside, coefficients, last - first, stop),
        counts=np.bincount(codes[inside], minlength=last - first),
        total=total,
        coverage=Coverage.of(layer, selected),
    )


def influenced_groups(
    opened: Opened, layer: Layer, question: SelfInfluenceQuestion
) -> tuple[int, int, int]:
    """Which groups a question is about, half-open, and how many there are; errors as above."""
    grouping = layer.space.grouping(question.by, "by")
    check_groups(question.by, grouping.values)
    total = len(grouping.values) - grouping.values.null_count
    last_step(layer, opened.ledger, None)
    if not opened.ledger.family.scalar:
        raise FailedPreconditionError(
            f"under {opened.ledger.family.name} each step has its own metric, and self-influence "
            "in the steps is known for SGD's family alone; ask scores(model, inputs, "
            "target='loss', labels=…) about the examples, whose diagonal is theirs in the end",
            field="layer",
            reason="NO_COEFFICIENTS",
        )
    last = total if question.count is None else min(total, question.first + question.count)
    return min(question.first, last), last, total


def dual_output(
    opened: Opened, layer: Layer, question: OutputQuestion, stop: Stop | None
) -> DualOutput:
    """The layer's output as initial part plus the sum of the rows' contributions.

    Eq. dual_linear of Irie et al. (2022), with the coefficients that the optimizer's settings
    imply: a row of step t adds (c_t x_t.x + c'_t) e_t, primes for the bias. Of all rows together,
    what those before the last stored state j <= at_step add comes in one product with it, and for
    the trained layer what all of them add in one product with the weight that they were added up
    to (docs/decisions, 7 and 8); whole groups of a column whose parts are stored come in one
    product each; everything else is a scan.
    """
    prepared = prepare_output(opened, layer, question, stop)
    plan, on = plan_output(opened, layer, prepared)
    found = opened.outputs.answer(layer, prepared, stop, on=on)
    return output_result(layer, question, prepared, found, plan)


def plan_output(
    opened: Opened, layer: Layer, prepared: PreparedOutput
) -> tuple[Plan, OnDevices | None]:
    """How an output is found, and how devices add up its rows; None where they do not."""
    devices, strategy = opened.devices, prepared.strategy
    on: OnDevices | str | None = devices.why_not()
    if not opened.ledger.family.scalar:
        on = "the steps are followed in order, by the CPU"
    elif on is None:
        on = for_outputs(devices, layer, prepared.queries, prepared.selected, strategy)
        on = "it was not asked for" if on is None else on
    rows = Coverage.of(layer, prepared.selected).rows
    plan = outputs.plan(layer, prepared, rows, on)
    return plan, on if plan.strategy == "device" and not isinstance(on, str) else None


def prepare_output(
    opened: Opened, layer: Layer, question: OutputQuestion, stop: Stop | None
) -> PreparedOutput:
    """A question for an output, its step, column and filter looked up."""
    queries, column = query_tensor(layer, question.queries), question.group_by
    end = last_step(layer, opened.ledger, question.at_step)
    before = None if question.at_step is None else end
    selected = layer.space.select(question.where, before, stop)
    return PreparedOutput(
        queries=queries,
        at_step=question.at_step,
        end=end,
        grouping=None if column is None else layer.space.grouping(column),
        selected=selected,
        filtered=question.where is not None,
        parts=whole_groups(layer, question.at_step, column, selected),
        strategy=question.strategy,
        max_residual=MAX_RESIDUAL if question.max_residual is None else question.max_residual,
        explained=opened.ledger.family.explains,
    )


def output_result(
    layer: Layer,
    question: OutputQuestion,
    prepared: PreparedOutput,
    found: outputs.Parts,
    plan: Plan,
) -> DualOutput:
    """The answer, of its parts."""
    column = question.group_by
    counts = None if column is None else layer.space.count(column, prepared.selected)
    return output_of(prepared, found, counts, Coverage.of(layer, prepared.selected), plan)


def output_of(
    prepared: PreparedOutput,
    found: outputs.Parts,
    counts: np.ndarray | None,
    coverage: Coverage,
    plan: Plan,
) -> DualOutput:
    """Likewise, of rows that are counted, int64 [groups]; None without groups."""
    grouping = prepared.grouping
    return DualOutput(
        values=found.values.astype(np.float32),
        initial=found.initial.astype(np.float32),
        trained=None if found.trained is None else found.trained.astype(np.float32),
        residual=None if found.residual is None else found.residual.astype(np.float32),
        groups=None if grouping is None else grouping.values,
        counts=counts,
        coverage=coverage,
        plan=plan,
    )
