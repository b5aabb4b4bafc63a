"""One layer of an index that is being built: how it is read, and the files that it becomes.

A shard's part of the recording is read twice, for keys and for values. While this thread puts them
in the order of the sidecar, another sums up what the engine must know of the keys, and with the
values what the rows add up to. What belongs to no shard is written by finish.py.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dualform.index.background import BackgroundWorker
from dualform.index.equal_keys import digests
from dualform.index.errors import BuildError
from dualform.index.key_summary import KeySummary
from dualform.index.row_spaces import Space
from dualform.index.row_sum import FollowedSum, RowSums
from dualform.index.shards import ShardFile, ShardWriter
from dualform.index.sidecar import Order
from dualform.index.sketch import sketch
from dualform.store.encoding import FLOAT32, ONE_HOT, Encoding, Half, encoding
from dualform.store.files import FileEntry, write_atomic
from dualform.store.index_parts import LayerShard, shard_file
from dualform.store.ledger import InexactMark
from dualform.store.packed_rows import share_left
from dualform.store.recording import LayerSpec, PassRecord, Recording, parts_of

_PACKED_PASSES, _PACKED_ROWS = 8, 128
"""So many passes, and rows of each, say what packing will leave."""

_WIDE_NUMBERS = 4 << 20
"""Of keys that are stored as places, so many numbers are made at a time."""


class LayerSource:
    """A layer's passes in the recording, read as the index stores them.

    Attributes:
        spec: The layer.
        passes: Its passes, in the order of its rows.
        encodings: Of keys and values: that of the passes, or float32 where they have several.
        rounded: Keys that were float32 are rounded to 16 bits.
        row_bytes: Of a key, and of a value, 0 without values.
    """

    def __init__(
        self, recording: Recording, spec: LayerSpec, *, values: bool, round_keys: str | None = None
    ) -> None:
        self._recording = recording
        self.spec = spec
        self.passes = recording.passes(spec.name)
        of_keys, of_values = _encodings(self.passes)
        self.rounded = round_keys is not None and of_keys is FLOAT32
        if self.rounded:
            of_keys = encoding(round_keys)
        self.encodings = of_keys, of_values
        self.row_bytes = (
            of_keys.row_bytes(spec.d_in),
            of_values.row_bytes(spec.d_out) if values else 0,
        )

    def keys(self, record: PassRecord, part: slice = slice(None)) -> np.ndarray:
        """A pass's keys, or some of them, a row each, of their encoding's NumPy dtype.

        Raises:
            DamagedError: They are not what was written.
            BuildError: A key has no number of 16 bits near it.
        """
        kind, d = self.encodings[0], self.spec.d_in
        rows = self._recording.stored_keys(record, part)
        if record.keys.encoding != kind.name:
            rows = self._narrowed(encoding(record.keys.encoding).widen(rows, d))
        return rows.reshape(len(rows), kind.numbers(d))

    def values(self, record: PassRecord) -> np.ndarray:
        """A pass's values likewise, all of them.

        Raises:
            DamagedError: They are not what was written.
        """
        kind, d = self.encodings[1], self.spec.d_out
        rows = self._recording.stored_values(record)
        assert record.values is not None
        if record.values.encoding != kind.name:
            rows = encoding(record.values.encoding).widen(rows, d)
        return rows.reshape(record.rows, kind.numbers(d))

    def share_left(self, *, values: bool) -> float:
        """What share of its keys' or values' bytes packing is expected to leave, as some passes say
        that are spread over the recording."""
        some = self.passes[:: max(1, len(self.passes) // _PACKED_PASSES)]
        part = slice(_PACKED_ROWS)
        rows = [self.values(each)[part] if values else self.keys(each, part) for each in some]
        if not any(map(len, rows)):
            return 1.0
        numbers = np.concatenate([np.ascontiguousarray(each) for each in rows])
        return share_left(numbers.view(np.uint8), numbers.itemsize)

    def mark(self) -> InexactMark | None:
        """What rounded keys make of the layer: its rows are no longer what its gradients came from,
        and how much that is stays in the remainder."""
        if not self.rounded:
            return None
        name = self.encodings[0].name
        return InexactMark(0, f"rounded: keys are kept as {name}, as the index's build was told")

    def _narrowed(self, keys: np.ndarray) -> np.ndarray:
        """float32 keys as the index keeps them."""
        kind = self.encodings[0]
        if not isinstance(kind, Half):
            return keys
        found = kind.narrow(keys)
        if bool((np.isinf(kind.widen(found)) & np.isfinite(keys)).any()):
            largest = float(np.abs(keys[np.isfinite(keys)]).max())
            raise BuildError(
                f"layer {self.spec.name!r} has keys as large as {largest:.3g}, which {kind.name} "
                "can't hold: round to bfloat16, or not at all"
            )
        return found

    def pieces(
        self, space: Space, start: int, stop: int, *, values: bool
    ) -> Iterator[tuple[PassRecord, slice, np.ndarray]]:
        """Keys or values of rows [start, stop), pass by pass and of large ones in parts, the same
        of both: whose, which of these rows, they."""
        for i in space.passes_in(start, stop):
            begin = int(space.starts[i])
            first, last = max(begin, start), min(int(space.starts[i + 1]), stop)
            record, to = self.passes[i], begin - start
            rows = self._rows(record, values=values)
            for part in parts_of(first - begin, last - begin, self.spec.d_in):
                yield record, slice(to + part.start, to + part.stop), rows(part)

    def _rows(self, record: PassRecord, *, values: bool) -> Callable[[slice], np.ndarray]:
        """What gives some of a pass's keys or values: from memory, where they are not cut."""
        if values:
            return self.values(record).__getitem__
        if record.keys.patches is None:
            return self.keys(record).__getitem__
        return functools.partial(self.keys, record)

    def steps(self, space: Space, start: int, stop: int) -> tuple[int, int]:
        """The steps of rows [start, stop): the first, and the one after the last."""
        passes = space.passes_in(start, stop)
        return self.passes[passes[0]].step, self.passes[passes[-1]].step + 1

    def add_rows(
        self,
        row_sum: RowSums | FollowedSum,
        space: Space,
        start: int,
        stop: int,
        parts: np.ndarray,
    ) -> None:
        """Take a shard's rows [start, stop) to what all add up to, as `LayerWriter` does.

        Args:
            row_sum: What takes them.
            space: The layer's row space.
            start, stop: The shard's rows.
            parts: int32 [columns, rows], the stored parts of each.
        """
        row_sum.begin(*self.steps(space, start, stop))
        both = (self.pieces(space, start, stop, values=values) for values in (False, True))
        for (record, inside, keys), (_, _, values) in zip(*both, strict=True):
            wide = self.encodings[1].widen(values, self.spec.d_out)
            for part in _wide_parts(self.encodings[0], self.spec.d_in, len(keys)):
                where = slice(inside.start + part.start, inside.start + part.stop)
                some = self.encodings[0].widen(keys[part], self.spec.d_in)
                row_sum.add(record.step, some, wide[part], parts[:, where])


def _encodings(passes: Sequence[PassRecord]) -> tuple[Encoding, Encoding]:
    spans = ([record.keys for record in passes], [record.values for record in passes])
    names = [{span.encoding for span in side if span is not None} for side in spans]
    keys, values = (encoding(found.pop()) if len(found) == 1 else FLOAT32 for found in names)
    return keys, FLOAT32 if values is ONE_HOT else values


def _wide_parts(kind: Encoding, d: int, rows: int) -> Iterator[slice]:
    """All rows at once; of an encoding that widens much, so many that little memory is needed."""
    step = rows if kind.numbers(d) == d else max(1, _WIDE_NUMBERS // d)
    for first in range(0, rows, max(1, step)):
        yield slice(first, min(first + step, rows))


@dataclass(frozen=True)
class _PendingShard:
    """A layer's shard whose files are still being written."""

    keys: Future[FileEntry]
    values: Future[FileEntry] | None
    sketch: FileEntry | None
    sums: FileEntry | None
    summary: KeySummary

    def result(self) -> LayerShard:
        return LayerShard(
            keys=self.keys.result(),
            values=None if self.values is None else self.values.result(),
            sketch=self.sketch,
            sums=self.sums,
            nonnegative=self.summary.nonnegative,
            max_norm=self.summary.max_norm,
            nonfinite=self.summary.nonfinite(),
        )


class Digests(Protocol):
    """Takes the digests of keys.

    Attributes:
        pays: False where nobody wants them any more.
    """

    pays: bool

    def add(self, hashes: np.ndarray) -> None:
        """Take a shard's, S16 [n], by position."""


class LayerWriter:
    """Writes a layer's shards: `write_shard` for each, then `wait`.

    Args:
        directory: The index's.
        source: The layer's passes.
        values: Whether the index has values.
        directions: Of the sketches, float32 [m, d_in]; None for none.
        row_sum: What takes the rows to what they add up to; None where nothing does.
        equal_keys: What takes the keys' digests.
        advance: Called with the bytes that were read, as they come.
    """

    def __init__(
        self,
        directory: Path,
        source: LayerSource,
        *,
        values: bool,
        directions: np.ndarray | None,
        row_sum: RowSums | FollowedSum | None,
        equal_keys: Digests,
        advance: Callable[[int], None],
    ) -> None:
        self._directory = directory
        self._source = source
        self._spec = source.spec
        self._values = values
        self._directions = directions
        self._row_sum = row_sum
        self._equal_keys = equal_keys
        self._advance = advance
        self._pending: list[_PendingShard] = []

    def write_shard(self, writer: ShardWriter, space: Space, order: Order) -> None:
        """Fill and hand over the keys, then the values, of the shard whose rows lie so."""
        spec, encodings = self._spec, self._source.encodings
        summary = KeySummary(order.rows, spec.d_in, order.run_starts)
        directions = self._directions
        sketches = None
        if directions is not None:
            sketches = np.empty((order.rows, len(directions) + 1), np.float32)
        hashes = np.empty(order.rows, "S16") if self._equal_keys.pays else None

        def pieces(*, values: bool) -> Iterator[tuple[PassRecord, slice, np.ndarray]]:
            for piece in self._source.pieces(space, order.start, order.stop, values=values):
                yield piece
                self._advance(piece[2].nbytes)

        def study(where: np.ndarray, rows: np.ndarray) -> None:
            for part in _wide_parts(encodings[0], spec.d_in, len(rows)):
                keys = encodings[0].widen(rows[part], spec.d_in)
                summary.add(where[part], keys)
                if sketches is not None and directions is not None:
                    sketches[where[part]] = sketch(keys, directions)
            if hashes is not None:
                hashes[where] = digests(rows)

        def fill_keys(file: ShardFile) -> None:
            with BackgroundWorker() as background:
                for _, inside, rows in pieces(values=False):
                    where = order.positions[inside]
                    background.submit(study, where, rows)
                    file.put(where, rows)
                if hashes is not None:
                    background.submit(self._equal_keys.add, hashes)

        def fill_values(file: ShardFile) -> None:
            row_sum = self._row_sum
            if row_sum is not None:
                row_sum.begin(*self._source.steps(space, order.start, order.stop))

            def add(step: int, inside: slice, rows: np.ndarray) -> None:
                assert row_sum is not None
                values = encodings[1].widen(rows, spec.d_out)
                for part in _wide_parts(encodings[0], spec.d_in, len(rows)):
                    where = slice(inside.start + part.start, inside.start + part.stop)
                    keys = keys_file.take(order.positions[where])
                    row_sum.add(step, keys, values[part], order.parts[:, where])

            with BackgroundWorker() as background:
                for record, inside, rows in pieces(values=True):
                    if row_sum is not None:
                        background.submit(add, record.step, inside, rows)
                    file.put(order.positions[inside], rows)

        name = shard_file(spec.name, order.number, encodings[0].keys_file)
        keys_file, keys = writer.keys(name, order.rows, spec.d_in, encodings[0], fill_keys)
        values = None
        if self._values:
            name = shard_file(spec.name, order.number, "values.npy")
            values = writer.values(name, order.rows, spec.d_out, encodings[1], fill_values)
        keys_file.let_go()
        entry = sums = None
        if sketches is not None:
            entry = write_array(
                self._directory, shard_file(spec.name, order.number, "sketch.npy"), sketches
            )
        if summary.sums is not None:
            name = shard_file(spec.name, order.number, "sums.npy")
            sums = write_array(self._directory, name, summary.sums)
        self._pending.append(_PendingShard(keys, values, entry, sums, summary))

    def wait(self) -> tuple[LayerShard, ...]:
        """Wait until the files of all shards are written. Raises what writing them raised.

        Returns:
            What the manifest says of them.
        """
        return tuple(shard.result() for shard in self._pending)


def write_array(directory: Path, name: str, array: np.ndarray) -> FileEntry:
    """Write a .npy file below an index under construction."""
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    entry = write_atomic(directory / name, sink.getvalue())
    return FileEntry(name, entry.bytes, entry.xxh3)
