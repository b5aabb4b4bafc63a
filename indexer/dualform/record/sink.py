"""Where a recording goes: the protocol of sinks, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from dualform.record.buffers import Buffer
from dualform.store.ledger import InexactMark, LedgerRow
from dualform.store.recording_format import RecordingManifest
from dualform.store.row_metadata import Block
from dualform.store.sampling import DroppedRows

State = Mapping[str, np.ndarray]
"""Weights and biases by parameter name, momentum buffers by "momentum:<parameter>"."""


class CapturedPass(NamedTuple):
    """The rows that one layer took from one forward pass.

    Attributes:
        layer: Its name.
        rows: How many.
        block: Position of the rows' metadata in `StepBatch.blocks`.
        keys: [rows, d_in], float32 or of 16 bits; of convolutions perhaps as inputs, from which
            they are cut (`Buffer.patches`).
        values: [rows, d_out] likewise, raw (-dL/dy); None where keys alone are recorded.
    """

    layer: str
    rows: int
    block: int
    keys: Buffer
    values: Buffer | None


class StepBatch(NamedTuple):
    """Everything that one optimizer step adds.

    Attributes:
        step: Its number, from 0.
        passes: In forward order for each layer.
        blocks: The metadata that the passes refer to.
        ledger: One row per parameter.
        marks: Layer name and mark, those that are new.
        state: The state after the step, where one is due.
        dropped: The step's rows that are not recorded.
    """

    step: int
    passes: Sequence[CapturedPass]
    blocks: Sequence[Block]
    ledger: Sequence[LedgerRow]
    marks: Sequence[tuple[str, InexactMark]] = ()
    state: State | None = None
    dropped: Sequence[DroppedRows] = ()

    @property
    def written(self) -> int:
        """What the step takes on disk, metadata apart: keys that several layers saw lie there
        once."""
        met = {(keys.xxh3, len(keys.memory)): len(keys.memory) for keys in self._keys}
        return self.nbytes - sum(len(keys.memory) for keys in self._keys) + sum(met.values())

    @property
    def by_rows(self) -> int:
        """The same with every patch of a convolution's input for itself: what an answer at a step
        reads, so states are kept as often as this says."""
        met = {(keys.xxh3, keys.patches): keys.row_bytes for keys in self._keys}
        return self.nbytes - sum(len(keys.memory) for keys in self._keys) + sum(met.values())

    @property
    def _keys(self) -> list[Buffer]:
        return [item.keys for item in self.passes]

    @property
    def nbytes(self) -> int:
        """What the step takes in memory, metadata apart."""
        total = sum(array.nbytes for array in self.state.values()) if self.state else 0
        for item in self.passes:
            total += len(item.keys.memory)
            if item.values is not None:
                total += len(item.values.memory)
        return total


@runtime_checkable
class Sink(Protocol):
    """Takes a recording. Every method runs in the training thread, between steps.

    A sink that cannot go on raises RecordingFailedError from the next call.
    """

    def open(self, manifest: RecordingManifest) -> None:
        """Start; called once, when the recorder is made."""

    def begin(self, initial: State, step_bytes: int, planned_steps: int | None) -> None:
        """Take the state before the first step; called once, before that step moves weights.

        Args:
            step_bytes: What the first step adds, in bytes.
            planned_steps: How many steps the user announced, if so.
        """

    def check(self) -> None:
        """Raise RecordingFailedError if an earlier call failed in the background."""

    def append(self, batch: StepBatch) -> None:
        """Take one step; may wait until there is room."""

    def add_examples(
        self, ids: Sequence[int] | Sequence[str], kinds: Sequence[str], data: Sequence[bytes]
    ) -> None:
        """Take payloads: kind "png", "bytes" or "text" (UTF-8)."""

    def commit(self) -> None:
        """Return when everything taken so far survives a crash."""

    def close(self, final: State, marks: Sequence[tuple[str, InexactMark]]) -> None:
        """Commit and finish; called once, also where training failed."""
