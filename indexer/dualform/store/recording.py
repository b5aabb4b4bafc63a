"""Reading a recording: every committed step, checked against its digest (docs/format-recording.md).

Which steps are committed is told by recording_segments.py; what lies in the files, by
recording_format.py and segment_table.py.

Memory is bounded by one segment's metadata, whatever the recording's length.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import load as load_safetensors

from dualform.store.encoding import FLOAT32, encoding
from dualform.store.errors import DamagedError, NotFoundError
from dualform.store.files import (
    FileEntry,
    check_digest_of,
    opened,
    read_checked,
    reading,
)
from dualform.store.ledger import InexactMark, Ledger, LedgerRow, from_parquet
from dualform.store.parquet import batches, check_columns, read_parquet
from dualform.store.recording_format import (
    EXAMPLES,
    PAYLOAD_KINDS,
    PAYLOADS,
    RERECORD,
    SEGMENTS,
    LayerSpec,
    RecordingManifest,
)
from dualform.store.recording_records import RecordReader
from dualform.store.recording_segments import committed
from dualform.store.row_metadata import row_schema
from dualform.store.sampling import counted
from dualform.store.segment_table import PassRecord, SegmentTable, Span

__all__ = [
    "InexactMark",
    "LayerSpec",
    "PassRecord",
    "Recording",
    "RecordingManifest",
    "Span",
]


_PART_BYTES = 8 << 20
"""Of keys, as float32, that are made at a time."""


class Recording:
    """A recording on disk, complete or cut off by a crash; use `Recording.open`.

    Attributes:
        path: Its directory.
        manifest: Layers, optimizer, whether values were recorded.
        steps: Committed optimizer steps.
        complete: It was closed in an orderly way; otherwise there is no final state.
        segments: The tables of its committed segments.
        marks: By layer name, from which step on it is inexact and why; every layer has a list.
        schema: Of the row metadata: step, slot, position, then the user's columns.
        cut: Why committed steps are left out; None where none are.
    """

    cut: str | None = None

    def __init__(
        self,
        path: Path,
        manifest: RecordingManifest,
        segments: Sequence[SegmentTable],
        final: FileEntry | None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.steps = sum(segment.steps for segment in segments)
        self.complete = final is not None
        self.marks: dict[str, list[InexactMark]] = {name: [] for name in manifest.layers}
        self.segments = segments
        self._final = final
        self._directory = path / SEGMENTS
        self._passes: dict[str, list[PassRecord]] = {name: [] for name in manifest.layers}
        self._block_rows: list[int] = []
        self._block_place: list[tuple[int, int]] = []  # segment, first row in its metadata
        columns: dict[str, str] = {}
        for segment in segments:
            columns.update(segment.columns)
            for name, mark in segment.marks:
                self.marks[name].append(mark)
            for name, record in segment.passes:
                self._passes[name].append(record)
            self._block_rows.extend(segment.block_rows)
            starts = itertools.accumulate(segment.block_rows, initial=0)
            self._block_place.extend(
                (segment.number, start)
                for start, _ in zip(starts, segment.block_rows, strict=False)
            )
        self.schema = row_schema(columns)
        self._records = RecordReader(self._directory, segments)
        self._inputs: tuple[PassRecord, np.ndarray] | None = None
        self._open_rows: tuple[int, pa.Table] | None = None

    @classmethod
    def open(cls, path: Path | str) -> Recording:
        """Open what was committed at `path`.

        Raises:
            NotFoundError: No recording there.
            VersionError: Written by a newer dualform.
            DamagedError: A committed file is missing, truncated or altered; names the file.
            UnreadableError: One may not be read.
        """
        path = Path(path)
        with reading(path):
            manifest = RecordingManifest.load(path)
            segments, final = committed(path, manifest)
            return cls(path, manifest, segments, final)

    def close(self) -> None:
        """Let go of open files; the recording can still be read after, and reopens them."""
        self._records.close()
        self._open_rows = self._inputs = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def recordings(self) -> Sequence[Recording]:
        """Those of all ranks, or this one."""
        return [self]

    def ledger(self) -> Ledger:
        """The ledger of all committed steps, every layer's weight and bias."""
        rows = [row for segment in self.segments for row in self.ledger_of(segment)]
        try:
            if len(rows) < self.steps:  # before anything is made for so many steps
                raise ValueError(f"{len(rows):,} rows of ledger for {self.steps:,} steps")
            ledger = Ledger(rows, self.steps)
        except ValueError as error:
            raise DamagedError(self._directory, str(error), RERECORD) from None
        for spec in self.manifest.layers.values():
            for parameter in spec.parameters:
                if self.steps and parameter not in ledger.parameters:
                    what = f"the ledgers have no row of {parameter}, which the manifest names"
                    raise DamagedError(self._directory, what, RERECORD)
        return ledger

    def ledger_of(self, segment: SegmentTable) -> list[LedgerRow]:
        """The ledger of a segment's steps.

        Raises:
            DamagedError: It is not what was written.
        """
        data = read_checked(self._directory, segment.ledger, RERECORD)
        path = self._directory / segment.ledger.name
        try:
            found = from_parquet(data)
        except (pa.ArrowException, OSError, TypeError, ValueError) as error:
            raise DamagedError(path, f"not a ledger ({error})", RERECORD) from None
        steps = range(segment.first_step, segment.first_step + segment.steps)
        if any(row.step not in steps for row in found):
            raise DamagedError(path, "it has steps of another segment", RERECORD)
        return found

    def passes(self, layer: str) -> Sequence[PassRecord]:
        """A layer's passes, in the order of its row ids."""
        return self._passes[layer]

    def rows(self, layer: str) -> int:
        """How many rows a layer has."""
        return sum(record.rows for record in self._passes[layer])

    def dropped(self, layer: str) -> dict[str, int]:
        """How many rows of a layer training had that are not recorded, by reason
        (`dualform.store.sampling.REASONS`)."""
        return counted([item for segment in self.segments for item in segment.dropped], layer)

    def block_rows(self, block: int) -> int:
        """How many rows a block of metadata has."""
        return self._block_rows[block]

    def read_rows(self, blocks: Sequence[int]) -> pa.Table:
        """The metadata of these blocks, one after the other.

        Returns:
            A table with `schema`; null where a column was not annotated.

        Raises:
            DamagedError: A metadata file is not what was written.
        """
        parts: list[pa.Table] = []
        for block in blocks:
            number, start = self._block_place[block]
            table = self._rows_of(self.segments[number])
            parts.append(table.slice(start, self._block_rows[block]))
        return pa.concat_tables(parts) if parts else self.schema.empty_table()

    def read_keys(self, record: PassRecord, out: memoryview | np.ndarray) -> None:
        """Read a pass's keys into `out`, float32 [rows, d_in], in whatever encoding they are.

        Raises:
            DamagedError: They are not what was written.
            ValueError: `out` has another size.
        """
        self._widen(record, record.keys, out)

    def read_values(self, record: PassRecord, out: memoryview | np.ndarray) -> None:
        """Read a pass's values into `out`, float32 [rows, d_out], likewise.

        Raises:
            DamagedError: They are not what was written.
            ValueError: `out` has another size, or the recording holds keys alone.
        """
        self._widen(record, self._values_of(record), out)

    def stored_keys(self, record: PassRecord, part: slice = slice(None)) -> np.ndarray:
        """A pass's keys, or some of them, as they are stored: [rows, d_in] of their encoding's
        NumPy dtype. Of keys that are cut from inputs no others are made.

        Raises:
            DamagedError: They are not what was written.
        """
        patches = record.keys.patches
        if patches is None:
            return self._stored(record, record.keys)[part]
        if self._inputs is None or self._inputs[0] != record:
            self._inputs = None  # let go of before others are read
            self._inputs = record, self._stored(record, record.keys)
        return patches.cut(self._inputs[1], part)

    def stored_values(self, record: PassRecord) -> np.ndarray:
        """A pass's values likewise, [rows, d_out].

        Raises:
            DamagedError: They are not what was written.
            ValueError: The recording holds keys alone.
        """
        return self._stored(record, self._values_of(record))

    def read_ahead(self, segment: int) -> None:
        """Ask the operating system to read a segment's passes into the page cache.

        Returns before it has, mostly; whoever reads passes out of order saves waiting for the disk.
        """
        if hasattr(os, "posix_fadvise"):
            with reading(self._records.path(segment)):
                fd = os.open(self._records.path(segment), os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def initial(self) -> dict[str, np.ndarray]:
        """Weights, biases and momentum buffers ("momentum:<parameter>") before the first step.

        Raises:
            NotFoundError: The recording was cut off before its first commit.
            DamagedError: The file is not what was written.
        """
        if not self.segments:
            raise NotFoundError(f"nothing was committed to {self.path}: record again")
        return self._state(self.path, self.segments[0].initial)

    def final(self) -> dict[str, np.ndarray] | None:
        """The same after the last step; None where the recording is not complete."""
        return None if self._final is None else self._state(self.path, self._final)

    def states(self) -> list[tuple[int, Callable[[], dict[str, np.ndarray]]]]:
        """States kept on the way: after how many steps, ascending, and what reads it.

        A state has what `initial` has, for the layers that were exact up to there; reading raises
        DamagedError where the file is not what was written.
        """
        return [
            (step, functools.partial(self._state, self._directory, entry))
            for segment in self.segments
            for step, entry in segment.states
        ]

    def example_tables(self) -> Iterator[pa.Table]:
        """Payloads as they were added, a few at a time: id (int64 or string), kind ("png", "bytes",
        "text"), data. Text is UTF-8.

        Raises:
            DamagedError: A file is not what was written.
        """
        of_ids: pa.DataType | None = None
        for segment in self.segments:
            for entry in segment.examples:
                directory = self.path / EXAMPLES
                with opened(directory, entry, RERECORD) as fd:
                    check_digest_of(fd, directory, entry, RERECORD)
                    try:
                        for batch in batches(fd):
                            check_columns(batch, PAYLOADS)
                            of_ids = of_ids or batch.schema.field("id").type
                            if batch.schema.field("id").type != of_ids:
                                raise pa.ArrowInvalid(f"ids that are not {of_ids}, as others are")
                            if not {*batch.column("kind").to_pylist()} <= {*PAYLOAD_KINDS}:
                                raise pa.ArrowInvalid("payloads of a kind that there is not")
                            yield pa.Table.from_batches([batch])
                    except (pa.ArrowException, OSError) as error:
                        what = f"not payloads ({error})"
                        raise DamagedError(directory / entry.name, what, RERECORD) from None

    def _state(self, directory: Path, entry: FileEntry) -> dict[str, np.ndarray]:
        data = read_checked(directory, entry, RERECORD)
        try:
            state = dict(load_safetensors(data))
        except Exception as error:  # safetensors has errors of its own, and its readers' others
            what = f"not a state ({error})"
            raise DamagedError(directory / entry.name, what, RERECORD) from None
        layers = self.manifest.layers.values()
        known = {name for spec in layers for name in spec.parameters}
        # What belongs to an optimizer has a colon: "momentum:<parameter>".
        strange = [name for name in state if name not in known and ":" not in name]
        if strange:
            what = f"it holds {', '.join(strange[:3])}, which the manifest does not name"
            raise DamagedError(directory / entry.name, what, RERECORD)
        for spec in layers:
            shapes = {spec.weight: (spec.d_out, spec.d_in), spec.bias: (spec.d_out,)}
            for name, shape in shapes.items():
                actual = shape if name not in state else state[name].shape
                if actual != shape:
                    what = f"{name} is {list(actual)} where the manifest says {list(shape)}"
                    raise DamagedError(directory / entry.name, what, RERECORD)
        return state

    def _rows_of(self, segment: SegmentTable) -> pa.Table:
        if self._open_rows is None or self._open_rows[0] != segment.number:
            table = self.metadata_of(segment)
            arrays = [
                table[field.name]
                if field.name in table.column_names
                else pa.chunked_array([pa.nulls(len(table), field.type)])
                for field in self.schema
            ]
            self._open_rows = (segment.number, pa.Table.from_arrays(arrays, schema=self.schema))
        return self._open_rows[1]

    def metadata_of(self, segment: SegmentTable) -> pa.Table:
        """The metadata of a segment's rows.

        Raises:
            DamagedError: It is not what was written, or not that of the segment's passes.
        """
        path = self._directory / segment.rows.name
        data = read_checked(self._directory, segment.rows, RERECORD)
        try:
            table = read_parquet(data, row_schema(segment.columns), rows=sum(segment.block_rows))
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(path, f"not metadata of rows ({error})", RERECORD) from None
        steps = np.full(len(segment.block_rows), -1, np.int64)
        for _, record in segment.passes:
            steps[record.block - segment.first_block] = record.step
        known = np.repeat(steps, segment.block_rows)
        if not np.array_equal(known[known >= 0], table["step"].to_numpy()[known >= 0]):
            raise DamagedError(path, "its rows' steps are not those of its passes", RERECORD)
        return table

    def _values_of(self, record: PassRecord) -> Span:
        if record.values is None:
            raise ValueError(
                f"{self.path} holds keys alone; record with Recorder(..., values=True)"
            )
        return record.values

    def _stored(self, record: PassRecord, span: Span) -> np.ndarray:
        stored = encoding(span.encoding).stored
        found = np.empty(span.nbytes // stored.itemsize, stored)
        rows = span.inputs(record.rows)
        self._records.read(record.segment, span, rows, _bytes(found))
        return found.reshape(rows, -1) if rows else found.reshape(0, 1)

    def _widen(self, record: PassRecord, span: Span, out: memoryview | np.ndarray) -> None:
        view, kind = _bytes(out), encoding(span.encoding)
        d, rest = divmod(len(view), max(1, FLOAT32.row_bytes(record.rows)))
        if rest or kind.row_bytes(d) * record.rows != span.whole:
            numbers = span.whole // kind.stored.itemsize
            raise ValueError(
                f"the record has {record.rows:,} rows of {span.encoding} in {numbers:,} numbers, "
                f"{FLOAT32.row_bytes(numbers):,} bytes as float32; `out` has {len(view):,} bytes"
            )
        if span.patches is not None:
            rows = np.frombuffer(view, FLOAT32.stored).reshape(record.rows, d)
            for part in parts_of(0, record.rows, d):
                rows[part] = kind.widen(self.stored_keys(record, part), d)
            return
        if span.encoding == FLOAT32.name:
            self._records.read(record.segment, span, record.rows, view)
            return
        try:
            view[:] = _bytes(kind.widen(self._stored(record, span), d))
        except ValueError as error:
            path = self._records.path(record.segment)
            what = f"the record at byte {span.offset:,} is not {span.encoding} ({error})"
            raise DamagedError(path, what, RERECORD) from None


def parts_of(start: int, stop: int, d: int) -> Iterator[slice]:
    """Rows [start, stop) of d numbers, a few MB at a time."""
    step = max(1, _PART_BYTES // FLOAT32.row_bytes(d))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _bytes(out: memoryview | np.ndarray) -> memoryview:
    given = out.data if isinstance(out, np.ndarray) else out
    return given.cast("B") if given.nbytes else memoryview(b"")
