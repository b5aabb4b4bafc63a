"""How much of a layer's keys the page cache holds, by a look at a few pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

from dualform.engine.memory.layer import Layer

_PAGES = 8


def resident(layer: Layer) -> float:
    """The share of the layer's keys that needs no reading from disk, between 0 and 1.

    By `mincore` of a few pages of each shard. 1 where the system can't tell; shards that nothing
    has asked for yet are read and checked by their first question anyway, and count as there.
    """
    look = _mincore()
    held = asked = 0
    for shard in layer.shards:
        where = shard.keys.mapped()
        if look is None or where is None:
            continue
        address, size = where
        for place in range(_PAGES):
            page = address + (size * place // _PAGES) // mmap.PAGESIZE * mmap.PAGESIZE
            found = ctypes.c_ubyte()
            if look(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(found)) == 0:
                asked += 1
                held += found.value & 1
    return held / asked if asked else 1.0


@cache
def _mincore() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "mincore", None)
