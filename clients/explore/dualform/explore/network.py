"""What the user's model adds: the whole network's output, and the examples behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.explore.answers import Attributed, AttributedExample, Network, Output, Refused
from dualform.explore.asking import UNITS_SHOWN, Asker, part
from dualform.explore.behind import columns_of, payloads_of
from dualform.explore.keys import plain
from dualform.explore.model import Logits, Model, Opens


async def network_of(
    asker: Asker, model: Model, opens: Opens, inputs: Any, token: int | None
) -> Network:
    """The whole model about one input.

    Args:
        asker: Whose view says which rows take part, after how many steps, and how many are shown.
        model: The trained model.
        opens: A client that answers in the middle of a forward pass.
        inputs: Of one example, as the model takes them.
        token: Of logits [1, tokens, classes], the place that is meant; None for the last.

    Raises:
        UnavailableError: Nobody answers; what else is refused is refused in its part alone.
    """
    asker.tell("the whole network's output")
    said = await part(model.logits(inputs, token))
    if isinstance(said, Refused):
        return Network(said, said)
    output = await part(_output(asker, model, opens, inputs, said))
    asker.tell("the examples behind it, over all layers")
    return Network(output, await part(_attributed(asker, model, inputs, said)))


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
    async with model.turn:
        found = await asker.client.attribute(
            model.module,
            inputs,
            target=target,
            token=said.token,
            k=asker.view.k,
            where=asker.view.where,
            max_residual=asker.view.residual,
            index=asker.index,
        )
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
