"""What a build is going to do with a recording: its layers, row spaces, shards and sums.

However the shards are made (one after the other, by several machines, or while training runs), they
are those that the plan says, and so the index is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dualform.index.equal_keys import MOST_KEYS
from dualform.index.errors import BuildError
from dualform.index.layer import LayerSource
from dualform.index.parts import PartsPlan, plan_parts
from dualform.index.row_spaces import Space, row_spaces
from dualform.index.row_sum import FollowedSum, RowSums, at_once
from dualform.index.sketch import MIN_D_IN, SAMPLE_ROWS, leading_directions
from dualform.store.encoding import HALVES
from dualform.store.ledger import InexactMark, Ledger
from dualform.store.recording import Recording
from dualform.store.recording_ranks import open_recordings

SHARD_ROWS = 65_536
"""Rows of a shard at most."""

SHARD_BYTES = 256 << 20
"""Bytes of a shard's file at most: where rows are wide, a shard has fewer. The build holds two."""


@dataclass(frozen=True)
class Options:
    """What is asked of a build; see `dualform.index.build_index`."""

    values: bool = True
    shard_rows: int = SHARD_ROWS
    parts: tuple[str, ...] = ()
    round_keys: str | None = None
    pack: bool = False

    def check(self) -> None:
        """Raise BuildError where one can't be."""
        for name in ("values", "pack"):
            if not isinstance(getattr(self, name), bool):
                raise BuildError(f"{name} is {getattr(self, name)!r}; it is True or False")
        if isinstance(self.shard_rows, bool) or not isinstance(self.shard_rows, (int, np.integer)):
            raise BuildError(f"shard_rows is {self.shard_rows!r}; it must be a whole number")
        if self.shard_rows < 1:
            raise BuildError(f"shard_rows is {self.shard_rows}; it must be at least 1")
        if self.round_keys is not None and self.round_keys not in HALVES:
            raise BuildError(f"round_keys is {self.round_keys!r}; it may be {' or '.join(HALVES)}")


class Plan:
    """What becomes of a recording.

    Args:
        source: The recording.
        options: What is asked for.

    Attributes:
        source: The recording.
        options: As given, without values where the recording has none.
        layers: How each layer is read.
        spaces: The row spaces.
        parts: Whose groups' sums are kept.
        ledger: The recording's.
        summed: Layers whose rows are added up.
        at_once: Of these, those that may be while others are.
        nbytes: Of all keys and values.

    Raises:
        BuildError: As `dualform.index.build_index` says.
    """

    def __init__(self, source: Recording, options: Options) -> None:
        if source.steps == 0:
            raise BuildError(
                f"{source.path} holds no committed step yet; there is nothing to index"
            )
        values = options.values and source.manifest.values
        self.source = source
        self.options = replace(options, values=values)
        self.layers: Mapping[str, LayerSource] = {
            name: LayerSource(source, spec, values=values, round_keys=options.round_keys)
            for name, spec in source.manifest.layers.items()
        }
        self.spaces: list[Space] = row_spaces(source)
        self.parts: PartsPlan = plan_parts(source, self.spaces, options.parts, values)
        self.ledger: Ledger = source.ledger()
        self.space_of = {
            name: number for number, space in enumerate(self.spaces) for name in space.layers
        }
        # Marks are the remainder's matter; under an optimizer of no family all that moved is one.
        self.summed: frozenset[str] = frozenset()
        self.at_once: frozenset[str] = frozenset()
        family = self.ledger.family
        if values and family.explains:
            self.summed = frozenset(self.layers)
            counts = {name: self.parts.count(number) for name, number in self.space_of.items()}
            self.at_once = at_once(source.manifest.layers, family, counts)
        self.nbytes = sum(
            space.rows * sum(self.layers[name].row_bytes)
            for space in self.spaces
            for name in space.layers
        )

    def announce(self, say: Callable[[str], None]) -> None:
        """Sentences on what the parts take, on what packing will leave, and on steps that not all
        ranks have."""
        if self.source.cut is not None:
            say(self.source.cut)
        if self.options.parts:
            say(self.parts.describe())
        if self.options.pack:
            left = self.packed_bytes()
            say(
                f"keys and values take {self.nbytes / 2**20:,.1f} MiB, packed about "
                f"{left / 2**20:,.1f} MiB ({left / max(1, self.nbytes):.2f}), as some passes of "
                "each layer say; answers stay the same, and those that read rows take longer "
                "(docs/packed-index.md)"
            )

    def packed_bytes(self) -> float:
        """About what keys and values take where they are packed: measured on some passes of each
        layer, spread over the recording."""
        total = 0.0
        for space in self.spaces:
            for name in space.layers:
                layer = self.layers[name]
                for values, size in enumerate(layer.row_bytes):
                    if size:
                        total += space.rows * size * layer.share_left(values=bool(values))
        return total

    def rows_per_shard(self, space: Space) -> int:
        """The rows of a shard: fewer than asked for where a file would outgrow its bytes."""
        return max(1, min(int(self.options.shard_rows), SHARD_BYTES // self._widest(space)))

    def shards(self, space: Space) -> list[tuple[int, int]]:
        """Which rows each shard of a space has: its first, and the one after its last."""
        step = self.rows_per_shard(space)
        return [(first, min(first + step, space.rows)) for first in range(0, space.rows, step)]

    @cached_property
    def largest_file(self) -> int:
        """Bytes of the largest file of keys or values."""
        sizes = [
            min(self.rows_per_shard(space), space.rows) * self._widest(space)
            for space in self.spaces
        ]
        return max(sizes, default=0) + 4096

    def _widest(self, space: Space) -> int:
        """Bytes of a row of its layers' keys or values, whichever is more."""
        return max(max(self.layers[name].row_bytes) for name in space.layers)

    def most_keys(self) -> int:
        """How many distinct keys are remembered of a layer."""
        return MOST_KEYS // max(1, len(self.layers))

    def marks(self, name: str) -> list[InexactMark]:
        """What is inexact of a layer, its rounding included."""
        rounded = self.layers[name].mark()
        return [*([] if rounded is None else [rounded]), *self.source.marks.get(name, ())]

    def directions(self, name: str) -> np.ndarray | None:
        """The directions of a layer's sketches, float32 [m, d_in], from passes spread over the
        whole recording; None for none."""
        layer = self.layers[name]
        d = layer.spec.d_in
        if d < MIN_D_IN or layer.encodings[0].numbers(d) < d:  # places are shorter than sketches
            return None
        sample: list[np.ndarray] = []
        rows = 0
        for i in np.random.default_rng(0).permutation(len(layer.passes)):
            if rows >= SAMPLE_ROWS:
                break
            keys = layer.keys(layer.passes[i], slice(SAMPLE_ROWS))
            sample.append(layer.encodings[0].widen(keys, d))
            rows += len(sample[-1])
        return leading_directions(sample) if sample else None

    def row_sum(self, name: str, initial: Mapping[str, np.ndarray]) -> RowSums | FollowedSum:
        """What takes a layer's rows to what they add up to, from the recording's initial state."""
        spec, parts = self.layers[name].spec, self.parts.count(self.space_of[name])
        if not self.ledger.family.scalar:
            return FollowedSum(spec, self.ledger, initial, parts)
        return RowSums(spec, self.ledger, parts)

    def codes(self, number: int, start: int, stop: int) -> np.ndarray:
        """The stored parts of rows [start, stop) of a row space: int32 [columns, rows]."""
        if not self.parts.spaces[number]:
            return np.empty((0, stop - start), np.int32)
        return self.parts.codes(number, self.spaces[number].metadata(self.source, start, stop))

    def add_up(self, name: str, row_sum: RowSums | FollowedSum, start: int, stop: int) -> None:
        """Take some of a layer's shards, rows [start, stop), to what all add up to: they are read
        again, and come as they do while files are written."""
        number = self.space_of[name]
        space, layer = self.spaces[number], self.layers[name]
        for first, end in self.shards(space):
            if start <= first < stop:
                layer.add_rows(row_sum, space, first, end, self.codes(number, first, end))

    def shards_of(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The shards of a row space: number, first row, and the row after the last."""
        for shard, (start, stop) in enumerate(self.shards(self.spaces[number])):
            yield shard, start, stop


def make_plan(recordings: Path | str | Sequence[Path | str], options: Options) -> Plan:
    """Open recordings and plan their index.

    Raises:
        BuildError, dualform.store.StoreError: As `dualform.index.build_index` says.
    """
    options.check()
    given = [recordings] if isinstance(recordings, (str, Path)) else recordings
    return Plan(open_recordings([Path(path) for path in given]), options)
