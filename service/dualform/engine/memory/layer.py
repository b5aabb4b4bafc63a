"""One layer of an opened index: its memory as shards, and what is known of it beforehand."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.memory.shards import Shard, ShardFile, is_scattered
from dualform.engine.memory.sketch import Basis
from dualform.engine.rows.rows import Rows
from dualform.store.files import FileEntry, read_checked
from dualform.store.index import REBUILD, IndexLayer, RowSpace, read_first


@dataclass(frozen=True)
class Layer:
    """One layer of an opened index.

    Attributes:
        manifest: Names, shapes and marks, as published.
        space: Its row space.
        shards: Its shards, in order of position.
        finite: bool [rows], by position: which keys are finite.
        basis: What its sketches project on; None without any.
        run_sums: float64 [runs, d_in], sum of the keys of each of the space's runs, or None.
        nonnegative: No key has a negative number.
        nonfinite: Number of keys that are not finite.
        first_equal: int32 or int64 [rows], for each position the first one with the same key; None
            where the index does not say.
    """

    manifest: IndexLayer
    space: Rows
    shards: tuple[Shard, ...]
    finite: np.ndarray = field(repr=False)
    basis: Basis | None = field(repr=False)
    run_sums: np.ndarray | None = field(repr=False)
    nonnegative: bool
    nonfinite: int
    first_equal: np.ndarray | None = field(repr=False)

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
    def values(self) -> bool:
        """Whether the index holds values, and so dual outputs."""
        return self.manifest.values

    @property
    def inexact(self) -> list[tuple[int, str]]:
        """From which step on the dual form is not exact, and why; empty where it is throughout."""
        return [(mark.from_step, mark.reason) for mark in self.manifest.inexact]

    def values_at(self, positions: np.ndarray, unit: int) -> np.ndarray:
        """One output unit's values at these positions, int64 [m] and ascending: float32 [m]."""
        parts = []
        bounds = np.searchsorted(positions, self.space.starts)
        for shard, first, last in zip(self.shards, bounds, bounds[1:], strict=False):
            if first < last:
                assert shard.values is not None
                inside = torch.from_numpy(positions[first:last] - shard.start)
                parts.append(shard.values.rows()[inside, unit].numpy())
        return np.concatenate(parts)

    def keys_at(self, positions: np.ndarray) -> torch.Tensor:
        """Keys at these positions, int64 [m] and ascending: float32 [m, d_in], aligned."""
        keys = torch.empty((len(positions), self.d_in), dtype=torch.float32)
        bounds = np.searchsorted(positions, self.space.starts)
        for shard, first, last in zip(self.shards, bounds, bounds[1:], strict=False):
            if first < last:
                inside = torch.from_numpy(positions[first:last] - shard.start)
                source = shard.keys.rows()
                shard.keys.expect(scattered=is_scattered(len(inside), shard.rows))
                torch.index_select(source, 0, inside, out=keys[first:last])
        return keys

    @property
    def columns(self) -> list[tuple[str, pa.DataType]]:
        """Metadata columns and their types."""
        return [(name, column.type) for name, column in self.space.columns.items()]


def open_layer(path: Path, layer: IndexLayer, space: RowSpace, rows: Rows) -> Layer:
    """Open a layer of the index at this path.

    Args:
        path: The index's directory.
        layer: As published.
        space: Its row space, as published.
        rows: The same, opened.

    Raises:
        DamagedError: A file is missing, has another size, or is not what was written.
    """
    directions = None
    if layer.directions is not None:
        directions = _read_array(path, layer.directions)
    shards = []
    for place, own in zip(space.shards, layer.shards, strict=True):
        keys = ShardFile(path, own.keys, place.rows, layer.d_in, "keys")
        values = None
        if own.values is not None:
            values = ShardFile(path, own.values, place.rows, layer.d_out, "values")
        sketch = None
        if own.sketch is not None and directions is not None:
            floats = len(directions) + 1
            sketch = ShardFile(path, own.sketch, place.rows, floats, "sketch")
        shards.append(
            Shard(rows, place.start, place.rows, keys, values, sketch, own.max_norm, own.nonfinite)
        )
    finite = np.concatenate([np.ones(0, bool), *(shard.finite() for shard in shards)])
    return Layer(
        layer,
        rows,
        tuple(shards),
        finite,
        None if directions is None else Basis(directions),
        _read_run_sums(path, layer),
        all(own.nonnegative for own in layer.shards),
        int(np.count_nonzero(~finite)),
        None if layer.equal_keys is None else read_first(path, layer.equal_keys, space.rows),
    )


def _read_run_sums(path: Path, layer: IndexLayer) -> np.ndarray | None:
    parts = [np.zeros((0, layer.d_in))]
    for shard in layer.shards:
        if shard.sums is None:
            return None
        parts.append(_read_array(path, shard.sums).numpy())
    return np.concatenate(parts)


def _read_array(path: Path, entry: FileEntry) -> torch.Tensor:
    data = read_checked(path, entry, REBUILD)
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
