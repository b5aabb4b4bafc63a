"""The examples that there are to pick from, a page at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualform.client import AsyncClient, LayerInfo
from dualform.explore.behind import payloads_of
from dualform.explore.keys import plain
from dualform.explore.payloads import Payload, shortened
from dualform.explore.view import ExampleId, View, literal

PER_PAGE = 12


@dataclass(frozen=True)
class Offered:
    """An example to pick: its id, its label where it has one, and what was kept of it."""

    example: ExampleId
    label: object
    payload: Payload


async def offered(
    client: AsyncClient, index: str | None, layer: LayerInfo, view: View
) -> tuple[Offered, ...]:
    """The next examples behind the view's `after`, by id; none where rows have no ids."""
    if "example" not in layer.columns:
        return ()
    where = "example is not null"
    if view.after is not None:
        where += f" and example > {literal(view.after)}"
    # Products with nothing are all alike: then groups come by their values.
    nothing = np.zeros((1, layer.d_in), np.float32)
    found = await client.top_groups(
        layer.name, nothing, by="example", k=PER_PAGE, where=where, index=index
    )
    some = zip(found.groups[0], found.counts[0], strict=True)
    ids = [plain(each) for each, count in some if count]
    if not ids:
        return ()
    among = f"example in ({', '.join(map(literal, ids))})"
    rows = await client.top_k(
        layer.name, nothing, k=len(ids), where=among, distinct="example", index=index
    )
    labels = {}
    if "label" in rows.columns:
        labels = {
            plain(each): plain(label)
            for each, label in zip(rows["example"][0], rows["label"][0], strict=True)
        }
    payloads = await payloads_of(client, ids, index)
    return tuple(
        Offered(each, labels.get(each), shortened(payload))
        for each, payload in zip(ids, payloads, strict=True)
    )
