"""Writing a recording: records by direct I/O into the open segment, commits, orderly closing.

One thread writes. Nothing that was committed is touched again; what a crash leaves of an open
segment is ignored by the reader.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from safetensors.numpy import save as safetensors

from dualform.store.errors import ExistsError
from dualform.store.files import FileEntry, sync_directory, write_atomic, write_sealed
from dualform.store.ledger import InexactMark, LedgerRow, to_parquet
from dualform.store.parquet import write_parquet
from dualform.store.recording_bin import BinFile, Record, Written
from dualform.store.recording_format import (
    CLOSED,
    EXAMPLES,
    FINAL,
    INITIAL,
    MANIFEST,
    SEGMENTS,
    RecordingManifest,
)
from dualform.store.recording_packer import Packer
from dualform.store.row_metadata import Block, blocks_table, column_types
from dualform.store.sampling import DroppedRows
from dualform.store.segment_table import PassRecord, SegmentTable, segment_name

__all__ = ["Examples", "Record", "RecordingWriter", "StepPass"]

_PAYLOAD_BYTES = 4 << 20
"""Of a row group of payloads."""


class StepPass(NamedTuple):
    """One layer's rows of one forward pass, to be written: `block` counts inside the step."""

    layer: str
    rows: int
    block: int
    keys: Record
    values: Record | None


@dataclass(frozen=True)
class Examples:
    """Payloads by example id: all ids int or all str; kind is "png", "bytes" or "text"."""

    ids: Sequence[int] | Sequence[str]
    kinds: Sequence[str]
    data: Sequence[bytes]


@dataclass
class _OpenSegment:
    """What was appended since the last commit."""

    first_step: int
    bin: BinFile
    rows: int = 0  # of metadata
    passes: list[tuple[str, PassRecord]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    ledger: list[LedgerRow] = field(default_factory=list)
    marks: list[tuple[str, InexactMark]] = field(default_factory=list)
    examples: list[FileEntry] = field(default_factory=list)
    states: list[tuple[int, FileEntry]] = field(default_factory=list)
    dropped: list[DroppedRows] = field(default_factory=list)


class RecordingWriter:
    """Writes one recording from its manifest to its closing.

    Args:
        path: Must not exist.
        manifest: Written at once. Where it says so, records are packed.

    Attributes:
        steps: How many were appended.

    Raises:
        ExistsError: The path is there already.
    """

    def __init__(self, path: Path, manifest: RecordingManifest) -> None:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not was_never_started(path):
                raise ExistsError(
                    f"{path} exists, and a recording never overwrites: choose another path, remove "
                    "it first, or continue it with Recorder(..., resume_at_step=...) from a "
                    "checkpoint (of step 0 where nothing was committed)"
                ) from None
        try:
            (path / SEGMENTS).mkdir(exist_ok=True)
            (path / EXAMPLES).mkdir(exist_ok=True)
            manifest.save(path)
            sync_directory(path.parent)
            self._set_up(path, manifest, (), manifest.packed)
        except BaseException:  # a path that could be neither started nor continued
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def resume(
        cls,
        path: Path,
        manifest: RecordingManifest,
        segments: Sequence[SegmentTable],
        packed: bool = False,
    ) -> RecordingWriter:
        """Go on after the segments that `cut_recording` left.

        Args:
            path: The recording.
            manifest: As it is there.
            segments: All that it has.
            packed: Whether records are packed from now on, whatever was before.
        """
        if packed and not manifest.packed:  # before anything is packed
            manifest = replace(manifest, packed=True)
            manifest.save(path)
        writer = cls.__new__(cls)
        writer._set_up(path, manifest, segments, packed)
        return writer

    def _set_up(
        self,
        path: Path,
        manifest: RecordingManifest,
        segments: Sequence[SegmentTable],
        packed: bool,
    ) -> None:
        self.path = path
        self._packer = Packer() if packed else None
        self._manifest = manifest
        self._directory = path / SEGMENTS
        self._initial: FileEntry | None = segments[0].initial if segments else None
        files = [int(Path(entry.name).stem) for segment in segments for entry in segment.examples]
        self._example_files = max(files, default=-1) + 1
        self._segments = len(segments)
        self.steps = sum(segment.steps for segment in segments)
        self._blocks = sum(len(segment.block_rows) for segment in segments)
        self._columns: dict[str, str] = {}
        for segment in segments:
            self._columns.update(segment.columns)
        blocks_table([], {})  # pyarrow's first array imports pandas, which takes its time: now
        self._open = self._new_segment()

    @property
    def has_initial(self) -> bool:
        """Whether the initial state is written."""
        return self._initial is not None

    @property
    def segment_bytes(self) -> int:
        """Bytes in the open segment's .bin file, those not yet flushed included."""
        return self._open.bin.size

    @property
    def segment_rows(self) -> int:
        """Rows of metadata in the open segment."""
        return self._open.rows

    def write_initial(self, state: Mapping[str, np.ndarray]) -> None:
        """Write the state before the first step; due before the first commit.

        Args:
            state: Arrays by parameter name; momentum buffers as "momentum:<parameter>".
        """
        self._initial = write_atomic(self.path / INITIAL, safetensors(dict(state)))

    def append(
        self,
        passes: Sequence[StepPass],
        blocks: Sequence[Block],
        ledger: Sequence[LedgerRow],
        marks: Sequence[tuple[str, InexactMark]] = (),
        dropped: Sequence[DroppedRows] = (),
    ) -> None:
        """Add one step to the open segment. Its memory is used until the next `flush`.

        Keys that several layers saw (q, k and v of one input) are written once.
        """
        written: Written = {}
        place = self._open.bin.place
        for item in passes:
            keys = self._open.bin.place_once((item.layer, False), item.keys, written)
            values = None if item.values is None else place((item.layer, True), item.values)
            block = self._blocks + len(self._open.blocks) + item.block
            record = PassRecord(self._segments, self.steps, item.rows, block, keys, values)
            if keys.patches is not None and not self._manifest.patches:  # before it is committed
                self._manifest = replace(self._manifest, patches=True)
                self._manifest.save(self.path)
            self._open.passes.append((item.layer, record))
        self._open.rows += sum(block.rows for block in blocks)
        self._open.blocks.extend(blocks)
        self._open.ledger.extend(ledger)
        self._open.marks.extend(marks)
        self._open.dropped.extend(dropped)
        self.steps += 1

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Keep the state after the steps so far, as `write_initial`'s; committed with them."""
        path = self._part(f"state-{self.steps}.safetensors")
        self._open.states.append((self.steps, write_atomic(path, safetensors(dict(state)))))

    def mark(self, marks: Sequence[tuple[str, InexactMark]]) -> None:
        """Note inexact layers outside a step."""
        self._open.marks.extend(marks)

    def add_examples(self, examples: Examples) -> None:
        """Write payloads; the next commit makes them part of the recording."""
        name = f"{self._example_files:06d}.parquet"
        id_type = pa.string() if isinstance(examples.ids[0], str) else pa.int64()
        table = pa.table(
            {
                "id": pa.array(examples.ids, id_type),
                "kind": pa.array(examples.kinds, pa.string()),
                "data": pa.array(examples.data, pa.binary()),
            }
        )
        self._open.examples.append(
            write_atomic(self.path / EXAMPLES / name, write_parquet(table, _PAYLOAD_BYTES))
        )
        self._example_files += 1

    def flush(self) -> None:
        """Hand what was appended to the disk, without committing it. The memory is free after."""
        self._open.bin.flush()

    def commit(self) -> None:
        """End the open segment: after this its steps survive a crash. Nothing open: no effect."""
        if self.steps == self._open.first_step and not (self._open.marks or self._open.examples):
            return
        self._commit()

    def close(self, final: Mapping[str, np.ndarray]) -> None:
        """Commit, write the final state, and declare the recording complete.

        Args:
            final: As `write_initial`'s state.
        """
        if self._initial is None:
            self.write_initial(final)
        if self._segments == 0:
            self._commit()
        self.commit()
        entry = write_atomic(self.path / FINAL, safetensors(dict(final)))
        closed = {"steps": self.steps, "segments": self._segments, "final": entry.to_json()}
        write_sealed(self.path / CLOSED, closed)

    def abandon(self) -> None:
        """Let go of the open segment after a failed write. What was committed stays readable."""
        self._open.bin.abandon()

    def _commit(self) -> None:
        if self._initial is None:
            raise RuntimeError("write_initial() is due before the first commit")
        bin_bytes = self._open.bin.finish()
        self._columns = {**self._columns, **column_types(self._open.blocks)}
        rows = blocks_table(self._open.blocks, self._columns)
        SegmentTable(
            number=self._segments,
            first_step=self._open.first_step,
            steps=self.steps - self._open.first_step,
            initial=self._initial,
            bin_bytes=bin_bytes,
            rows=write_atomic(self._part("rows.parquet"), write_parquet(rows)),
            ledger=write_atomic(self._part("ledger.parquet"), to_parquet(self._open.ledger)),
            passes=self._open.passes,
            first_block=self._blocks,
            block_rows=[block.rows for block in self._open.blocks],
            columns=self._columns,
            marks=self._open.marks,
            examples=self._open.examples,
            states=self._open.states,
            dropped=self._open.dropped,
        ).save(self._directory, self._manifest.layers)
        self._segments += 1
        self._blocks += len(self._open.blocks)
        self._open = self._new_segment()

    def _new_segment(self) -> _OpenSegment:
        return _OpenSegment(self.steps, BinFile(self._part("bin"), self._packer, self._segments))

    def _part(self, suffix: str) -> Path:
        return self._directory / segment_name(self._segments, suffix)


def was_never_started(path: Path) -> bool:
    """Whether a start was broken off here before the manifest was whole; nothing else is there."""
    if not (path / SEGMENTS).is_dir():
        return False
    found = {entry.relative_to(path).as_posix() for entry in path.rglob("*")}
    return found <= {SEGMENTS, EXAMPLES, f"{MANIFEST}.tmp"}
