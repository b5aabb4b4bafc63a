"""The recordings of all ranks of a data-parallel run, read as one.

Every rank moved the same weights by the mean of all ranks' gradients: initial state, ledger and
later states are the same in each recording, and are compared. Rows come step by step, within a step
rank by rank, and within a rank as it recorded them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from dualform.store.errors import RanksError
from dualform.store.files import reading
from dualform.store.ledger import InexactMark, Ledger, LedgerRow
from dualform.store.ranks import check_ranks, rank_folders
from dualform.store.recording import Recording
from dualform.store.recording_format import MANIFEST
from dualform.store.row_metadata import row_schema
from dualform.store.sampling import counted
from dualform.store.segment_table import PassRecord

RANK = "rank"
"""The column that says of which rank a row is, unless the user has one of that name."""

_SCALE_TOLERANCE = 1e-6
"""Relative difference of two measured scales that measuring them explains."""

_State = dict[str, np.ndarray]


def open_recordings(paths: Sequence[Path]) -> Recording:
    """Open a recording, or those of all ranks of a run as one.

    Args:
        paths: A recording; the folder that a run's ranks recorded below; or their folders.

    Raises:
        RanksError: Some rank is missing, or they are not of one run.
        NotFoundError, VersionError, DamagedError, UnreadableError: One can't be read.
    """
    with reading(paths[0]):
        if len(paths) == 1 and not (paths[0] / MANIFEST).exists():
            paths = rank_folders(paths[0]) or paths
    parts = [Recording.open(path) for path in paths]
    if len(parts) == 1 and parts[0].manifest.ranks is None:
        return parts[0]
    check_ranks([(part.path, part.manifest.ranks) for part in parts])
    return RecordingOfRanks(parts)


class RecordingOfRanks(Recording):
    """What `Recording` is for one process.

    Args:
        parts: Of all ranks.

    Attributes:
        path: The folder that the first rank's lies in.
        manifest: The first rank's.
        steps: As many as every rank has committed.
        complete: All ranks' recordings were closed after as many steps.
        cut: Why later steps of some ranks are left out; None where there are none.

    Raises:
        RanksError: They are not of one run; the message says what differs.
    """

    def __init__(self, parts: Sequence[Recording]) -> None:
        parts = sorted(parts, key=_rank)
        self._parts = parts
        first = parts[0]
        self.path = first.path.parent
        self.manifest = first.manifest
        for part in parts[1:]:
            _check_manifest(first, part)
        self.steps = min(part.steps for part in parts)
        self.complete = all(part.complete and part.steps == self.steps for part in parts)
        self.cut = _cut(parts, self.steps)
        self.marks = {name: _marks(parts, name, self.steps) for name in self.manifest.layers}
        self._number_all()
        self._passes = {name: list(self._merged(name)) for name in self.manifest.layers}
        self._open_rows = None
        columns = _columns(parts)
        self._adds_rank = RANK not in columns
        self.schema = row_schema({**columns, RANK: "int64"} if self._adds_rank else columns)
        self._ledger = Ledger((), 0)
        if self.steps:
            for part in parts[1:]:
                _compare(first, part, "before the first step", first.initial(), part.initial())
            self._ledger = self._one_ledger()
            self._check_states()

    def close(self) -> None:
        """Let go of open files."""
        for part in self._parts:
            part.close()

    @property
    def recordings(self) -> Sequence[Recording]:
        """Those of all ranks."""
        return self._parts

    def ledger(self) -> Ledger:
        """The ledger that all ranks have."""
        return self._ledger

    def dropped(self, layer: str) -> dict[str, int]:
        """How many rows of a layer training had that are not recorded, by reason."""
        items = [
            item
            for part in self._parts
            for segment in part.segments
            for item in segment.dropped
            if item.step < self.steps
        ]
        return counted(items, layer)

    def block_rows(self, block: int) -> int:
        """How many rows a block of metadata has."""
        rank, number = self._place_of(block)
        return self._parts[rank].block_rows(number)

    def read_rows(self, blocks: Sequence[int]) -> pa.Table:
        """The metadata of these blocks, with the rank that they are of."""
        tables = []
        for block in blocks:
            rank, number = self._place_of(block)
            table = self._parts[rank].read_rows([number])
            if self._adds_rank:
                ranks = pa.array(np.full(len(table), rank, np.int64))
                table = table.append_column(RANK, ranks)
            tables.append(_fitted(table, self.schema))
        return pa.concat_tables(tables) if tables else self.schema.empty_table()

    def read_keys(self, record: PassRecord, out: memoryview | np.ndarray) -> None:
        """Read a pass's keys into `out`, float32 [rows, d_in]."""
        part, record = self._theirs(record)
        part.read_keys(record, out)

    def read_values(self, record: PassRecord, out: memoryview | np.ndarray) -> None:
        """Read a pass's values into `out`, float32 [rows, d_out]."""
        part, record = self._theirs(record)
        part.read_values(record, out)

    def stored_keys(self, record: PassRecord, part: slice = slice(None)) -> np.ndarray:
        """A pass's keys, or some of them, as they are stored."""
        of_rank, record = self._theirs(record)
        return of_rank.stored_keys(record, part)

    def stored_values(self, record: PassRecord) -> np.ndarray:
        """A pass's values likewise."""
        part, record = self._theirs(record)
        return part.stored_values(record)

    def read_ahead(self, segment: int) -> None:
        """Ask the operating system to read a segment's passes into the page cache."""
        rank, number = self._segment_place[segment]
        self._parts[rank].read_ahead(number)

    def initial(self) -> _State:
        """The state before the first step, the same of all ranks."""
        return self._parts[0].initial()

    def final(self) -> _State | None:
        """The state after the last step; None where some recording is not complete."""
        return self._parts[0].final() if self.complete else None

    def states(self) -> list[tuple[int, Callable[[], _State]]]:
        """States kept on the way, the first rank's."""
        return [(step, read) for step, read in self._parts[0].states() if step <= self.steps]

    def example_tables(self) -> Iterator[pa.Table]:
        """Payloads of all ranks, as they were added."""
        for part in self._parts:
            yield from part.example_tables()

    def _number_all(self) -> None:
        """Number segments and blocks of all ranks together, segments by their steps."""
        of_all = sorted(
            (segment.first_step, rank, segment.number)
            for rank, part in enumerate(self._parts)
            for segment in part.segments
        )
        self._segment_place = [(rank, number) for _, rank, number in of_all]
        self._segment_number = {place: i for i, place in enumerate(self._segment_place)}
        blocks = [sum(len(s.block_rows) for s in part.segments) for part in self._parts]
        self._first_block = np.concatenate([[0], np.cumsum(blocks)])

    def _merged(self, layer: str) -> Iterator[PassRecord]:
        def of(rank: int, part: Recording) -> Iterator[PassRecord]:
            for record in part.passes(layer):
                if record.step < self.steps:
                    yield record._replace(
                        segment=self._segment_number[rank, record.segment],
                        block=int(self._first_block[rank]) + record.block,
                    )

        # Stable: of one step, the lower ranks first.
        return heapq.merge(*map(of, range(len(self._parts)), self._parts), key=lambda r: r.step)

    def _place_of(self, block: int) -> tuple[int, int]:
        rank = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return rank, block - int(self._first_block[rank])

    def _theirs(self, record: PassRecord) -> tuple[Recording, PassRecord]:
        rank, number = self._segment_place[record.segment]
        return self._parts[rank], record._replace(segment=number)

    def _check_states(self) -> None:
        """Compare the final states of all ranks, and those on the way."""
        first = self._parts[0]
        kept = dict(self.states())
        for part in self._parts[1:]:
            for step, read in part.states():
                if step in kept:
                    _compare(first, part, f"after {step:,} steps", kept[step](), read())
            if self.complete:
                of_first, of_part = first.final(), part.final()
                assert of_first is not None
                assert of_part is not None
                _compare(first, part, f"after {self.steps:,} steps", of_first, of_part)

    def _one_ledger(self) -> Ledger:
        first, *others = (
            [r for rows in part.ledger().parameters.values() for r in rows if r.step < self.steps]
            for part in self._parts
        )
        found = {(row.step, row.parameter): row for row in first}
        for part, rows in zip(self._parts[1:], others, strict=True):
            for row in rows:
                theirs = found.get((row.step, row.parameter))
                if theirs is None or not _alike(row, theirs):
                    raise RanksError(
                        f"at step {row.step:,} parameter {row.parameter!r} moved by {_said(row)} "
                        f"in {part.path} and by {_said(theirs)} in {self._parts[0].path}; they are "
                        "not of one run, whose ranks take the same steps"
                    )
        return Ledger(first, self.steps)


def _rank(part: Recording) -> int:
    assert part.manifest.ranks is not None
    return part.manifest.ranks.rank


def _check_manifest(first: Recording, part: Recording) -> None:
    one, other = first.manifest, part.manifest
    for what in ("optimizer", "values", "sampling", "layers"):
        if getattr(one, what) != getattr(other, what):
            raise RanksError(
                f"{first.path} and {part.path} are not of one run: they differ in {what}; make "
                "the recorder of every rank with the same model, optimizer and options"
            )


def _cut(parts: Sequence[Recording], steps: int) -> str | None:
    """What is to be said where some rank has more steps than all have."""
    longer = [part for part in parts if part.steps > steps]
    if not longer:
        return None
    shortest = next(part for part in parts if part.steps == steps)
    why = "closed" if shortest.complete else "cut off"
    return (
        f"{shortest.path} was {why} after {steps:,} steps and {longer[0].path} has "
        f"{longer[0].steps:,}: what follows step {steps:,} is left out, as gradients were averaged "
        "over all ranks"
    )


def _marks(parts: Sequence[Recording], layer: str, steps: int) -> list[InexactMark]:
    """Of all ranks, each once, in the order of their steps."""
    found = {mark for part in parts for mark in part.marks[layer] if mark.from_step <= steps}
    return sorted(found, key=lambda mark: (mark.from_step, mark.reason))


def _columns(parts: Sequence[Recording]) -> dict[str, str]:
    """The user's columns of all ranks."""
    columns: dict[str, str] = {}
    for part in parts:
        for segment in part.segments:
            for name, kind in segment.columns.items():
                if columns.setdefault(name, kind) != kind:
                    raise RanksError(
                        f"column {name!r} has values of type {kind} in {part.path} and "
                        f"{columns[name]} in another rank's; annotate all ranks alike"
                    )
    return columns


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    arrays = [
        table[field.name]
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(len(table), field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _compare(first: Recording, part: Recording, when: str, one: _State, other: _State) -> None:
    """Refuse states that are not the same, bit for bit, in what both have."""
    for name in sorted(one.keys() & other.keys()):
        if one[name].tobytes() != other[name].tobytes():
            raise RanksError(
                f"{name} {when} is not the same in {first.path} and {part.path}: these are not "
                "replicas of one model. Make the recorder after DistributedDataParallel, which "
                "gives all ranks the first one's weights, and give the folders of one run"
            )


def _alike(one: LedgerRow, other: LedgerRow) -> bool:
    return one._replace(scale=0.0) == other._replace(scale=0.0) and math.isclose(
        one.scale, other.scale, rel_tol=_SCALE_TOLERANCE
    )


def _said(row: LedgerRow | None) -> str:
    if row is None:
        return "nothing"
    if not row.took_part:
        return "no gradient"
    return f"{row.settings} times {row.scale:g}"
