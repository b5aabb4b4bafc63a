"""What of a recording is there, as digests: whether one that is read again only went on.

A recording that was resumed at an earlier step has other segments from there on. A chain of digests
tells: each segment's is of all before it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualform.store.files import digest
from dualform.store.recording import Recording
from dualform.store.recording_format import MANIFEST
from dualform.store.segment_table import PassRecord

Chains = list[list[str]]
"""Of each rank's recording, the digest of its segments up to each."""

Mark = list[list[Any]]
"""Of each rank's recording, how many segments, and the digest up to the last of them."""

Origin = list[dict[str, Any]]
"""Of each rank's recording, what stays the same whatever of it is taken back."""


def chains_of(source: Recording) -> Chains:
    """Digests of what is committed now."""
    return [_chain(part) for part in source.recordings]


def mark_of(chains: Chains, segments: Sequence[int] | None = None) -> Mark:
    """What is there now, or was after so many segments of each."""
    counts = [len(chain) for chain in chains] if segments is None else segments
    return [
        [count, chain[count - 1] if count else ""]
        for count, chain in zip(counts, chains, strict=True)
    ]


def begins_with(chains: Chains, mark: Mark) -> bool:
    """Whether what was there at the mark is there still."""
    if len(mark) != len(chains):
        return False
    counts = [int(count) for count, _ in mark]
    inside = all(count <= len(chain) for count, chain in zip(counts, chains, strict=True))
    return inside and mark_of(chains, counts) == mark


def origin_of(source: Recording) -> Origin:
    """How the training began that is recorded.

    A run that is resumed at an earlier step keeps at least its first, with what that step read and
    how it moved the weights. One that is resumed at step 0 keeps the file of its manifest alone.
    """
    return [
        {
            "initial": part.segments[0].initial.xxh3,
            "step": _first_step(part),
            "manifest": _file(part.path / MANIFEST),
        }
        for part in source.recordings
    ]


def why_another(origin: Origin, known: Origin) -> str:
    """In what a recording is of another training than one that is known; empty where it is of the
    same."""
    if len(origin) != len(known):
        return f"which was made by {len(known)} processes, and this one by {len(origin)}"
    pairs = list(zip(origin, known, strict=True))
    if any(one["initial"] != other["initial"] for one, other in pairs):
        return "which began with other weights"
    if any(
        one["step"] != other["step"] and one["manifest"] != other["manifest"]
        for one, other in pairs
    ):
        return "which began with the same weights and took another first step"
    return ""


def _first_step(source: Recording) -> str:
    """A digest of the first step's rows, and of how it moved each parameter."""
    segment = next(segment for segment in source.segments if segment.steps)
    first = segment.first_step
    parts = [repr(row) for row in source.ledger_of(segment) if row.step == first]
    parts += [_of_pass(layer, record) for layer, record in segment.passes if record.step == first]
    return digest("\n".join(parts).encode())


def _file(path: Path) -> list[int]:
    """Which file it is, as long as nobody writes it again."""
    status = path.stat()
    return [status.st_ino, status.st_mtime_ns]


def _of_pass(layer: str, record: PassRecord) -> str:
    values = "" if record.values is None else record.values.xxh3
    return f"{layer} {record.step} {record.rows} {record.keys.xxh3} {values}"


def _chain(source: Recording) -> list[str]:
    chain: list[str] = []
    for segment in source.segments:
        of_passes = (_of_pass(layer, record) for layer, record in segment.passes)
        parts = (
            chain[-1] if chain else "",
            segment.initial.xxh3,
            segment.rows.xxh3,
            segment.ledger.xxh3,
            *(file.xxh3 for _, file in segment.states),
            *(file.xxh3 for file in segment.examples),
            *of_passes,
        )
        chain.append(digest("\n".join(parts).encode()))
    return chain
