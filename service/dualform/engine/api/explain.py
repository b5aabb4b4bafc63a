"""Several answers about one layer: sums ride along where an output scans every row anyway.

An output's scan multiplies the queries with every key that takes part, and a sum needs just those
products. A top-k takes its own way: it gets along with few of them.
"""

from __future__ import annotations

import numpy as np

from dualform.engine.api.opened import Opened
from dualform.engine.api.results import Coverage, DualOutput, Explanation, Sums
from dualform.engine.api.top_k import top_k
from dualform.engine.api.totals import (
    CountedSums,
    output_result,
    prepare_output,
    prepare_sums,
    sums_result,
)
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.plan import Plan
from dualform.engine.rows.groups import Groups
from dualform.engine.totals import outputs
from dualform.engine.totals import sums as totals
from dualform.engine.totals.group_sums import GroupSum
from dualform.questions import ExplainQuestion, OutputQuestion, SumsQuestion, TopKQuestion

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
        way = totals.plan(layer, counted.prepared, "auto")
        found = totals.total_weights(layer, counted.prepared, way, opened.device, stop)
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
    plan = outputs.plan(layer, prepared, Coverage.of(layer, prepared.selected).rows)
    if counted is None or plan.strategy != "scan":
        found = opened.outputs.answer(layer, prepared, stop)
        return output_result(layer, question, prepared, found, plan), None
    way = totals.plan(layer, counted.prepared, "auto")
    if way.rest is None:  # key sums stand for all rows: nothing is cheaper
        found = opened.outputs.answer(layer, prepared, stop)
        return output_result(layer, question, prepared, found, plan), None
    sums = counted.prepared
    groups = Groups(sums.grouping)
    rider = GroupSum(len(sums.queries), groups, sums.absolute, opened.device)
    found = opened.outputs.answer(layer, prepared, stop, [rider])
    why = way.plan if way.standing is None else _SHARED
    total = sums_result(layer, counted, rider.result(), why)
    return output_result(layer, question, prepared, found, plan), total
