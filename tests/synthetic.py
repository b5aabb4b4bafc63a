"""Recordings made from arrays, for tests that want to choose every key and value themselves."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dualform.index import build_index
from dualform.optimizers import SGDSettings
from dualform.store.ledger import LedgerRow
from dualform.store.recording_format import LayerSpec, RecordingManifest
from dualform.store.recording_writer import Examples, Record, RecordingWriter, StepPass
from dualform.store.row_metadata import Block
from dualform.store.segment_table import ALIGNMENT


def make_index(
    directory: Path,
    keys: np.ndarray,
    values: np.ndarray | None,
    *,
    rows_per_step: int = 7,
    shard_rows: int = 1 << 16,
    lr: float = 0.1,
    momentum: float = 0.0,
    trained: bool = True,
    encodings: Sequence[str] = ("float32",),
    **columns: list[object] | np.ndarray,
) -> Path:
    """An index of one layer "fc" without bias, whose row t has key t and value t.

    Args:
        directory: Where recording and index go.
        keys: float32 [rows, d_in].
        values: float32 [rows, d_out], or None.
        rows_per_step: Rows of each step's only pass.
        shard_rows: As in `build_index`.
        lr, momentum: What the ledger says of every step.
        trained: The final weights are those that the rows lead to; else the initial ones.
        encodings: Of the passes' keys and values, in turn; the numbers must be exact in them.
            Values are float32 beside "one_hot" keys.
        columns: Metadata, one entry per row.
    """
    directory.mkdir(parents=True, exist_ok=True)
    recording = make_recording(
        directory / "recording",
        keys,
        values,
        rows_per_step,
        lr,
        momentum,
        columns,
        encodings,
        trained=trained,
    )
    build_index(recording, directory / "index", shard_rows=shard_rows)
    return directory / "index"


def make_recording(
    path: Path,
    keys: np.ndarray,
    values: np.ndarray | None,
    rows_per_step: int,
    lr: float,
    momentum: float,
    columns: dict[str, list[object] | np.ndarray],
    encodings: Sequence[str] = ("float32",),
    examples: Sequence[Examples] = (),
    *,
    trained: bool = True,
) -> Path:
    """The recording below `make_index`."""
    d_in = keys.shape[1]
    d_out = 1 if values is None else values.shape[1]
    spec = LayerSpec("fc", "linear", d_in, d_out, "fc.weight", None, "float32")
    manifest = RecordingManifest("SGD", {"fc": spec}, values is not None, "tests")
    writer = RecordingWriter(path, manifest)
    rng = np.random.default_rng(0)
    state = {"fc.weight": rng.standard_normal((d_out, d_in)).astype(np.float32)}
    writer.write_initial(state)
    ledger: list[LedgerRow] = []
    for step, first in enumerate(range(0, len(keys), rows_per_step)):
        part = slice(first, min(first + rows_per_step, len(keys)))
        count = part.stop - part.start
        metadata = {name: _column(column[part]) for name, column in columns.items()}
        encoding = encodings[step % len(encodings)]
        of_values = "float32" if encoding == "one_hot" else encoding
        kept = None if values is None else _record(values[part], of_values)
        row = LedgerRow(
            step, "fc.weight", SGDSettings(lr, momentum), first=momentum != 0 and step == 0
        )
        ledger.append(row)
        writer.append(
            [StepPass("fc", count, 0, _record(keys[part], encoding), kept)],
            [Block(step, (count,), metadata)],
            [row],
        )
        writer.flush()
    for payloads in examples:
        writer.add_examples(payloads)
    if trained and values is not None:
        state = _trained(state, ledger, keys, values, rows_per_step)
    writer.close(state)
    return path


def _trained(
    state: dict[str, np.ndarray],
    ledger: list[LedgerRow],
    keys: np.ndarray,
    values: np.ndarray,
    rows_per_step: int,
) -> dict[str, np.ndarray]:
    """What SGD makes of the state, in float64: the final weights that the rows explain."""
    weight, buffer = state["fc.weight"].astype(np.float64), 0.0
    for row, first in zip(ledger, range(0, len(keys), rows_per_step), strict=True):
        part = slice(first, first + rows_per_step)
        with np.errstate(all="ignore"):  # keys that are not finite are some tests' matter
            gradient = -(values[part].astype(np.float64).T @ keys[part].astype(np.float64))
            buffer = row.settings.momentum * buffer + gradient
            weight = weight - row.settings.lr * buffer
    with np.errstate(all="ignore"):
        return {"fc.weight": weight.astype(np.float32)}


def _column(values: list[object] | np.ndarray) -> np.ndarray:
    """One entry per row; None where a row has no value."""
    if isinstance(values, np.ndarray):
        return values
    if any(isinstance(value, str) for value in values):
        return np.array(values, object)
    missing = [value is None for value in values]
    if not any(missing):
        return np.array(values)
    return np.ma.masked_array([0 if value is None else value for value in values], missing)


def stored(rows: np.ndarray, encoding: str) -> bytes:
    """Float32 numbers as torch has them in another dtype, which must hold them exactly."""
    if encoding == "one_hot":
        assert (np.sort(rows, axis=1)[:, :-1] == 0).all()
        places = np.where(rows.any(axis=1), rows.argmax(axis=1), -1)
        return np.asarray(places, "<i4").tobytes()
    tensor = torch.from_numpy(np.ascontiguousarray(rows, "<f4"))
    narrow = tensor.to(getattr(torch, encoding))
    assert torch.equal(narrow.float(), tensor) or not torch.isfinite(tensor).all()
    return narrow.view(torch.uint8).numpy().tobytes()


def _record(rows: np.ndarray, encoding: str = "float32") -> Record:
    data = stored(rows, encoding)
    memory = mmap.mmap(-1, max(ALIGNMENT, -(-len(data) // ALIGNMENT) * ALIGNMENT))
    memory[: len(data)] = data
    return Record(memoryview(memory), len(data), encoding=encoding)
