"""Keys and values that are packed on disk: unpacked when they are read, the blocks that are needed.

A packed file is mapped as any other, so that what lies in memory is what lies on disk. Who reads
rows gets them in memory of its own, block by block: nothing that was unpacked is kept, and memory
is that of a tile and of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualform.engine.memory.key_facts import KeyFacts
from dualform.engine.memory.shards import RowFile, widened
from dualform.engine.threads import shared_out
from dualform.store.encoding import Encoding
from dualform.store.files import FileEntry
from dualform.store.packed_rows import PackedRows, Rows

Places = slice | torch.Tensor
"""Of rows among others: a slice, or int64 [n]."""


class PackedFile(RowFile):
    """A file of packed rows.

    Args:
        directory, entry, d, encoding: As for any.
        shape: What its rows are, unpacked.
        facts: What the index says of the rows, where they are keys; held against them when they
            are first used.
    """

    def __init__(
        self,
        directory: Path,
        entry: FileEntry,
        d: int,
        shape: Rows,
        encoding: Encoding,
        facts: KeyFacts | None,
    ) -> None:
        super().__init__(directory, entry, shape.rows, d, encoding)
        self._rows_are = shape
        self._facts = facts

    def copy(self, which: np.ndarray | slice, out: torch.Tensor) -> torch.Tensor:
        def take(places: Places, rows: torch.Tensor) -> None:
            if isinstance(places, slice):
                widened(rows, out[places])
            else:
                out[places] = widened(rows, torch.empty((len(rows), self.d), device="cpu"))

        self._over_blocks(which, take)
        return out

    def pick_units(self, which: np.ndarray, units: slice) -> torch.Tensor:
        out = torch.empty((len(which), len(range(self.d)[units])), device="cpu")

        def take(places: Places, rows: torch.Tensor) -> None:
            out[places] = rows[:, units].float()

        self._over_blocks(which, take)
        return out

    def _over_blocks(
        self, which: np.ndarray | slice, take: Callable[[Places, torch.Tensor], None]
    ) -> None:
        """Unpack the blocks that have any of some rows, in as many threads as pays.

        Args:
            which: The rows.
            take: Given where a block's rows belong among those that were asked for, and they as
                stored, [n, numbers], which are valid until it returns.
        """
        content: PackedRows = self._used()
        size = content.block_rows

        def unpack(blocks: Sequence[tuple[int, Places, Places]]) -> None:
            room = np.empty((size, self._rows_are.row_bytes), np.uint8)
            stored = torch.from_numpy(room).view(self._dtype)
            for number, places, inside in blocks:
                with self._damage():
                    content.unpack(number, room[: content.rows_of(number)])
                take(places, stored[inside])

        shared_out(unpack, list(_by_block(which, self._shape[0], size)))

    def _read(self, memory: Any) -> PackedRows:
        return PackedRows(memoryview(memory).cast("B"), self._rows_are)

    def _check_content(self, content: PackedRows) -> None:
        facts = self._facts
        if facts is None:
            return

        def look(numbers: Sequence[int]) -> None:
            room = np.empty((content.block_rows, self._rows_are.row_bytes), np.uint8)
            for number in numbers:
                rows = room[: content.rows_of(number)]
                content.unpack(number, rows)
                what = facts.wrong_part(rows, number * content.block_rows)
                if what is not None:
                    raise ValueError(what)

        shared_out(look, range(content.blocks))

    def _check_rest(self, content: PackedRows) -> None:
        """That all blocks are the plain file."""
        for _ in content.all():
            pass


def _by_block(
    which: np.ndarray | slice, rows: int, size: int
) -> Iterator[tuple[int, Places, Places]]:
    """Blocks that have any of some rows: the block's number, where its rows belong among those that
    were asked for, and where in the block they are.

    Args:
        which: The rows, by indices in any order or a slice.
        rows: How many there are.
        size: Of a block.
    """
    if isinstance(which, slice):
        first, last, _ = which.indices(rows)
        for number in range(first // size, -(-last // size)):
            begin, end = max(first, number * size), min(last, (number + 1) * size)
            inside = slice(begin - number * size, end - number * size)
            yield number, slice(begin - first, end - first), inside
        return
    if not len(which):
        return
    numbers = which // size
    order = None
    if (numbers[1:] < numbers[:-1]).any():
        order = np.argsort(numbers, kind="stable")
        which, numbers = which[order], numbers[order]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    ends = np.append(starts[1:], len(which)).tolist()
    for begin, end in zip(starts.tolist(), ends, strict=True):
        number, places = int(numbers[begin]), slice(begin, end)
        yield (
            number,
            places if order is None else torch.from_numpy(order[places]),
            torch.from_numpy(which[places] - number * size),
        )
