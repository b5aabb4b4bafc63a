"""How many rows a question multiplies with its queries, however it comes by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualform.engine.devices import flat
from dualform.engine.memory import shards
from dualform.engine.topk import scan as topk


def rows_read(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]) -> int:
    """Rows of tiles, rows that sketches left, and rows that FAISS searched, each time it is read.

    Rows that are scored again, exactly, do not count.
    """
    read: list[int] = []
    tiles, scattered, search = shards.Shard.tiles, topk.Scan._scan_rows, flat.search

    def of_tiles(self: Any, selected: np.ndarray, *rest: Any, **named: Any) -> Any:
        read.append(int(np.count_nonzero(selected)))
        return tiles(self, selected, *rest, **named)

    def of_sketches(self: Any, positions: np.ndarray, *rest: Any) -> None:
        read.append(len(positions))
        scattered(self, positions, *rest)

    def of_faiss(shard: Any, *rest: Any) -> Any:
        read.append(shard.rows)
        return search(shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(shards.Shard, "tiles", of_tiles)
        patch.setattr(topk.Scan, "_scan_rows", of_sketches)
        patch.setattr(flat, "search", of_faiss)
        ask()
    return sum(read)
