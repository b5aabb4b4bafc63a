"""Row spaces of an index under construction: which layers share their rows and metadata."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from dualform.store.index import SpaceShard
from dualform.store.recording import Recording


@dataclass
class Space:
    """Layers that saw the same passes.

    Attributes:
        layers: Their names.
        blocks: Each pass's block of metadata.
        starts: int64 [passes + 1], the row at which each pass starts, and the number of rows.
        shards: What was written so far.
        asked_for: The last segment that was asked to be read ahead.
    """

    layers: list[str]
    blocks: list[int]
    starts: np.ndarray
    shards: list[SpaceShard] = field(default_factory=list)
    asked_for: int = -1

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def passes_in(self, start: int, stop: int) -> range:
        """The passes that overlap rows [start, stop)."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        return range(first, last)


def row_spaces(source: Recording) -> list[Space]:
    """Layers whose passes refer to the same blocks in the same order share a row space."""
    spaces: dict[bytes, Space] = {}
    for name in source.manifest.layers:
        blocks = [record.block for record in source.passes(name)]
        key = hashlib.sha256(np.array(blocks, np.int64).tobytes()).digest()
        if key not in spaces:
            sizes = [record.rows for record in source.passes(name)]
            starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
            spaces[key] = Space([], blocks, starts)
        spaces[key].layers.append(name)
    return list(spaces.values())
