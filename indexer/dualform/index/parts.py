"""Which parts of the trained weights an index keeps: W^p and b^p of every value of some columns.

Groups are looked for before anything is written, so that what they take can be said, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import save

from dualform.index.errors import BuildError
from dualform.index.row_spaces import Space
from dualform.store.files import FileEntry, write_atomic
from dualform.store.grouping import group
from dualform.store.index_parts import StoredParts, parts_file
from dualform.store.recording import LayerSpec, Recording

MOST_GROUPS = 1000
"""Of a column, values and None together."""

_STORED = np.dtype("<f4")
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True)
class ColumnGroups:
    """The groups of one column in a row space.

    Attributes:
        column: Its name.
        values: Its distinct values in all rows, ascending, null last.
    """

    column: str
    values: pa.Array

    def codes(self, rows: pa.Array) -> np.ndarray:
        """The group of each of some rows, by their values of the column: int32 [rows]."""
        both = pa.concat_arrays([self.values, rows])
        return group(both).codes[len(self.values) :]


@dataclass(frozen=True)
class PartsPlan:
    """What is kept.

    Attributes:
        spaces: Of each row space, its columns' groups; columns without a value there left out.
        nbytes: What the files take.
    """

    spaces: tuple[tuple[ColumnGroups, ...], ...]
    nbytes: int

    def codes(self, space: int, table: pa.Table) -> np.ndarray:
        """The parts of rows: int32 [columns, rows], numbered on from column to column."""
        found = np.empty((len(self.spaces[space]), len(table)), np.int32)
        first = 0
        for row, grouping in zip(found, self.spaces[space], strict=True):
            row[:] = grouping.codes(table[grouping.column].combine_chunks()) + first
            first += len(grouping.values)
        return found

    def count(self, space: int) -> int:
        """How many parts each layer of a row space has."""
        return sum(len(grouping.values) for grouping in self.spaces[space])

    def describe(self) -> str:
        """One sentence: how many groups, and what they take."""
        groups: dict[str, int] = {}
        for space in self.spaces:
            for grouping in space:
                groups[grouping.column] = max(groups.get(grouping.column, 0), len(grouping.values))
        columns = ", ".join(f"{name} ({count:,} groups)" for name, count in groups.items())
        return f"parts of {columns}: {self.nbytes / 1e6:,.1f} MB"


def plan_parts(
    source: Recording, spaces: Sequence[Space], columns: Sequence[str], values: bool
) -> PartsPlan:
    """Find the groups of some columns.

    Args:
        source: The recording.
        spaces: Its row spaces.
        columns: Names of metadata columns; none: nothing is kept.
        values: Whether the index gets values.

    Raises:
        BuildError: A column is not there, has no value or too many, the parts take too much
            memory, or rows have none: without values, or by an optimizer of no known family.
    """
    columns = list(dict.fromkeys(columns))
    if not columns:
        return PartsPlan(((),) * len(spaces), 0)
    if not values:
        raise BuildError(
            "parts of the weights are made of values, and there are none: record with values=True "
            "and build with --values, or leave out --parts"
        )
    if not source.ledger().family.explains:
        raise BuildError(
            f"{source.manifest.optimizer} is of no known family, so it is not known what rows made "
            "of the weights; leave out --parts"
        )
    for column in columns:
        if column not in source.schema.names:
            raise BuildError(
                f"--parts: there is no column {column!r}; the recording has "
                f"{', '.join(source.schema.names)}"
            )
    found = tuple(
        tuple(
            grouping
            for column in columns
            if (grouping := _groups(source, space, column)) is not None
        )
        for space in spaces
    )
    for column in columns:
        if not any(grouping.column == column for space in found for grouping in space):
            raise BuildError(
                f"--parts: no row has a value of column {column!r}; annotate it while recording, "
                "or name another"
            )
    numbers = _numbers(source.manifest.layers, spaces, found)
    return PartsPlan(found, numbers * _STORED.itemsize)


def _numbers(
    layers: Mapping[str, LayerSpec],
    spaces: Sequence[Space],
    found: Sequence[Sequence[ColumnGroups]],
) -> int:
    """How many numbers the parts of all layers have: a weight and a bias for each."""
    numbers = 0
    for space, groups in zip(spaces, found, strict=True):
        parts = sum(len(grouping.values) for grouping in groups)
        for layer in (layers[name] for name in space.layers):
            numbers += parts * (layer.d_out * layer.d_in + (layer.d_out if layer.bias else 0))
    return numbers


def _groups(source: Recording, space: Space, column: str) -> ColumnGroups | None:
    """A column's groups in a row space; None where no row has a value."""
    known: pa.Array | None = None
    for rows in _chunks(source, space, column):
        known = group(rows if known is None else pa.concat_arrays([known, rows])).values
        if len(known) > MOST_GROUPS:
            raise BuildError(
                f"--parts: column {column!r} has more than {MOST_GROUPS:,} values, and every one "
                "would take a whole weight of every layer; name a column with fewer (questions "
                "group by any column without stored parts, by a scan)"
            )
    if known is None or known.null_count == len(known):
        return None
    return ColumnGroups(column, known)


def _chunks(source: Recording, space: Space, column: str) -> Iterator[pa.Array]:
    first = 0
    while first < len(space.blocks):
        end = int(np.searchsorted(space.starts, space.starts[first] + _CHUNK_ROWS))
        end = max(first + 1, min(end, len(space.blocks)))
        yield source.read_rows(space.blocks[first:end])[column].combine_chunks()
        first = end


def write_parts(
    directory: Path,
    layer: LayerSpec,
    groups: Sequence[ColumnGroups],
    parts: Sequence[Mapping[str, np.ndarray]],
) -> tuple[StoredParts, ...]:
    """Write a layer's parts, a file per column.

    They are float32: half the bytes, and each number is off by 2^-24 of itself at most, which is a
    sixteenth of what rule 4 of docs/exactness.md allows of the rows' absolute terms.

    Args:
        directory: The index's.
        layer: Whose.
        groups: Its space's columns.
        parts: Weight and bias by parameter of each part, float64, as `PartsPlan.codes` numbers
            them.

    Returns:
        What the manifest says of them; none where a number is not finite, which a scan has to tell.
    """
    stored: list[StoredParts] = []
    first = 0
    for grouping in groups:
        ours = parts[first : first + len(grouping.values)]
        first += len(grouping.values)
        with np.errstate(over="ignore"):
            tensors = {
                name: np.stack([part[name].astype(_STORED) for part in ours]) for name in ours[0]
            }
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            continue
        name = parts_file(layer.name, grouping.column)
        entry = write_atomic(directory / name, save(tensors))
        file = FileEntry(name, entry.bytes, entry.xxh3)
        stored.append(StoredParts(grouping.column, len(grouping.values), file))
    return tuple(stored)
