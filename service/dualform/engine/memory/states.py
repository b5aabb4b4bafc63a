"""A layer's stored weights: before training, after it, on the way, and what its rows add up to.

The files are mapped and never copied whole, so that memory does not grow with layers. A file is
checked before its bytes are first used.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dualform.engine.memory.float64 import BLOCK_BYTES, FEW, dots
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest, identity, named_in_utf8, read_some, status
from dualform.store.index import REBUILD, IndexLayer

State = Mapping[str, torch.Tensor]
"""Tensors by name, as in the file: parameters, and "momentum:<parameter>"; only to be read."""

_MOST_HEADER = 1 << 20


class States:
    """The state files of an index; thread-safe.

    Args:
        directory: The index.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._mapped: dict[str, tuple[tuple[int, ...], State]] = {}

    def path(self, entry: FileEntry) -> Path:
        """Where a file is."""
        return self._directory / entry.name

    def read(self, entry: FileEntry) -> State:
        """Map a file.

        Raises:
            DamagedError: It does not hold what was written, or has changed since it did.
        """
        with self._lock:
            # Reading beyond the end of a file that was cut off under the map would be fatal.
            now = identity(status(self._directory, entry, REBUILD))
            if entry.name not in self._mapped:
                path = check_digest(self._directory, entry, REBUILD)
                try:
                    with named_in_utf8(path) as name:
                        self._mapped[entry.name] = (now, load_file(name))
                except (SafetensorError, ValueError, TypeError) as error:
                    raise DamagedError(path, f"not a state ({error})", REBUILD) from None
                now = identity(status(self._directory, entry, REBUILD))
            before, state = self._mapped[entry.name]
            if now != before:
                path = self._directory / entry.name
                raise DamagedError(path, "it was changed after it had been checked", REBUILD)
            return state


def check_headers(directory: Path, layer: IndexLayer) -> None:
    """Check that a layer's state files have its weight and bias, of the right shapes, and no other.

    A file but the initial one that is not there, or whose header can't be read, is left to the
    question that needs it: the headers are under no digest yet.

    Raises:
        DamagedError: One has not.
    """
    headers = {layer.initial.name: _header(directory, layer.initial)}
    for entry in (layer.final, layer.rebuilt, *(file for _, file in layer.states)):
        if entry is not None:
            with suppress(DamagedError):
                headers[entry.name] = _header(directory, entry)
    for name, header in headers.items():
        what = _wrong(header, layer)
        if what is not None:
            raise DamagedError(directory / name, what, REBUILD)


def _header(directory: Path, entry: FileEntry) -> dict[str, Any]:
    """The tensors that a safetensors file says it has, by name."""
    try:
        (size,) = struct.unpack("<Q", read_some(directory, entry, 8, REBUILD))
        if size > min(entry.bytes - 8, _MOST_HEADER):
            raise ValueError(f"{size:,} bytes of header")
        header = json.loads(read_some(directory, entry, 8 + size, REBUILD)[8:])
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
    except (ValueError, RecursionError, struct.error) as error:
        path = directory / entry.name
        raise DamagedError(path, f"not a state ({error})", REBUILD) from None
    header.pop("__metadata__", None)
    return header


def _wrong(header: dict[str, Any], layer: IndexLayer) -> str | None:
    shapes = {layer.weight: [layer.d_out, layer.d_in]}
    if layer.bias is not None:
        shapes[layer.bias] = [layer.d_out]
    # What belongs to an optimizer has a colon: "momentum:<parameter>".
    strange = [name for name in header if name not in shapes and ":" not in name]
    if strange:
        return f"it holds {', '.join(strange[:3])}, which the manifest does not name"
    for name, shape in shapes.items():
        if name not in header:
            return f"it lacks {name}"
        for tensor in (name, f"momentum:{name}"):
            said = header.get(tensor, {"shape": shape, "dtype": "F32"})
            if not isinstance(said, dict) or said.get("shape") != shape:
                return f"{tensor} is not {shape}, as the manifest says"
            if said.get("dtype") not in ("F32", "F64"):
                return f"{tensor} is neither float32 nor float64"
    return None


def product(queries: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Queries times a weight, all in float64: [n, d_out].

    Args:
        queries: float64 [n, d_in].
        weight: float32 or float64 [d_out, d_in]; float32 is widened a few rows at a time.
    """
    if len(queries) <= FEW:
        return torch.from_numpy(dots(weight.numpy(), queries.numpy()))
    if weight.dtype == torch.float64:
        return queries @ weight.T
    out = torch.empty((len(queries), len(weight)), dtype=torch.float64)
    step = max(1, BLOCK_BYTES // (8 * weight.shape[1]))
    wide = torch.empty((min(step, len(weight)), weight.shape[1]), dtype=torch.float64)
    for first in range(0, len(weight), step):
        rows = weight[first : first + step]
        block = wide[: len(rows)].copy_(rows)
        out[:, first : first + step] = queries @ block.T
    return out
