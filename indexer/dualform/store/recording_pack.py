"""Packing a recording that is there: segment by segment, in its place.

A segment's packed file is written beside the old one and read back, then its table is replaced,
which commits it, and then the old file goes. A kill at any moment leaves a valid recording, some of
whose segments are packed; the same call goes on with the others.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dualform.store.errors import NoSpaceError, WriteError
from dualform.store.files import FAILING, FULL, why_full
from dualform.store.lock import WriterLock
from dualform.store.packing import PLAIN
from dualform.store.recording import Recording
from dualform.store.recording_again import AGAIN
from dualform.store.recording_bin import BinFile, Record
from dualform.store.recording_cut import sweep
from dualform.store.recording_format import SEGMENTS
from dualform.store.recording_packer import Packer
from dualform.store.recording_records import RecordReader
from dualform.store.segment_table import PassRecord, SegmentTable, Span, padded, segment_name

_PACKED = "packed.bin"
_FLUSH_BYTES = 16 << 20

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def pack_recording(path: Path, progress: Progress | None = None) -> tuple[int, int]:
    """Pack what of a recording is not packed yet; what readers get stays the same, bit for bit.

    Not to be called while somebody reads it: old files go.

    Args:
        path: A recording, complete or not, that nobody writes.
        progress: Told of unpacked bytes.

    Returns:
        What its keys and values took before, and take now, in bytes.

    Raises:
        BusyError: It is being recorded.
        NotFoundError, VersionError: There is none, or one of a newer dualform.
        DamagedError: A record is not what was written; its segment stays as it is.
        NoSpaceError: The disk can't hold a packed segment beside the old one, which stays.
        WriteError: The disk fails; likewise.
    """
    Recording.open(path).close()  # so that nothing is locked, nor made, where there is none
    lock = WriterLock(path)
    try:
        with Recording.open(path) as recording:
            return _pack(recording, progress or (lambda done, total: None))
    finally:
        lock.release()


def _pack(recording: Recording, progress: Progress) -> tuple[int, int]:
    path, directory = recording.path, recording.path / SEGMENTS
    segments = list(recording.segments)
    before = sum(segment.bin_bytes for segment in segments)
    kept = _referred_to(directory, segments)
    due = [s.number for s in segments if not _is_packed(s) and s.number not in kept]
    total = sum(segments[number].bin_bytes for number in due)
    if not recording.manifest.packed and due:  # before anything is packed
        replace(recording.manifest, packed=True).save(path)
    sweep(path, segments)
    packer, done = Packer(), 0
    for number in due:
        old = segments[number]
        new = _packed_segment(directory, segments, old, packer)
        new.save(directory, recording.manifest.layers)
        segments[number] = new
        (directory / old.bin).unlink()
        done += old.bin_bytes
        progress(done, total)
    return before, sum(segment.bin_bytes for segment in segments)


def _packed_segment(
    directory: Path, segments: Sequence[SegmentTable], old: SegmentTable, packer: Packer
) -> SegmentTable:
    """Write a segment's records packed, read them back, and return the table that names them."""
    name = segment_name(old.number, _PACKED)
    file = BinFile(directory / name, packer, old.number)
    reader = RecordReader(directory, segments)
    try:
        placed: dict[tuple[Span, bool], Span] = {}
        passes = []
        for layer, record in old.passes:
            spans: list[Span | None] = []
            for span, values in ((record.keys, False), (record.values, True)):
                if span is None:
                    spans.append(None)
                    continue
                lies = span._replace(patches=None), values  # layers may cut one input each its way
                if lies not in placed:
                    memory = _memory(reader, old.number, span, record.rows)
                    rows = 0 if values else span.inputs(record.rows)
                    raw = Record(memory, span.nbytes, span.xxh3, span.encoding, rows)
                    placed[lies] = file.place((layer, values), raw)
                    if file.size - file.written >= _FLUSH_BYTES:
                        file.flush()
                spans.append(placed[lies]._replace(patches=span.patches))
            keys, of_values = spans
            assert keys is not None
            passes.append((layer, record._replace(keys=keys, values=of_values)))
        new = replace(old, passes=passes, bin_bytes=file.finish(), bin=name)
        _check(directory, [*segments[: old.number], new], passes)
        return new
    except BaseException as error:
        file.abandon()
        (directory / name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise NoSpaceError(
                f"{directory / old.bin}: {why_full(error)} for it packed beside it. It stays as it "
                "is, and segments that are packed stay packed: free some space and pack again"
            ) from None
        if isinstance(error, OSError) and error.errno in FAILING:
            raise WriteError(
                f"{directory / old.bin}: the disk failed ({error.strerror}) while it was packed "
                "beside it. It stays as it is, and segments that are packed stay packed: mend the "
                "disk and pack again"
            ) from error
        raise
    finally:
        reader.close()


def _check(
    directory: Path, segments: Sequence[SegmentTable], passes: Sequence[tuple[str, PassRecord]]
) -> None:
    """Read a segment back, each record by the digest that it had."""
    reader = RecordReader(directory, segments)
    try:
        for _, record in passes:
            for span in (record.keys, record.values):
                if span is not None:
                    _memory(reader, record.segment, span, record.rows)
    finally:
        reader.close()


def _memory(reader: RecordReader, segment: int, span: Span, rows: int) -> memoryview:
    """A record's numbers in page-aligned memory, padded with zeros to whole pages."""
    memory = memoryview(mmap.mmap(-1, max(1, padded(span.nbytes))))
    reader.read(segment, span, span.inputs(rows), memory[: span.nbytes])
    return memory[: padded(span.nbytes)]


def _is_packed(segment: SegmentTable) -> bool:
    return segment.bin == segment_name(segment.number, _PACKED) or any(
        span is not None and span.packing != PLAIN
        for _, record in segment.passes
        for span in (record.keys, record.values)
    )


def _referred_to(directory: Path, segments: Sequence[SegmentTable]) -> set[int]:
    """The segments whose rows later records name: they stay as they are."""
    reader, found = RecordReader(directory, segments), set()
    try:
        for segment in segments:
            for _, record in segment.passes:
                if record.keys.packing == AGAIN:
                    inputs = record.keys.inputs(record.rows)
                    addresses = reader.addresses(segment.number, record.keys, inputs)
                    found.update(np.unique(addresses["segment"]).tolist())
    finally:
        reader.close()
    return found
