"""The index on disk: its manifest, and what is read beside its shards (docs/format.md, *Index*).

A published index is immutable. `manifest.json` is written last, so a directory without one is no
index. Every other file is named in it with its size and digest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dualform.store.encoding import FLOAT32, NPY_HEADER_BYTES, encoding, npy_header
from dualform.store.errors import DamagedError, NotFoundError, VersionError
from dualform.store.fields import Fields, wrong
from dualform.store.files import (
    FileEntry,
    check_seal,
    is_there,
    read_checked,
    read_json,
    write_sealed,
)
from dualform.store.index_check import first_dtype, read_layers, read_spaces
from dualform.store.index_parts import (
    EXAMPLES,
    LEDGER,
    PAYLOADS,
    EqualKeys,
    IndexLayer,
    LayerShard,
    RowSpace,
    SpaceShard,
    StoredParts,
    layer_directory,
)
from dualform.store.ledger import Ledger, from_parquet
from dualform.store.sampling import ALL_ROWS, Sampling

__all__ = [
    "REBUILD",
    "EqualKeys",
    "IndexLayer",
    "IndexManifest",
    "LayerShard",
    "RowSpace",
    "SpaceShard",
    "StoredParts",
    "first_dtype",
    "first_header",
    "layer_directory",
    "read_array",
    "read_first",
    "runs",
]

FORMAT = "dualform-index"
VERSION = 3
"""The newest that this program reads. 2 knows encodings of keys and values, and
payloads beside their table; 3 knows packed files."""
MANIFEST = "manifest.json"
REBUILD = "rebuild the index with `dualform index build`"

INITIAL = "initial:"
"""In a rebuilt file: what the initial state became, by "initial:<parameter>"."""


@dataclass(frozen=True)
class IndexManifest:
    """Everything there is to know of an index before opening its shards.

    Attributes:
        steps: Optimizer steps of the training run.
        optimizer: The optimizer's class name.
        complete: The recording was closed in an orderly way (final weights are there).
        examples: Where the payloads of example ids lie, or, of an older index, they themselves.
        payloads: Their bytes.
        layers: By name, as in `model.named_modules()`.
        sampling: Which rows were recorded.
    """

    steps: int
    optimizer: str
    complete: bool
    ledger: FileEntry
    examples: FileEntry | None
    payloads: FileEntry | None
    layers: Mapping[str, IndexLayer]
    spaces: tuple[RowSpace, ...]
    sampling: Sampling = ALL_ROWS

    def save(self, directory: Path) -> None:
        """Write `manifest.json` atomically; this publishes what the directory holds."""
        data = asdict(self)
        data["layers"] = [asdict(layer) for layer in self.layers.values()]
        if self.sampling.whole:
            del data["sampling"]
        head = {"format": FORMAT, "version": self._version()}
        write_sealed(directory / MANIFEST, {**head, **data})

    @classmethod
    def load(cls, directory: Path) -> IndexManifest:
        """Read and check `manifest.json`.

        Raises:
            NotFoundError: No index there.
            VersionError: A newer format.
            DamagedError: Not what `save` writes.
        """
        path = directory / MANIFEST
        if not is_there(path):
            raise NotFoundError(
                f"{directory} is not an index (no {MANIFEST}); "
                "build one with `dualform index build RECORDING INDEX`"
            )
        data = read_json(path, REBUILD)
        if data.get("format") != FORMAT:
            raise NotFoundError(
                f"{directory} is not an index (format {data.get('format')!r}); of a recording, "
                "build one with `dualform index build RECORDING INDEX`"
            )
        version = data.get("version")
        if isinstance(version, int) and version > VERSION:
            raise VersionError(
                f"{directory} is an index of version {version}; this dualform reads up to "
                f"version {VERSION}: upgrade it, or rebuild the index with it"
            )
        check_seal(path, data, REBUILD)
        try:
            Fields(data).integer("version", 1, VERSION)
            return cls._read(Fields(data))
        except ValueError as error:
            raise DamagedError(path, f"a field is wrong: {error}", REBUILD) from None

    @classmethod
    def _read(cls, data: Fields) -> IndexManifest:
        steps = data.integer("steps", 1)
        spaces = read_spaces(data)
        manifest = cls(
            steps=steps,
            optimizer=data.text("optimizer"),
            complete=data.boolean("complete"),
            ledger=data.entry("ledger"),
            examples=data.optional_entry("examples"),
            payloads=data.optional_entry("payloads"),
            layers=read_layers(data, spaces, steps),
            spaces=spaces,
            sampling=Sampling.read(data),
        )
        for entry, name in (
            (manifest.ledger, LEDGER),
            (manifest.examples, EXAMPLES),
            (manifest.payloads, PAYLOADS),
        ):
            if entry is not None and entry.name != name:
                raise wrong(name, entry.name, f"called {name}")
        if manifest.payloads is not None and manifest.examples is None:
            raise wrong("payloads", manifest.payloads.name, "null, as examples is")
        return manifest

    def row_bytes(self, name: str) -> tuple[int, int]:
        """Bytes of the files of a layer's keys and values: as they lie, and unpacked."""
        layer = self.layers[name]
        lie = unpacked = 0
        keys, values = (encoding(each) for each in layer.encodings)
        for shard, place in zip(layer.shards, self.spaces[layer.space].shards, strict=True):
            lie += shard.keys.bytes
            unpacked += keys.keys_bytes(layer.d_in, place.rows)
            if shard.values is not None:
                lie += shard.values.bytes
                unpacked += values.values_bytes(place.rows, layer.d_out)
        return lie, unpacked

    def _version(self) -> int:
        """The oldest that can say all this."""
        if any(any(layer.packed) for layer in self.layers.values()):
            return 3
        used = {name for layer in self.layers.values() for name in layer.encodings}
        return 1 if used <= {FLOAT32.name} and self.payloads is None else 2

    def only(self, shards: Sequence[Sequence[int]]) -> IndexManifest:
        """The same index with some of its shards alone: a part of its rows.

        What is of all rows stays: states, what they add up to, how many a row space has.

        Args:
            shards: For each row space the numbers of its shards, ascending.
        """
        spaces = tuple(
            replace(space, shards=tuple(space.shards[number] for number in numbers))
            for space, numbers in zip(self.spaces, shards, strict=True)
        )
        layers = {
            name: replace(
                layer, shards=tuple(layer.shards[number] for number in shards[layer.space])
            )
            for name, layer in self.layers.items()
        }
        return replace(self, spaces=spaces, layers=layers)

    def load_ledger(self, directory: Path) -> Ledger:
        """Read the ledger of the whole run.

        Raises:
            DamagedError: Not what was written, or not one row per step of every layer's parameters.
        """
        path = directory / self.ledger.name
        data = read_checked(directory, self.ledger, REBUILD)
        try:
            rows = from_parquet(data)
            if len(rows) < self.steps:  # before anything is made for so many steps
                raise ValueError(f"{len(rows):,} rows for {self.steps:,} steps")
            ledger = Ledger(rows, self.steps)
        except (pa.ArrowException, OSError, TypeError, ValueError) as error:
            raise DamagedError(path, f"not a ledger ({error})", REBUILD) from None
        for layer in self.layers.values():
            for parameter in (layer.weight, layer.bias):
                if parameter is not None and parameter not in ledger.parameters:
                    what = f"it has no row of {parameter}, which layer {layer.name!r} names"
                    raise DamagedError(path, what, REBUILD)
        return ledger


def first_header(rows: int) -> bytes:
    """The 128 bytes that make the positions after them a .npy file [rows]."""
    return npy_header(first_dtype(rows).str, (rows,))


def read_first(directory: Path, equal_keys: EqualKeys, rows: int) -> np.ndarray:
    """A layer's `EqualKeys.first`, int32 or int64 [rows].

    Raises:
        DamagedError: Not what was written, or no such file.
    """
    first = read_array(directory, equal_keys.first, first_dtype(rows), (rows,))
    places = np.arange(rows, dtype=first.dtype)
    wrong = None
    if ((first < 0) | (first > places)).any() or (first[first] != first).any():
        wrong = "a row is not the first with its key"
    elif np.count_nonzero(first == places) != equal_keys.distinct:
        wrong = "its distinct keys are not as many as the manifest's"
    if wrong is not None:
        raise DamagedError(directory / equal_keys.first.name, wrong, REBUILD)
    return first


def read_array(
    directory: Path, entry: FileEntry, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray:
    """A .npy file of this dtype and shape; nothing is taken from its own header.

    Args:
        directory: The index.
        entry: The file.
        dtype: Little-endian.
        shape: -1 as its first number: as many as the file has bytes for.

    Raises:
        DamagedError: Not what was written, or no such file.
    """
    data = read_checked(directory, entry, REBUILD)
    if shape[0] < 0:
        row = dtype.itemsize * math.prod(shape[1:])
        shape = (max(0, len(data) - NPY_HEADER_BYTES) // row, *shape[1:])
    header = npy_header(dtype.str, shape)
    if data[: len(header)] != header or len(data) != len(header) + dtype.itemsize * math.prod(
        shape
    ):
        raise DamagedError(directory / entry.name, "its header is not the manifest's", REBUILD)
    return np.frombuffer(data, dtype, offset=len(header)).reshape(shape)


def runs(task: np.ndarray | None, label: np.ndarray | None, rows: int) -> np.ndarray:
    """Where the runs of rows with the same (task, label) start, in a shard's order.

    Args:
        task, label: Group codes [rows], or None for a column that is not there.
        rows: Number of rows.

    Returns:
        int64 [runs], ascending, the first 0 unless there are no rows.
    """
    new = np.zeros(rows, bool)
    new[:1] = True
    for codes in (task, label):
        if codes is not None:
            new[1:] |= codes[1:] != codes[:-1]
    return np.flatnonzero(new)
