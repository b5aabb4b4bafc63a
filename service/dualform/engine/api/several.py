"""Questions about several layers at once: AttributeQuestion and ExplainQuestion.

An attribution adds the layers up, along a number's gradient. An explanation has several answers
about each layer: sums ride along where an output scans every row anyway, for that multiplies the
queries with every key that takes part, and a sum needs just those products. A top-k takes its own
way: it gets along with few of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.api.opened import Opened, check_target, last_step, layer_named, query_tensor
from dualform.engine.api.results import Attribution, Coverage, DualOutput, Explanation, Sums
from dualform.engine.api.top_k import top_k
from dualform.engine.api.totals import (
    CountedSums,
    output_result,
    plan_output,
    prepare_output,
    prepare_sums,
    sums_result,
)
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.groups.attributed import Attributed, PreparedLayer, attributed
from dualform.engine.groups.pairs import Pairs
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.plan import Plan
from dualform.engine.rows.groups import Groups, in_line
from dualform.engine.totals import sums as totals
from dualform.engine.totals.group_sums import GroupSum
from dualform.engine.totals.outputs import PreparedOutput
from dualform.questions import (
    MAX_RESIDUAL,
    AttributedLayer,
    AttributeQuestion,
    ExplainQuestion,
    OutputQuestion,
    SumsQuestion,
    TopKQuestion,
)
from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class Beside:
    """What there is beside a layer's rows, along the target's gradient: float64 [n] all, as in
    `Attribution`."""

    initial: np.ndarray
    residual: np.ndarray
    outputs: np.ndarray


def attribute(
    opened: Opened,
    layers: Mapping[str, Layer],
    question: AttributeQuestion,
    stop: Stop | None,
) -> Attribution:
    """The groups whose rows did most to each input's target, to first order in the layers' outputs.

    Args:
        opened: The index.
        layers: Those of the question, by name.
        question: What is asked.
        stop: Asked between tiles.
    """
    asked = [layers[each.layer] for each in question.layers]
    groupings = groupings_of(asked, question.by)
    prepared, beside = [], []
    for layer, each, grouping in zip(asked, question.layers, groupings, strict=True):
        with layer_named(layer.name):
            one = prepare_layer(opened, layer, each, grouping, question, stop)
            beside.append(beside_of(opened, layer, one.pairs, question, stop))
            prepared.append(one)
    groups = len(groupings[0].values)
    counts = np.zeros(groups, np.int64)
    for one in prepared:
        counts += np.bincount(one.grouping.codes[one.selected], minlength=groups)
    found = attributed(prepared, counts, question.k, question.order, stop)
    coverage = [Coverage.of(one.layer, one.selected) for one in prepared]
    return attribution_of(groupings[0].values, beside, counts, coverage, found)


def prepare_layer(
    opened: Opened,
    layer: Layer,
    asked: AttributedLayer,
    grouping: Grouping,
    question: AttributeQuestion,
    stop: Stop | None,
) -> PreparedLayer:
    """One of the question's layers, its filter looked up."""
    pairs = pairs_of(layer, asked, question.inputs)
    end = last_step(layer, opened.ledger, None)
    coefficients = None
    if opened.ledger.family.scalar:
        coefficients = opened.outputs.trained_coefficients(layer.manifest)
    selected = layer.space.select(question.where, None, stop)
    find = opened.metric_finder(layer, end, stop)
    return PreparedLayer(layer, pairs, grouping, selected, coefficients, find)


def groupings_of(layers: Sequence[Layer], by: str) -> list[Grouping]:
    """The column's groups, the same in all layers."""
    found = []
    for layer in layers:
        with layer_named(layer.name):
            found.append(layer.space.grouping(by, "by"))
    if all(grouping.values.null_count == len(grouping.values) for grouping in found):
        raise InvalidArgumentError(
            f"no row has a value in column {by!r}, so there are no groups to rank; name another, "
            "or record it with annotate()",
            field="by",
            reason="EMPTY_COLUMN",
        )
    try:
        return in_line(found)
    except ValueError as error:
        raise InvalidArgumentError(
            f"column {by!r} holds {error} in different layers, so their groups are not the same; "
            "ask with layers= that hold the same",
            field="by",
        ) from None


def pairs_of(layer: Layer, asked: AttributedLayer, count: int) -> Pairs:
    """What each of so many inputs asks of a layer, once the layer takes such."""
    queries = query_tensor(layer, asked.queries)
    check_target(layer, None, asked.direction)
    directions = torch.from_numpy(np.array(asked.direction, np.float32, order="C"))
    inputs = np.arange(count) if asked.inputs is None else asked.inputs
    return Pairs(count, queries, directions, inputs)


def beside_of(
    opened: Opened,
    layer: Layer,
    pairs: Pairs,
    question: AttributeQuestion,
    stop: Stop | None,
) -> Beside:
    """What is there beside rows, once rows explain enough of the layer's outputs."""
    most = MAX_RESIDUAL if question.max_residual is None else question.max_residual
    whole = PreparedOutput(
        queries=pairs.queries,
        at_step=None,
        end=last_step(layer, opened.ledger, None),
        grouping=None,
        selected=layer.space.everything,
        filtered=False,
        parts="the whole output is asked for",
        strategy="auto",
        max_residual=most,
        inputs=pairs.inputs,
    )
    found = opened.outputs.answer(layer, whole, stop)
    g = pairs.directions.double().numpy()

    def along(outputs: np.ndarray | None) -> np.ndarray:
        if outputs is None:
            return np.full(pairs.count, np.nan)
        return pairs.fold(torch.from_numpy((outputs * g).sum(axis=1))).numpy()

    return Beside(along(found.initial), along(found.residual), along(found.trained))


def attribution_of(
    values: pa.Array,
    beside: Sequence[Beside],
    counts: np.ndarray,
    coverage: Sequence[Coverage],
    found: Attributed,
) -> Attribution:
    """The answer, of its parts: the groups' values, and how many rows each has."""
    groups, scores, of_groups, by_layer = values, found.by_layer[:, :, 0], counts, None
    if found.best is not None:
        codes = found.best.codes.reshape(-1)
        groups = values.take(pa.array(codes, mask=codes < 0))
        scores, by_layer = found.best.scores, found.by_layer
        of_groups = np.append(counts, 0)[found.best.codes]  # -1 is the last
    return Attribution(
        groups=groups,
        scores=scores,
        counts=of_groups,
        by_layer=by_layer,
        initial=np.stack([one.initial for one in beside], axis=1),
        rows=found.rows,
        residual=np.stack([one.residual for one in beside], axis=1),
        outputs=np.stack([one.outputs for one in beside], axis=1),
        coverage=coverage,
    )


_SHARED = Plan("scan", "another answer needs the scan anyway", {})


def explain(
    opened: Opened,
    layer: Layer,
    queries: np.ndarray,
    question: ExplainQuestion,
    stop: Stop | None,
) -> Explanation:
    """Answer about one of the question's layers.

    Args:
        opened: The index.
        layer: Whose memory.
        queries: float32 [n, d_in], those for this layer.
        question: What is asked of all layers.
        stop: Asked between tiles.
    """
    name, where, column = layer.name, question.where, question.group_by
    best = total = output = counted = None
    if column is not None:
        asked = SumsQuestion(name, queries, column, absolute=question.absolute, where=where)
        counted = prepare_sums(layer, asked, stop)
    if question.output:
        wanted = OutputQuestion(
            name, queries, where=where, group_by=column, max_residual=question.max_residual
        )
        output, total = _output(opened, layer, wanted, counted, stop)
    if counted is not None and total is None:
        way = totals.plan(layer, counted.prepared, "auto", opened.devices)
        found = totals.total_weights(layer, counted.prepared, way, stop)
        total = sums_result(layer, counted, found, way.plan)
    if question.k:
        best = top_k(
            opened,
            layer,
            TopKQuestion(name, queries, k=question.k, order=question.order, where=where),
            stop,
        )
    return Explanation(best, total, output)


def _output(
    opened: Opened,
    layer: Layer,
    question: OutputQuestion,
    counted: CountedSums | None,
    stop: Stop | None,
) -> tuple[DualOutput, Sums | None]:
    """The output, and with it the sums where its scan takes them along."""
    prepared = prepare_output(opened, layer, question, stop)
    plan, on = plan_output(opened, layer, prepared)
    if counted is None or plan.strategy != "scan":
        found = opened.outputs.answer(layer, prepared, stop, on=on)
        return output_result(layer, question, prepared, found, plan), None
    way = totals.plan(layer, counted.prepared, "auto", opened.devices)
    if way.rest is None:  # key sums stand for all rows: nothing is cheaper
        found = opened.outputs.answer(layer, prepared, stop)
        return output_result(layer, question, prepared, found, plan), None
    sums = counted.prepared
    groups = Groups(sums.grouping)
    rider = GroupSum(len(sums.queries), groups, sums.absolute)
    found = opened.outputs.answer(layer, prepared, stop, [rider])
    why = way.plan if way.standing is None else _SHARED
    total = sums_result(layer, counted, rider.result(), why)
    return output_result(layer, question, prepared, found, plan), total
