"""Which segments of a recording are committed: found, read, and checked to follow one another.

A segment is committed once its table is there; recording.py reads what the tables name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dualform.store.errors import DamagedError
from dualform.store.fields import Fields, wrong
from dualform.store.files import FileEntry, check_size, is_there
from dualform.store.recording_format import (
    CLOSED,
    EXAMPLES,
    FINAL,
    RERECORD,
    SEGMENTS,
    RecordingManifest,
    read_sealed,
)
from dualform.store.segment_table import SegmentTable, segment_name

_TABLE = re.compile(r"([0-9]{6,12})\.json")


def committed(
    path: Path, manifest: RecordingManifest
) -> tuple[list[SegmentTable], FileEntry | None]:
    """The tables of a recording's committed segments, in order, and its final state.

    Args:
        path: The recording's directory.
        manifest: The recording's.

    Returns:
        The tables, and the file of the final state: None where the recording was cut off.

    Raises:
        DamagedError: A committed file is missing, truncated or altered; names the file.
    """
    closed = _read_closed(path) if is_there(path / CLOSED) else None
    numbers = _segment_numbers(path)
    expected = len(numbers) if closed is None else closed.segments
    last = max(numbers, default=-1)
    missing = next((n for n in range(last + 1) if n not in numbers), last + 1)
    if missing < max(expected, last + 1):
        raise DamagedError(path / SEGMENTS / segment_name(missing, "json"), "missing", RERECORD)
    segments = [_load_segment(path, number, manifest) for number in sorted(numbers)]
    _check_sequence(path, segments, None if closed is None else closed.steps)
    if closed is None:
        return segments, None
    check_size(path, closed.final, RERECORD)
    return segments, closed.final


class _Closed(NamedTuple):
    """What `closed.json` says."""

    steps: int
    segments: int
    final: FileEntry


def _read_closed(path: Path) -> _Closed:
    data = Fields(read_sealed(path / CLOSED))
    try:
        closed = _Closed(data.integer("steps"), data.integer("segments"), data.entry("final"))
        if closed.final.name != FINAL:
            raise wrong("final.name", closed.final.name, repr(FINAL))
        return closed
    except ValueError as error:
        raise DamagedError(path / CLOSED, f"a field is wrong: {error}", RERECORD) from None


def _segment_numbers(path: Path) -> set[int]:
    """The numbers of the segments that are committed."""
    try:
        names = os.listdir(path / SEGMENTS)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(path / SEGMENTS, "missing", RERECORD) from None
    return {int(found[1]) for name in names if (found := _TABLE.fullmatch(name))}


def _load_segment(path: Path, number: int, manifest: RecordingManifest) -> SegmentTable:
    directory = path / SEGMENTS
    name = directory / segment_name(number, "json")
    segment = SegmentTable.load(name, manifest.layers)
    entry = FileEntry(segment.bin, segment.bin_bytes, "")
    for part in (entry, segment.rows, segment.ledger, *(file for _, file in segment.states)):
        check_size(directory, part, RERECORD)
    check_size(path, segment.initial, RERECORD)
    for part in segment.examples:
        check_size(path / EXAMPLES, part, RERECORD)
    for layer, record in segment.passes:
        if (record.values is not None) != manifest.values:
            what = f"a pass of layer {layer!r} {'lacks' if manifest.values else 'has'} values"
            raise DamagedError(name, what, RERECORD)
    return segment


def _check_sequence(path: Path, segments: Sequence[SegmentTable], steps: int | None) -> None:
    step = block = 0
    for segment in segments:
        name = path / SEGMENTS / segment_name(segment.number, "json")
        if (segment.first_step, segment.first_block) != (step, block):
            raise DamagedError(name, "does not follow the segment before it", RERECORD)
        if segment.initial != segments[0].initial:
            raise DamagedError(name, "initial is not the first segment's", RERECORD)
        step += segment.steps
        block += len(segment.block_rows)
    if steps is not None and steps != step:
        raise DamagedError(path / CLOSED, f"{steps} steps where segments hold {step}", RERECORD)
