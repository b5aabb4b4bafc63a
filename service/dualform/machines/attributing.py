"""Attribution over several layers, whose rows are on several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from dualform.engine.api.opened import layer_named
from dualform.engine.api.results import Attribution
from dualform.engine.api.several import attribution_of, beside_of, groupings_of, pairs_of
from dualform.engine.groups.attributed import best_attributed, block_inputs, check_costs
from dualform.machines import asked
from dualform.machines.asking import Counts, Spread
from dualform.machines.unions import union
from dualform.questions import AttributedLayer, AttributeQuestion


def attribute(spreads: Sequence[Spread], question: AttributeQuestion) -> Attribution:
    """The best groups: every group's sums of each layer are added up here.

    Args:
        spreads: Who can be asked about each of the question's layers.
        question: What is asked.
    """
    opened = spreads[0].opened
    values = groupings_of([spread.layer for spread in spreads], question.by)[0].values
    counts, coverage, beside, all_pairs = np.zeros(len(values), np.int64), [], [], []
    for spread, each in zip(spreads, question.layers, strict=True):
        with layer_named(each.layer):
            pairs = pairs_of(spread.layer, each, question.inputs)
            all_pairs.append(pairs)
            beside.append(beside_of(opened, spread.layer, pairs, question, spread.stop))
            rows = Counts(spread, question.where, None)
            if spread.sizes:
                known = spread.layer.space.grouping(question.by, "by").values
                counts[union([values, known])[1][1]] += rows.of(question.by)[0]
            coverage.append(rows.coverage())

    if not opened.ledger.family.scalar:
        check_costs(
            (spread.layer, pairs, counted.rows)
            for spread, pairs, counted in zip(spreads, all_pairs, coverage, strict=True)
        )

    def sums(first: int, last: int) -> list[np.ndarray]:
        return [
            _of_layer(spread, replace(question, layers=(each,)), values, first, last)
            for spread, each in zip(spreads, question.layers, strict=True)
        ]

    machines = max(len(spread.sizes) for spread in spreads)
    size = block_inputs(len(values), len(spreads) + machines)
    found = best_attributed(sums, question.inputs, size, counts, question.k, question.order)
    return attribution_of(values, beside, counts, coverage, found)


def _of_layer(
    spread: Spread, question: AttributeQuestion, values: pa.Array, first: int, last: int
) -> np.ndarray:
    """Of the question's only layer and the inputs from first to last, float64 [n, groups]."""
    each: AttributedLayer = question.layers[0]
    block = replace(question, layers=(each.part(first, last),), inputs=last - first)
    total = np.zeros((last - first, len(values)))
    units = None
    if not spread.opened.ledger.family.scalar:
        used = np.flatnonzero((block.layers[0].direction != 0).any(axis=0)).tolist()
        units = spread.units.find(spread, used, spread.opened.ledger.steps)
    for groups, sums in spread.ask(asked.attributed_sums, block, units):
        total[:, union([values, groups])[1][1]] += sums
    return total
