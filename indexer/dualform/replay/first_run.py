"""What is kept of the first training: its ledger, its first and last state, digests of its rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError, safe_open

from dualform.engine.memory.tiles import Tile
from dualform.record import StepBatch
from dualform.record.buffers import Buffer
from dualform.record.sink import State
from dualform.replay.answers import KeySums
from dualform.replay.errors import ReplayError
from dualform.replay.questions import Question
from dualform.replay.tiles import Tiles
from dualform.store.files import digest, named_in_utf8, write_atomic
from dualform.store.ledger import InexactMark, Ledger, LedgerRow, from_parquet, to_parquet
from dualform.store.recording_format import LayerSpec, RecordingManifest
from dualform.store.sampling import Sampling

_FORMAT = "dualform-first-run-1"
_OF_INPUTS = "dualform-first-run-2"
"""Where convolutions have digests of their inputs, not of each patch."""


class FirstRun:
    """The sink of a training that is going to be replayed. No row is kept.

    Memory: per step one ledger row per parameter and 16 bytes per layer; and key sums, if asked.

    Attributes:
        manifest: What was recorded.
        initial: The state before the first step.
        final: The state after the last; None until the recorder is closed.
        ledger_rows: One per step and parameter.
        digests: Of every step's keys and values, by layer, as 16 bytes.
        marks: Layer name and mark.

    Example:
        >>> first = FirstRun()
        >>> with Recorder(model, optimizer, first):
        ...     train(model, optimizer)
    """

    manifest: RecordingManifest
    initial: State

    def __init__(self) -> None:
        self.final: State | None = None
        self.ledger_rows: list[LedgerRow] = []
        self.digests: list[dict[str, bytes]] = []
        self.marks: list[tuple[str, InexactMark]] = []
        self._key_sums: dict[str, list[KeySums]] = {}
        self._tiles: Tiles | None = None

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return len(self.digests)

    def ledger(self) -> Ledger:
        """The ledger of the whole run."""
        return Ledger(self.ledger_rows, self.steps)

    def key_sums(self, layer: str, group_by: str) -> KeySums:
        """Also add this layer's keys up per value of a metadata column.

        Raises:
            ReplayError: The recorder is made already.
        """
        if self._tiles is not None:
            raise ReplayError("ask for key sums before making the recorder")
        sums = KeySums(group_by)
        self._key_sums.setdefault(layer, []).append(sums)
        return sums

    def open(self, manifest: RecordingManifest) -> None:
        """Start: as the recorder calls it.

        Raises:
            ReplayError: Several processes train the model, or a layer that was asked for is none.
        """
        if manifest.ranks is not None:
            raise ReplayError(
                f"this process is {manifest.ranks} of one training, and a replay folds the rows "
                "of one process: record to a path, and build an index of all ranks' recordings; or "
                "train in one process"
            )
        for name in self._key_sums:
            if name not in manifest.layers:
                raise ReplayError(
                    f"no layer {name!r} is recorded; there are {', '.join(manifest.layers)}"
                )
        for name, asked in self._key_sums.items():
            for sums in asked:
                sums.start(manifest.layers[name].d_in)
        self.manifest = manifest
        self._tiles = Tiles({name: manifest.layers[name] for name in self._key_sums})

    def begin(self, initial: State, step_bytes: int, planned_steps: int | None) -> None:
        """Keep the state before the first step."""
        self.initial = dict(initial)

    def check(self) -> None:
        """Nothing runs in the background."""

    def append(self, batch: StepBatch) -> None:
        """Take one step's ledger and the digests of its rows."""
        self.ledger_rows.extend(batch.ledger)
        self.marks.extend(batch.marks)
        self.digests.append(step_digests(batch, self.manifest))
        assert self._tiles is not None
        for name, rows in self._tiles.first(batch):
            for sums in self._key_sums[name]:
                Question(sums, columns=[sums.group_by]).check(rows)
        for name, tile in self._tiles.add(batch):
            self._fold(name, tile)

    def add_examples(
        self, ids: Sequence[int] | Sequence[str], kinds: Sequence[str], data: Sequence[bytes]
    ) -> None:
        """Payloads are not kept."""

    def commit(self) -> None:
        """Nothing is stored; see `save`."""

    def close(self, final: State, marks: Sequence[tuple[str, InexactMark]]) -> None:
        """Keep the last state."""
        self.final = dict(final)
        self.marks.extend(marks)
        assert self._tiles is not None
        for name, tile in self._tiles.rest():
            self._fold(name, tile)
        for sums in self._key_sums.values():
            for each in sums:
                each.finish()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it but key sums to one file, for a replay in another process.

        Raises:
            ReplayError: The recorder is not closed, or saw no step.
        """
        if self.final is None:
            raise ReplayError("close the recorder of the first training before saving it")
        if self.steps == 0:
            raise ReplayError("the first training had no step: there is nothing to save")
        manifest = self.manifest
        about = {
            "format": _format(manifest.layers.values()),
            "optimizer": manifest.optimizer,
            "values": manifest.values,
            "created_by": manifest.created_by,
            "sampling": manifest.sampling.to_json(),
            "layers": [asdict(spec) for spec in manifest.layers.values()],
            "marks": [[name, mark.from_step, mark.reason] for name, mark in self.marks],
        }
        joined = b"".join(step[name] for step in self.digests for name in manifest.layers)
        arrays = {
            "digests": np.frombuffer(joined, np.uint8).copy(),
            "ledger": np.frombuffer(to_parquet(self.ledger_rows), np.uint8).copy(),
            **{f"initial:{name}": array for name, array in self.initial.items()},
            **{f"final:{name}": array for name, array in self.final.items()},
        }
        write_atomic(Path(path), safetensors.numpy.save(arrays, {"dualform": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FirstRun:
        """Read what `save` wrote.

        Raises:
            ReplayError: It is something else.
            FileNotFoundError: Nothing is there.
        """
        try:
            with named_in_utf8(path) as name, safe_open(name, "numpy") as file:
                about = json.loads((file.metadata() or {}).get("dualform", "{}"))
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about.get("format") not in (_FORMAT, _OF_INPUTS):
                raise KeyError("format")
            specs = {layer["name"]: LayerSpec(**layer) for layer in about["layers"]}
            if about["format"] != _format(specs.values()):
                raise ReplayError(
                    f"{path} was saved by an earlier dualform, which took other digests of "
                    "convolutions: train the first run again, and save it"
                )
            first = cls()
            first.manifest = RecordingManifest(
                about["optimizer"],
                specs,
                about["values"],
                about["created_by"],
                Sampling(**about.get("sampling", {})),
            )
            first.ledger_rows = from_parquet(arrays["ledger"].tobytes())
            digests = arrays["digests"].reshape(-1, len(specs), 16)
            first.digests = [
                {name: row.tobytes() for name, row in zip(specs, step, strict=True)}
                for step in digests
            ]
            first.marks = [(name, InexactMark(step, why)) for name, step, why in about["marks"]]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ReplayError(
                f"{path} holds no first run ({error}); FirstRun.save writes one"
            ) from None
        first.initial = _under("initial:", arrays)
        first.final = _under("final:", arrays)
        return first

    def _fold(self, layer: str, tile: Tile) -> None:
        for sums in self._key_sums[layer]:
            for reducer in sums.reducers:
                reducer.update(tile, torch.zeros(0, len(tile.keys)))


def step_digests(batch: StepBatch, manifest: RecordingManifest) -> dict[str, bytes]:
    """Of each layer's keys and values in a step: 8 bytes each."""
    parts: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in manifest.layers}
    for item in batch.passes:
        keys, values = parts[item.layer]
        keys.append(_digest(item.keys))
        values.append("" if item.values is None else _digest(item.values))
    return {name: _joined(keys) + _joined(values) for name, (keys, values) in parts.items()}


def _format(specs: Iterable[LayerSpec]) -> str:
    return _OF_INPUTS if any(spec.kind == "convolution" for spec in specs) else _FORMAT


def _digest(buffer: Buffer) -> str:
    return buffer.xxh3 or digest(buffer.stored)


def _joined(digests: list[str]) -> bytes:
    return bytes.fromhex(digest("".join(digests).encode()))


def _under(prefix: str, arrays: dict[str, np.ndarray]) -> State:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
