"""How much of a layer's keys the page cache holds, by a look at a few pages."""

from __future__ import annotations

from dualform.engine.memory import mapped
from dualform.engine.memory.layer import Layer

_PAGES = 8


def resident(layer: Layer) -> float:
    """The share of the layer's keys that needs no reading from disk, between 0 and 1.

    By `mincore` of a few pages of each shard. 1 where the system can't tell; shards that nothing
    has asked for yet are read and checked by their first question anyway, and count as there.
    """
    maps = [where for shard in layer.shards if (where := shard.keys.mapped()) is not None]
    places = [address + size * place // _PAGES for address, size in maps for place in range(_PAGES)]
    found = mapped.resident(places)
    return sum(found) / len(found) if found else 1.0
