"""Cutting a recording back to an earlier step, so that a resumed run can go on from there.

A kill at any moment leaves a valid recording: of the steps before or after the cut, or of some
between, but never complete. What no table names any more is removed at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dualform.store.files import sync_directory, write_atomic
from dualform.store.ledger import to_parquet
from dualform.store.parquet import write_parquet
from dualform.store.recording import Recording
from dualform.store.recording_format import CLOSED, EXAMPLES, FINAL, SEGMENTS
from dualform.store.segment_table import SegmentTable, segment_name


def cut_recording(recording: Recording, step: int) -> list[SegmentTable]:
    """Keep a recording's first `step` steps and drop all else, in place.

    Marks that name an earlier step stay, wherever they were raised. Where step is 0, nothing stays
    but the manifest.

    Args:
        recording: Not used by anyone else; not to be used afterwards.
        step: At most `recording.steps`.

    Returns:
        The segments that stay, for `RecordingWriter.resume`.

    Raises:
        ValueError: No such step.
        DamagedError: The segment that holds the step is not what was written; nothing was dropped.
    """
    if not 0 <= step <= recording.steps:
        raise ValueError(f"{recording.path} holds {recording.steps} steps: none after {step}")
    recording.close()
    path, directory = recording.path, recording.path / SEGMENTS
    layers = recording.manifest.layers
    kept = [segment for segment in recording.segments if segment.first_step < step]
    dropped = recording.segments[len(kept) :]
    if kept:
        last = kept[-1]
        marks = [mark for segment in dropped for mark in segment.marks]
        late = [
            (name, mark)
            for name, mark in marks
            if mark.from_step < step and (name, mark) not in last.marks
        ]
        cut = _cut(recording, replace(last, marks=[*last.marks, *late]), step)
        if late:  # before the segments go that have them
            replace(last, marks=[*last.marks, *late]).save(directory, layers)
    for name in (CLOSED, FINAL):
        (path / name).unlink(missing_ok=True)
        sync_directory(path)
    for segment in reversed(dropped):
        (directory / segment_name(segment.number, "json")).unlink()
        sync_directory(directory)
    if kept and cut != last:
        cut.save(directory, layers)
        kept[-1] = cut
    sweep(path, kept)
    return kept


def _cut(recording: Recording, segment: SegmentTable, step: int) -> SegmentTable:
    """The segment's steps before this one, with files of their own; its .bin file stays whole."""
    marks = [(name, mark) for name, mark in segment.marks if mark.from_step < step]
    if segment.first_step + segment.steps <= step:
        return replace(segment, marks=marks)
    passes = [(name, record) for name, record in segment.passes if record.step < step]
    blocks = max((record.block + 1 for _, record in passes), default=segment.first_block)
    block_rows = segment.block_rows[: blocks - segment.first_block]
    rows, ledger = recording.metadata_of(segment), recording.ledger_of(segment)
    directory = recording.path / SEGMENTS
    stem = segment_name(segment.number, f"cut-{step}")
    return replace(
        segment,
        steps=step - segment.first_step,
        rows=write_atomic(
            directory / f"{stem}.rows.parquet", write_parquet(rows.slice(0, sum(block_rows)))
        ),
        ledger=write_atomic(
            directory / f"{stem}.ledger.parquet",
            to_parquet([row for row in ledger if row.step < step]),
        ),
        passes=passes,
        block_rows=block_rows,
        marks=marks,
        states=[(after, file) for after, file in segment.states if after <= step],
        dropped=[item for item in segment.dropped if item.step < step],
    )


def sweep(path: Path, kept: Sequence[SegmentTable]) -> None:
    """Remove the files that no segment names."""
    segments, examples = set(), set()
    for segment in kept:
        segments |= {segment_name(segment.number, "json"), segment.bin}
        segments |= {segment.rows.name, segment.ledger.name}
        segments |= {file.name for _, file in segment.states}
        examples |= {file.name for file in segment.examples}
    for directory, names in ((path / SEGMENTS, segments), (path / EXAMPLES, examples)):
        for file in directory.iterdir():
            if file.name not in names:
                file.unlink()
        sync_directory(directory)
