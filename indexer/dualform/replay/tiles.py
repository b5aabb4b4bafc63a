"""Tiles from a live training run: several steps' rows of one layer, and then they are gone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.table import Table
from dualform.record import CapturedPass, StepBatch
from dualform.store.recording_format import LayerSpec
from dualform.store.row_metadata import Block, blocks_table, column_types

TILE_ROWS = 4096
TILE_BYTES = 32 << 20


class Tiles:
    """Collects steps until a layer's rows make a tile. Row ids are places in the training.

    Args:
        layers: By name; only their rows are kept.
    """

    def __init__(self, layers: Mapping[str, LayerSpec]) -> None:
        self._waiting: dict[str, list[tuple[Block, CapturedPass]]] = {name: [] for name in layers}
        self._rows = dict.fromkeys(layers, 0)
        self._width = {name: 4 * (spec.d_in + spec.d_out) for name, spec in layers.items()}
        self._start = dict.fromkeys(layers, 0)
        self._types: dict[str, dict[str, str]] = {name: {} for name in layers}
        self._unseen = set(layers)

    def first(self, batch: StepBatch) -> Iterator[tuple[str, Table]]:
        """What is known of a step's rows of those layers that had none before it."""
        for name in sorted(self._unseen):
            blocks = [batch.blocks[item.block] for item in batch.passes if item.layer == name]
            if blocks:
                self._unseen.discard(name)
                yield name, blocks_rows(blocks, column_types(blocks), self._start[name])

    def add(self, batch: StepBatch) -> Iterator[tuple[str, Tile]]:
        """Take a step; yields the tiles that are full, with their layers' names."""
        for item in batch.passes:
            if item.layer in self._waiting:
                self._waiting[item.layer].append((batch.blocks[item.block], item))
                self._rows[item.layer] += item.rows
        for name, rows in self._rows.items():
            if rows >= TILE_ROWS or rows * self._width[name] >= TILE_BYTES:
                yield name, self._tile(name)

    def rest(self) -> Iterator[tuple[str, Tile]]:
        """What is left at the end."""
        for name, rows in self._rows.items():
            if rows:
                yield name, self._tile(name)

    def _tile(self, name: str) -> Tile:
        waiting, self._waiting[name] = self._waiting[name], []
        rows, self._rows[name] = self._rows[name], 0
        start = self._start[name]
        self._start[name] += rows
        keys = torch.cat([torch.from_numpy(item.keys.array) for _, item in waiting])
        values = [
            torch.from_numpy(item.values.array) for _, item in waiting if item.values is not None
        ]
        blocks = [block for block, _ in waiting]
        # A column stays, null where it is not annotated any more, as in an index.
        types = self._types[name] = {**self._types[name], **column_types(blocks)}
        finite, max_norm = _norms(keys)
        return Tile(
            blocks_rows(blocks, types, start),
            np.arange(rows),
            keys,
            torch.cat(values) if values else None,
            max_norm,
            finite,
        )


def blocks_rows(blocks: Sequence[Block], types: Mapping[str, str], start: int) -> Table:
    """The rows of some blocks, one after the other.

    Args:
        blocks: In order.
        types: Type names of the columns that they may have.
        start: The first row's id.
    """
    counts = np.array([block.rows for block in blocks], np.int64)
    steps = np.repeat(np.array([block.step for block in blocks], np.int64), counts)
    ids = np.arange(start, start + len(steps))
    return Table(ids, steps, partial(_columns, blocks, types))


def _columns(blocks: Sequence[Block], types: Mapping[str, str]) -> dict[str, pa.Array]:
    table = blocks_table(blocks, types)
    return {name: table[name].combine_chunks() for name in table.column_names}


def _norms(keys: torch.Tensor) -> tuple[np.ndarray | None, float]:
    """Which keys are finite, None for all; and at least the largest norm of those that are."""
    d = keys.shape[1]
    largest = float(torch.linalg.vector_norm(keys, dim=1).max())
    if math.isfinite(largest):
        # What float32 sums of d squares round off, and squares that underflow.
        return None, largest * (1 + (d + 8) * 2.0**-24) + math.sqrt(d) * 2.0**-62
    norms = torch.linalg.vector_norm(keys.double(), dim=1)
    finite = torch.isfinite(keys).all(1)
    largest = float(norms[finite].max()) if bool(finite.any()) else 0.0
    return (None if bool(finite.all()) else finite.numpy()), largest * (1 + 1e-9)
