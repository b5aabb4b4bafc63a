"""Row spaces of an index under construction: which layers share their rows and metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dualform.store.recording import Recording


@dataclass
class Space:
    """Layers that saw the same passes.

    Attributes:
        layers: Their names.
        blocks: Each pass's block of metadata.
        starts: int64 [passes + 1], the row at which each pass starts, and the number of rows.
    """

    layers: list[str]
    blocks: list[int]
    starts: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def passes_in(self, start: int, stop: int) -> range:
        """The passes that overlap rows [start, stop)."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        return range(first, last)

    def inside(self, start: int, stop: int) -> Iterator[slice]:
        """Of each pass that overlaps rows [start, stop), which of these rows are its."""
        for i in self.passes_in(start, stop):
            first, last = int(self.starts[i]), int(self.starts[i + 1])
            yield slice(max(first, start) - start, min(last, stop) - start)

    def metadata(self, source: Recording, start: int, stop: int) -> pa.Table:
        """The metadata of rows [start, stop).

        Raises:
            DamagedError: The recording's metadata is not what was written.
        """
        passes = self.passes_in(start, stop)
        table = source.read_rows([self.blocks[i] for i in passes])
        return table.slice(start - int(self.starts[passes[0]]), stop - start)


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
