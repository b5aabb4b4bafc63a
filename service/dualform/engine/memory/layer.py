"""One layer of an opened index: its memory as shards, and what is known of it beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.errors import DataLossError
from dualform.engine.memory import mapped
from dualform.engine.memory.key_facts import KeyFacts
from dualform.engine.memory.packed import PackedFile
from dualform.engine.memory.shards import (
    RowFile,
    Shard,
    ShardFile,
    Stop,
    check_stop,
    is_scattered,
    spared,
    tile_rows,
)
from dualform.engine.memory.sketch import Basis
from dualform.engine.memory.states import check_headers
from dualform.engine.memory.weights import faiss_pays
from dualform.engine.rows.equal_rows import EqualRows
from dualform.engine.rows.rows import Rows
from dualform.store.encoding import FLOAT32, NPY_HEADER_BYTES, Encoding, encoding
from dualform.store.files import FileEntry
from dualform.store.index import REBUILD, IndexLayer, RowSpace, read_array, read_first
from dualform.store.index_parts import LayerShard
from dualform.store.packed_rows import Rows as RowShape
from dualform.store.packed_rows import is_packed

_PAGES = 8


@dataclass(frozen=True)
class Layer:
    """One layer of an opened index.

    Attributes:
        manifest: Names, shapes and marks, as published.
        space: Its row space.
        shards: Its shards, in order of position.
        finite: bool [rows], by position: which keys are finite.
        nonnegative: No key has a negative number.
        nonfinite: Number of keys that are not finite.
        directory: The index.
        published: Its row space, as published: of a part of an index, where the part's rows are.
    """

    manifest: IndexLayer
    space: Rows
    shards: tuple[Shard, ...]
    finite: np.ndarray = field(repr=False)
    nonnegative: bool
    nonfinite: int
    directory: Path = field(repr=False)
    published: RowSpace = field(repr=False)

    # Read when first asked for; what goes without them is answered where they are damaged.

    @cached_property
    def basis(self) -> Basis | None:
        """What its sketches project on; None without any.

        Raises:
            DataLossError: The file does not hold what was written.
        """
        entry, dtype = self.manifest.directions, np.dtype("<f4")
        if entry is None:
            return None
        with spared():
            directions = read_array(self.directory, entry, dtype, (-1, self.d_in))
        return Basis(torch.from_numpy(directions.copy()))

    @cached_property
    def run_sums(self) -> np.ndarray | None:
        """float64 [runs, d_in], sum of the keys of each of the space's runs, or None.

        Raises:
            DataLossError: A file does not hold what was written.
        """
        parts = [np.zeros((0, self.d_in))]
        for shard in self.manifest.shards:
            if shard.sums is None:
                return None
            with spared():
                shape = (-1, self.d_in)
                parts.append(read_array(self.directory, shard.sums, np.dtype("<f8"), shape))
        found = np.concatenate(parts)
        if len(found) != len(self.space.run_starts):
            raise DataLossError(
                f"{self.directory}: layer {self.name!r} has the sums of {len(found):,} runs of "
                f"rows where its rows make {len(self.space.run_starts):,}; {REBUILD}"
            )
        return found

    @cached_property
    def first_equal(self) -> np.ndarray | None:
        """int32 or int64 [rows], for each position the first one with the same key; None where the
        index does not say.

        Raises:
            DataLossError: The file does not hold what was written.
        """
        if self.manifest.equal_keys is None:
            return None
        with spared():
            first = read_first(self.directory, self.manifest.equal_keys, self.published.rows)
        if self.rows == self.published.rows:
            return first
        here = [first[shard.start : shard.start + shard.rows] for shard in self.published.shards]
        _, places, which = np.unique(
            np.concatenate([first[:0], *here]), return_index=True, return_inverse=True
        )
        return np.asarray(places[which])

    @cached_property
    def value_norms(self) -> np.ndarray:
        """float32 [rows], by position: at least each value's Euclidean norm; infinite or NaN where
        the value is not finite. Found by one pass over the values, and kept."""
        parts = [np.zeros(0, np.float32)]
        for shard in self.shards:
            assert shard.values is not None
            norms = np.empty(shard.rows, np.float32)
            step = tile_rows(self.d_out, 1)
            for first in range(0, shard.rows, step):
                rows = slice(first, first + step)
                values = shard.values.pick(rows)
                wide = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
                norms[rows] = (wide * (1 + 2.0**-22) + 1e-44).float().numpy()
            parts.append(norms)
        return np.concatenate(parts)

    @cached_property
    def equal_rows(self) -> EqualRows | None:
        """Its rows by key; None where the index does not say which keys are equal.

        Raises:
            DataLossError: The file does not hold what was written.
        """
        first = self.first_equal
        return None if first is None else EqualRows(first, self.space.ids)

    def check_unchanged(self) -> None:
        """Raise DamagedError where a file is not the one any more that is mapped."""
        for shard in self.shards:
            for file in shard.files:
                file.check_unchanged()

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def d_in(self) -> int:
        return self.manifest.d_in

    @property
    def d_out(self) -> int:
        return self.manifest.d_out

    @property
    def bias(self) -> bool:
        return self.manifest.bias is not None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.space.total

    @property
    def row_space(self) -> int:
        """Number of its row space: layers with the same number share row ids and metadata."""
        return self.manifest.space

    @property
    def key_bytes(self) -> int:
        """Bytes of a key in the index."""
        return encoding(self.manifest.key_encoding).row_bytes(self.d_in)

    @property
    def scanned_bytes(self) -> int:
        """Bytes of a key that a scan multiplies: as stored, or of the numbers that a place is."""
        kind = encoding(self.manifest.key_encoding)
        whole = kind.numbers(self.d_in) == self.d_in
        return (kind if whole else FLOAT32).row_bytes(self.d_in)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in the index."""
        return encoding(self.manifest.value_encoding).row_bytes(self.d_out)

    @property
    def keys_are_mapped(self) -> bool:
        """Whether FAISS can search the keys as they lie: float32 numbers, none of them packed."""
        return self.manifest.key_encoding == FLOAT32.name and not self.packed[0]

    @cached_property
    def packed(self) -> tuple[bool, bool]:
        """Whether any keys, and any values, have to be unpacked when they are read."""
        return self.manifest.packed

    @property
    def values(self) -> bool:
        """Whether the index holds values, and so dual outputs."""
        return self.manifest.values

    @property
    def inexact(self) -> list[tuple[int, str]]:
        """From which step on the dual form is not exact, and why; empty where it is throughout."""
        return [(mark.from_step, mark.reason) for mark in self.manifest.inexact]

    @property
    def dropped(self) -> int:
        """How many rows training had that were not recorded."""
        return sum(self.manifest.dropped.values())

    def values_at(self, positions: np.ndarray, unit: int, stop: Stop | None = None) -> np.ndarray:
        """One output unit's values at these positions, int64 [m] and ascending: float32 [m].

        Args:
            positions: Where.
            unit: Its number.
            stop: Asked between shards; True raises CancelledError.
        """
        parts = [np.empty(0, np.float32)]
        bounds = np.searchsorted(positions, self.space.starts)
        for shard, first, last in zip(self.shards, bounds, bounds[1:], strict=False):
            if first < last:
                check_stop(stop)
                assert shard.values is not None
                inside = positions[first:last] - shard.start
                of_unit = shard.values.pick_units(inside, slice(unit, unit + 1))
                parts.append(of_unit[:, 0].numpy())
        return np.concatenate(parts)

    def value_rows(self, positions: np.ndarray) -> torch.Tensor:
        """Values at these positions, int64 [m] and ascending: float32 [m, d_out], aligned."""
        values = torch.empty((len(positions), self.d_out), dtype=torch.float32)
        bounds = np.searchsorted(positions, self.space.starts)
        for shard, first, last in zip(self.shards, bounds, bounds[1:], strict=False):
            if first < last:
                assert shard.values is not None
                inside = positions[first:last] - shard.start
                shard.values.copy(inside, values[first:last])
        return values

    def keys_at(self, positions: np.ndarray, room: torch.Tensor | None = None) -> torch.Tensor:
        """Keys at these positions, int64 [m] and ascending: float32 [m, d_in], aligned.

        They lie in `room`, float32 [at least m, d_in], where there is one.
        """
        if room is None:
            room = torch.empty((len(positions), self.d_in), dtype=torch.float32)
        keys = room[: len(positions)]
        bounds = np.searchsorted(positions, self.space.starts)
        for shard, first, last in zip(self.shards, bounds, bounds[1:], strict=False):
            if first < last:
                inside = positions[first:last] - shard.start
                shard.keys.expect(scattered=is_scattered(len(inside), shard.rows))
                shard.keys.copy(inside, keys[first:last])
        return keys

    @property
    def columns(self) -> list[tuple[str, pa.DataType]]:
        """Metadata columns and their types."""
        return [(name, column.type) for name, column in self.space.columns.items()]


def open_layer(
    path: Path, layer: IndexLayer, space: RowSpace, table: Rows, *, faiss: bool
) -> Layer:
    """Open a layer of the index at this path.

    Args:
        path: The index's directory.
        layer: As published.
        space: Its row space, as published.
        table: The same, opened.
        faiss: Whether FAISS may multiply its rows.

    Raises:
        DamagedError: A file is missing, has another size, or is not what was written.
    """
    check_headers(path, layer)
    keys_as, values_as = encoding(layer.key_encoding), encoding(layer.value_encoding)
    shards = []
    starts = table.starts.tolist()
    for start, place, published in zip(starts, space.shards, layer.shards, strict=False):
        facts = KeyFacts(
            keys_as,
            layer.d_in,
            _finite(published, place.rows),
            published.max_norm,
            published.nonnegative,
        )
        header = keys_as.keys_header(layer.d_in, place.rows)
        shape = RowShape.of(keys_as, layer.d_in, place.rows, header)
        keys = _row_file(path, published.keys, layer.d_in, shape, keys_as, facts)
        values = sketch = None
        if published.values is not None:
            header = values_as.values_header(place.rows, layer.d_out)
            shape = RowShape.of(values_as, layer.d_out, place.rows, header)
            values = _row_file(path, published.values, layer.d_out, shape, values_as, None)
        if published.sketch is not None:
            numbers = (published.sketch.bytes - NPY_HEADER_BYTES) // FLOAT32.row_bytes(place.rows)
            of_sketch = (place.rows, numbers)
            sketch = ShardFile(path, published.sketch, of_sketch, FLOAT32.values_header(*of_sketch))
        shards.append(
            Shard(
                table,
                start,
                place.rows,
                keys,
                values,
                sketch,
                published.max_norm,
                facts.finite,
                faiss and faiss_pays(place.rows, layer.d_in),
            )
        )
    finite = np.concatenate([np.ones(0, bool), *(shard.finite for shard in shards)])
    return Layer(
        manifest=layer,
        space=table,
        shards=tuple(shards),
        finite=finite,
        nonnegative=all(published.nonnegative for published in layer.shards),
        nonfinite=int(np.count_nonzero(~finite)),
        directory=path,
        published=space,
    )


def resident(layer: Layer) -> float:
    """The share of the layer's keys that needs no reading from disk, between 0 and 1.

    By `mincore` of a few pages of each shard. 1 where the system can't tell; shards that nothing
    has asked for yet are read and checked by their first question anyway, and count as there.
    """
    maps = [where for shard in layer.shards if (where := shard.keys.mapped()) is not None]
    places = [address + size * place // _PAGES for address, size in maps for place in range(_PAGES)]
    found = mapped.resident(places)
    return sum(found) / len(found) if found else 1.0


def _row_file(
    path: Path,
    entry: FileEntry,
    d: int,
    shape: RowShape,
    kind: Encoding,
    facts: KeyFacts | None,
) -> RowFile:
    """A shard's keys, of which there are facts, or values."""
    if is_packed(entry):
        return PackedFile(path, entry, d, shape, kind, facts)
    wrong = None if facts is None else facts.wrong
    return ShardFile(path, entry, (shape.rows, d), shape.header, kind, wrong)


def _finite(shard: LayerShard, rows: int) -> np.ndarray:
    mask = np.ones(rows, bool)
    for first, last in shard.nonfinite:
        mask[first:last] = False
    return mask
