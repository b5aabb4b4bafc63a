"""What the engine found, as response messages.

Large ones take a while to build: between their parts `stop` is asked whether anybody still waits,
and CancelledError raised where nobody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from dualform.engine.api.results import (
    Attribution,
    Coverage,
    DualOutput,
    Explanation,
    SelfInfluence,
    Sums,
    TopGroups,
    TopK,
    WeightsChunk,
)
from dualform.engine.devices.devices import DeviceState, Residence
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.messages import wire
from dualform.engine.plan.plan import Plan
from dualform.questions import (
    AttributeQuestion,
    ExplainQuestion,
    OutputQuestion,
    RowsQuestion,
    SelfInfluenceQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.questions.question import STRATEGIES
from dualform.store.sampling import Sampling
from dualform.v1 import attribution_pb2 as pb


def top_k(question: TopKQuestion, found: TopK, stop: Stop | None = None) -> pb.TopKResponse:
    """To a TopKQuestion."""
    return _top_k(found, question.group_by, _plan(question, found.plan), stop)


def top_groups(
    question: TopGroupsQuestion, found: TopGroups, stop: Stop | None = None
) -> pb.TopGroupsResponse:
    """To a TopGroupsQuestion."""
    response = pb.TopGroupsResponse(
        groups=_groups(question.by, found.groups, stop),
        coverage=_coverage(found.coverage),
        plan=_plan(question, found.plan),
    )
    _fill(response, stop, scores=found.scores, counts=found.counts)
    return response


def attribute(
    question: AttributeQuestion, found: Attribution, stop: Stop | None = None
) -> pb.AttributeResponse:
    """To an AttributeQuestion."""
    response = pb.AttributeResponse(
        groups=_groups(question.by, found.groups, stop),
        coverage=[_coverage(each) for each in found.coverage],
    )
    _fill(
        response,
        stop,
        scores=found.scores,
        counts=found.counts,
        by_layer=found.by_layer,
        initial=found.initial,
        rows=found.rows,
        residual=found.residual,
        outputs=found.outputs,
    )
    return response


def self_influence(
    question: SelfInfluenceQuestion, found: SelfInfluence, stop: Stop | None = None
) -> pb.SelfInfluenceResponse:
    """To a SelfInfluenceQuestion."""
    response = pb.SelfInfluenceResponse(
        groups=_groups(question.by, found.groups, stop),
        total=found.total,
        coverage=_coverage(found.coverage),
    )
    _fill(response, stop, scores=found.scores, counts=found.counts)
    return response


def sums(question: SumsQuestion, found: Sums, stop: Stop | None = None) -> pb.SumsResponse:
    """To a SumsQuestion."""
    return _sums(found, question.group_by, _plan(question, found.plan), stop)


def dual_output(
    question: OutputQuestion, found: DualOutput, stop: Stop | None = None
) -> pb.DualOutputResponse:
    """To an OutputQuestion."""
    return _output(found, question.group_by, _plan(question, found.plan), stop)


def explained(
    question: ExplainQuestion, layer: str, found: Explanation, stop: Stop | None = None
) -> pb.ExplainedLayer:
    """To one layer of an ExplainQuestion."""
    column = question.group_by
    return pb.ExplainedLayer(
        layer=layer,
        top_k=None if found.top_k is None else _top_k(found.top_k, None, None, stop),
        sums=None if found.sums is None else _sums(found.sums, column, None, stop),
        output=None if found.output is None else _output(found.output, column, None, stop),
    )


def weights(chunk: WeightsChunk) -> pb.StreamWeightsResponse:
    """One part of the answer to a StreamWeightsQuestion."""
    return pb.StreamWeightsResponse(start=chunk.start, weights=wire.encode_tensor(chunk.weights))


def layer_info(layer: Layer, residences: Sequence[Residence]) -> pb.LayerInfo:
    """What GetIndex tells of one layer, some of which may lie on devices."""
    return pb.LayerInfo(
        name=layer.name,
        kind=layer.kind,
        d_in=layer.d_in,
        d_out=layer.d_out,
        bias=layer.bias,
        rows=layer.rows,
        row_space=layer.row_space,
        values=layer.values,
        columns=[
            pb.ColumnInfo(name=name, type=wire.column_type(kind)) for name, kind in layer.columns
        ],
        inexact=[pb.InexactMark(from_step=step, reason=reason) for step, reason in layer.inexact],
        dropped=layer.manifest.dropped,
        residences=[
            pb.Residence(
                device=each.device,
                rows=each.rows,
                key_bytes=each.key_bytes,
                value_bytes=each.value_bytes,
            )
            for each in residences
        ],
    )


def device_info(state: DeviceState) -> pb.DeviceInfo:
    """What GetIndex tells of a device."""
    return pb.DeviceInfo(
        name=state.name,
        title=state.title,
        memory_bytes=state.memory,
        budget_bytes=state.budget,
        used_bytes=state.used,
        refused=state.refused or "",
    )


def sampling(chosen: Sampling) -> pb.Sampling | None:
    """What GetIndex tells of the rows that were recorded; None of all."""
    if chosen.whole:
        return None
    return pb.Sampling(
        every=chosen.every,
        sample=chosen.sample,
        seed=chosen.seed,
        zero_rows=chosen.zero_rows,
    )


def hit_bytes(layer: Layer) -> int:
    """Bytes that a row of a top-k adds to an answer."""
    return 12 + sum(wire.COLUMN_BYTES[wire.column_type(kind)] for _, kind in layer.columns)


def group_bytes(layer: Layer, column: str) -> int:
    """Bytes that one of the best groups adds to an answer: its value, sum and count."""
    return 16 + wire.COLUMN_BYTES[wire.column_type(layer.space.columns[column].type)]


def _top_k(
    found: TopK, group_by: str | None, plan: pb.Plan | None, stop: Stop | None
) -> pb.TopKResponse:
    response = pb.TopKResponse(
        columns=[_column(name, array, stop) for name, array in found.columns.items()],
        groups=_groups(group_by, found.groups, stop),
        coverage=_coverage(found.coverage),
        plan=plan,
    )
    _fill(response, stop, rows=found.rows, scores=found.scores, counts=found.counts)
    return response


def _sums(
    found: Sums, group_by: str | None, plan: pb.Plan | None, stop: Stop | None
) -> pb.SumsResponse:
    response = pb.SumsResponse(
        groups=_groups(group_by, found.groups, stop),
        coverage=_coverage(found.coverage),
        plan=plan,
    )
    _fill(response, stop, values=found.values, counts=found.counts)
    return response


def _output(
    found: DualOutput, group_by: str | None, plan: pb.Plan | None, stop: Stop | None
) -> pb.DualOutputResponse:
    response = pb.DualOutputResponse(
        groups=_groups(group_by, found.groups, stop),
        coverage=_coverage(found.coverage),
        plan=plan,
    )
    _fill(
        response,
        stop,
        values=found.values,
        initial=found.initial,
        trained=found.trained,
        counts=found.counts,
        residual=found.residual,
    )
    return response


def _plan(question: RowsQuestion, plan: Plan) -> pb.Plan | None:
    if not question.explain_plan:
        return None
    return pb.Plan(
        strategy=_strategy(plan.strategy),
        reason=plan.reason,
        costs=[
            pb.PlanCost(strategy=_strategy(name), seconds=seconds)
            for name, seconds in plan.costs.items()
        ],
    )


def _strategy(name: str) -> pb.Strategy:
    number: pb.Strategy = STRATEGIES[name]  # type: ignore[assignment]
    return number


def _groups(name: str | None, groups: pa.Array | None, stop: Stop | None) -> pb.Column | None:
    return None if groups is None else _column(name or "", groups, stop)


def _column(name: str, array: pa.Array | pa.ChunkedArray, stop: Stop | None) -> pb.Column:
    check_stop(stop)
    return wire.encode_column(name, array, partial(check_stop, stop))


def _fill(response: Any, stop: Stop | None, **tensors: npt.NDArray[Any] | None) -> None:
    """Put tensors where they belong in a message: a large one is copied no more than that."""
    for name, array in tensors.items():
        if array is not None:
            check_stop(stop)
            wire.fill_tensor(getattr(response, name), array, partial(check_stop, stop))


def _coverage(coverage: Coverage) -> pb.Coverage:
    return pb.Coverage(
        rows=coverage.rows,
        total=coverage.total,
        nonfinite=coverage.nonfinite,
        dropped=coverage.dropped,
        missing=coverage.missing,
    )
