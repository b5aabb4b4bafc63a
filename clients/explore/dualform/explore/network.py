"""What the user's model adds: the whole network's output, and the examples behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dualform.client import AttributionResult
from dualform.explore.answers import (
    Attributed,
    AttributedExample,
    LogitParts,
    Network,
    Output,
    Query,
    Refused,
)
from dualform.explore.asking import GROUPS_SHOWN, UNITS_SHOWN, Asker, in_order, part
from dualform.explore.behind import columns_of, payloads_of
from dualform.explore.keys import plain
from dualform.explore.model import Logits, Model, Opens


async def network_of(
    asker: Asker,
    model: Model,
    opens: Opens,
    query: Query,
    column: str = "",
    early: Callable[[Network], None] | None = None,
) -> Network:
    """The whole model about one input.

    Args:
        asker: Whose view says which rows take part, after how many steps, and how many are shown.
        model: The trained model.
        opens: A client that answers in the middle of a forward pass.
        query: Its inputs are those of one example, as the model takes them; its token says which
            of logits [1, tokens, classes] are meant, None the last.
        column: Of the classes; "" for none.
        early: Given what is known so far, whenever that is more.

    Raises:
        UnavailableError: Nobody answers; what else is refused is refused in its part alone.
    """
    asker.tell("the whole network's output")
    inputs = query.inputs
    said = await part(model.logits(inputs, query.token))
    if isinstance(said, Refused):
        return Network(said, said)
    found = Network(await part(_output(asker, model, opens, inputs, said)), None)
    if early is not None:
        early(found)
    asker.tell("the examples behind it, over all layers")
    found = replace(found, attributed=await part(_attributed(asker, model, inputs, said)))
    if not column:
        return found
    if early is not None:
        early(found)
    asker.tell(f"what each {column} added, over all layers")
    return replace(found, classes=await part(_classes(asker, model, inputs, said, column)))


def target_of(asker: Asker, units: int) -> str | int:
    """What is attributed: the unit that was picked, of the last layer; else the margin."""
    unit = asker.view.unit
    picked = unit is not None and asker.is_last and unit < units == asker.layer.d_out
    if units == 1 or (unit is not None and picked):
        return unit or 0
    return "margin"


async def _output(asker: Asker, model: Model, opens: Opens, inputs: Any, said: Logits) -> Output:
    values = said.values.astype(np.float64)
    order = np.argsort(-values, kind="stable")[:UNITS_SHOWN]
    view = asker.view
    left, after, beside = None, int(values.argmax()), []
    if view.filters:
        beside.append("filtered")
    if view.step is not None:
        beside.append(f"after {view.step:,} steps")
    if beside:
        how = {
            "where": view.where,
            "at_step": view.step,
            "max_residual": view.residual,
            "index": asker.index,
        }
        masked = (await model.logits(inputs, said.token, opens, **how)).values
        left, after = tuple(float(masked[unit]) for unit in order), int(masked.argmax())
    return Output(
        "",
        tuple((int(unit), float(values[unit])) for unit in order),
        left,
        (int(values.argmax()), after),
        len(values),
        None,
        0,
        0,
        ", ".join(beside),
    )


async def _attributed(asker: Asker, model: Model, inputs: Any, said: Logits) -> Attributed:
    target = target_of(asker, len(said.values))
    found = await _asked(asker, model, inputs, said, target=target, k=asker.view.k)
    there = found.counts[0] > 0
    ids = [plain(each) for each in found.groups[0][there]]
    columns = await columns_of(asker, ids)
    payloads = await payloads_of(asker.client, ids, asker.index)
    examples = [
        AttributedExample(each, float(score), tuple(map(float, shares)), int(count),
                          columns.get(each, {}), payload)
        for each, score, shares, count, payload in zip(
            ids,
            found.scores[0][there],
            found.by_layer[0][there],
            found.counts[0][there],
            payloads,
            strict=True,
        )
    ]  # fmt: skip
    return Attributed(
        int(said.values.argmax()) if target == "margin" else int(target),
        target == "margin",
        float(found.targets[0]),
        said.token,
        found.layers,
        tuple(examples),
        float(found.initial[0].sum()),
        float(found.rows[0].sum()),
        float(found.residual[0].sum()),
        float(found.unrecorded[0]),
    )


async def _classes(
    asker: Asker, model: Model, inputs: Any, said: Logits, column: str
) -> LogitParts:
    target = target_of(asker, len(said.values))
    unit = target if isinstance(target, int) else int(said.values.argmax())
    k = GROUPS_SHOWN + 1
    found = await _asked(asker, model, inputs, said, target=unit, by=column, k=k, order="absolute")
    count = int((found.counts[0] > 0).sum())
    best = list(range(min(count, GROUPS_SHOWN)))
    names = [plain(each) for each in found.groups[0][best]]
    order = in_order(names)
    values = found.by_layer[0][best][order]
    return LogitParts(
        column,
        unit,
        float(said.values[unit]),
        found.layers,
        [names[place] for place in order],
        values,
        found.rows[0] - values.sum(axis=0) if count > GROUPS_SHOWN else None,
        found.initial[0],
        found.residual[0],
        float(found.unrecorded[0]),
    )


async def _asked(
    asker: Asker, model: Model, inputs: Any, said: Logits, **asked: Any
) -> AttributionResult:
    async with model.turn:
        return await asker.client.attribute(
            model.module,
            inputs,
            token=said.token,
            where=asker.view.where,
            max_residual=asker.view.residual,
            index=asker.index,
            **asked,
        )
