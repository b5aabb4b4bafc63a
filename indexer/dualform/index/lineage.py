"""What of a recording is there, as digests: whether one that is read again only went on.

A recording that was resumed at an earlier step has other segments from there on. A chain of digests
tells: each segment's is of all before it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualform.store.files import digest
from dualform.store.recording import Recording

Chains = list[list[str]]
"""Of each rank's recording, the digest of its segments up to each."""

Mark = list[list[Any]]
"""Of each rank's recording, how many segments, and the digest up to the last of them."""


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


def _chain(source: Recording) -> list[str]:
    chain: list[str] = []
    for segment in source.segments:
        of_passes = (
            f"{layer} {record.step} {record.rows} {record.keys.xxh3}"
            f" {'' if record.values is None else record.values.xxh3}"
            for layer, record in segment.passes
        )
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
