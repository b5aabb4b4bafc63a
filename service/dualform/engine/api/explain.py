"""Several answers about one layer: those that need a scan share it, the others take their own way.

A scan's product of queries and keys serves the output, the sums and the top-k alike. So where one
of them scans every row that takes part, the others ride along; otherwise each is found by itself.
So is a top-k that sketches answer in less time than it takes to look at every product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.fold import Reducer, fold
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.plan import Plan
from dualform.engine.topk.candidates import Ranking
from dualform.engine.topk.scan import RankedRows
from dualform.engine.totals import outputs, sums

# Where key sums stand for fewer rows than this share, scanning all rows for all answers is cheaper.
_MOSTLY = 0.75


@dataclass(frozen=True)
class Questions:
    """What is asked of one layer, None for what is not.

    Attributes:
        queries: float32 [n, d_in], finite.
        selected: bool [total], by position: the rows that take part.
        ranking: The best rows by weight.
        joins: Whether these are looked for in the tiles of a scan, if there is one.
        sums: Totals.
        output: The trained layer's output.
    """

    queries: torch.Tensor
    selected: np.ndarray
    ranking: Ranking | None
    joins: bool
    sums: sums.Question | None
    output: outputs.Question | None


@dataclass(frozen=True)
class Found:
    """Answers, None for what was not asked, or for a top-k that is better found by itself.

    Attributes:
        hits: Positions, int64 [n, k], and scores, float32 [n, k]; padded with -1 and NaN.
        sums: float64 [n, groups].
        output: The output's parts.
        plans: How each was found, by name: "top_k", "sums", "output".
    """

    hits: tuple[np.ndarray, np.ndarray] | None
    sums: np.ndarray | None
    output: outputs.Parts | None
    plans: dict[str, Plan]


def explain(
    layer: Layer,
    asked: Questions,
    rows: int,
    answers: outputs.DualOutputs,
    device: torch.device,
    stop: Stop | None,
) -> Found:
    """Answer what shares a scan, and what needs none; a top-k outside the scan is left to others.

    Args:
        layer: Whose memory.
        asked: The questions.
        rows: How many rows take part.
        answers: Gives the outputs.
        device: Where tiles are multiplied.
        stop: Asked between tiles.
    """
    plans: dict[str, Plan] = {}
    scan_all, way = False, None
    if asked.output is not None:
        plans["output"] = outputs.plan(layer, asked.output, rows)
        scan_all = plans["output"].strategy == "scan"
    if asked.sums is not None:
        way = sums.plan(layer, asked.sums, "auto")
        plans["sums"] = way.plan
        if way.rest is not None and way.standing is None:
            scan_all |= bool(np.count_nonzero(way.rest) > (1 - _MOSTLY) * rows)
    riders: list[Reducer] = []
    ranked = total = None
    if scan_all and asked.ranking is not None and asked.joins:
        ranked = RankedRows(layer, asked.queries, asked.ranking, device)
        riders.append(ranked)
    if scan_all and asked.sums is not None and way is not None and way.rest is not None:
        if way.standing is not None:
            plans["sums"] = _SHARED
        total = sums.GroupSum(len(asked.queries), asked.sums.grouping, asked.sums.absolute, device)
        riders.append(total)
    parts = totals = None
    if asked.output is not None:
        parts = answers.answer(layer, asked.output, stop, riders)
    if riders and plans.get("output", _NO_PLAN).strategy != "scan":
        fold(layer, asked.queries, asked.selected, riders, device, stop)
    if total is not None:
        totals = total.result()
    elif asked.sums is not None and way is not None:
        totals = sums.total_weights(layer, asked.sums, way, device, stop)
    hits = None if ranked is None else ranked.result()
    if hits is not None:
        plans["top_k"] = _SHARED
    return Found(hits, totals, parts, plans)


_NO_PLAN = Plan("none", "not asked", {})
_SHARED = Plan("scan", "another answer needs the scan anyway", {})
