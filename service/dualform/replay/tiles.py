"""Tiles from a live training run: several steps' rows of one layer, and then they are gone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import torch

from dualform.record import CapturedPass, StepBatch
from dualform.store.recording_format import LayerSpec
from dualform.store.row_metadata import Block, blocks_table, column_types

TILE_ROWS = 4096
TILE_BYTES = 32 << 20


@dataclass(frozen=True)
class LiveTile:
    """Consecutive rows of one layer.

    Attributes:
        layer: Its name.
        start: The first row's id.
        keys: float32 [rows, d_in].
        values: float32 [rows, d_out]; None in a run that records keys alone.
        steps: int64 [rows].
        blocks: The rows' metadata.
    """

    layer: str
    start: int
    keys: torch.Tensor
    values: torch.Tensor | None
    steps: torch.Tensor
    blocks: Sequence[Block]

    @cached_property
    def columns(self) -> pa.Table:
        """The rows' metadata: step, slot, position and what was annotated."""
        return blocks_table(self.blocks, column_types(self.blocks))

    @cached_property
    def finite(self) -> torch.Tensor | None:
        """bool [rows]: whether a key is finite; None where all are."""
        if bool(torch.isfinite(self._norms).all()):
            return None
        finite = torch.isfinite(self.keys).all(1)
        return None if bool(finite.all()) else finite

    @cached_property
    def max_norm(self) -> float:
        """At least the largest Euclidean norm of a finite key."""
        d = self.keys.shape[1]
        largest = float(self._norms.max())
        if math.isfinite(largest):
            # What float32 sums of d squares round off, and squares that underflow.
            return largest * (1 + (d + 8) * 2.0**-24) + math.sqrt(d) * 2.0**-62
        norms = torch.linalg.vector_norm(self.keys.double(), dim=1)
        norms = norms if self.finite is None else norms[self.finite]
        return float(norms.max()) if len(norms) else 0.0

    @cached_property
    def _norms(self) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(self.keys, dim=1)
        return norms


class Tiles:
    """Collects steps until a layer's rows make a tile.

    Args:
        layers: By name; only their rows are kept.
    """

    def __init__(self, layers: Mapping[str, LayerSpec]) -> None:
        self._waiting: dict[str, list[tuple[int, Block, CapturedPass]]] = {n: [] for n in layers}
        self._rows = dict.fromkeys(layers, 0)
        self._width = {name: 4 * (spec.d_in + spec.d_out) for name, spec in layers.items()}
        self._start = dict.fromkeys(layers, 0)

    def add(self, batch: StepBatch) -> Iterator[LiveTile]:
        """Take a step; yields the tiles that are full."""
        for item in batch.passes:
            if item.layer in self._waiting:
                block = batch.blocks[item.block]
                self._waiting[item.layer].append((batch.step, block, item))
                self._rows[item.layer] += item.rows
        for name, rows in self._rows.items():
            if rows >= TILE_ROWS or rows * self._width[name] >= TILE_BYTES:
                yield self._tile(name)

    def rest(self) -> Iterator[LiveTile]:
        """What is left at the end."""
        for name, rows in self._rows.items():
            if rows:
                yield self._tile(name)

    def _tile(self, name: str) -> LiveTile:
        waiting, self._waiting[name] = self._waiting[name], []
        rows, self._rows[name] = self._rows[name], 0
        start = self._start[name]
        self._start[name] += rows
        keys = torch.cat([torch.from_numpy(item.keys.array) for _, _, item in waiting])
        values = [
            torch.from_numpy(item.values.array) for _, _, item in waiting if item.values is not None
        ]
        steps = torch.tensor([step for step, _, _ in waiting])
        counts = torch.tensor([item.rows for _, _, item in waiting])
        return LiveTile(
            layer=name,
            start=start,
            keys=keys,
            values=torch.cat(values) if values else None,
            steps=steps.repeat_interleave(counts),
            blocks=[block for _, block, _ in waiting],
        )
