"""The index on disk: its manifest, and the headers of its shard files (docs/format.md, *Index*).

A published index is immutable. `manifest.json` is written last, so a directory without one is no
index. Every other file is named in it with its size and digest.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from dualform.store.errors import DamagedError, NotFoundError, VersionError
from dualform.store.files import (
    FileEntry,
    check_seal,
    digest,
    read_checked,
    read_json,
    write_sealed,
)
from dualform.store.ledger import InexactMark, Ledger, from_parquet

FORMAT = "dualform-index"
VERSION = 1
MANIFEST = "manifest.json"
REBUILD = "rebuild the index with `dualform index build`"

INITIAL = "initial:"
"""In a rebuilt file: what the initial state became, by "initial:<parameter>"."""

FAISS_HEADER_BYTES = 45
NPY_HEADER_BYTES = 128

# Characters: file systems take 255 bytes.
_LONGEST_NAME = 200


@dataclass(frozen=True)
class LayerShard:
    """One layer's rows of one shard.

    Attributes:
        keys: IndexFlatIP file, float32 [n, d_in], rows in sidecar order.
        values: .npy file, float32 [n, d_out], or None for an index without values.
        max_norm: Upper bound of the finite keys' Euclidean norms.
        nonfinite: Half-open ranges of positions inside the shard whose key is not finite.
        sketch: .npy file, float32 [n, m + 1], the keys' sketches, or None without any.
        sums: .npy file, float64 [runs, d_in], the sum of the keys of each run of rows with the same
            (task, label), in order; None where runs are too many.
        nonnegative: No key has a negative number.
    """

    keys: FileEntry
    values: FileEntry | None
    sketch: FileEntry | None
    sums: FileEntry | None
    nonnegative: bool
    max_norm: float
    nonfinite: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class EqualKeys:
    """Which rows of a layer have the same key, byte for byte.

    Attributes:
        distinct: Number of distinct keys.
        first: .npy file, int32 [rows] (int64 of 2^31 rows or more): for each position the first one
            with the same key.
    """

    distinct: int
    first: FileEntry


@dataclass(frozen=True)
class IndexLayer:
    """A layer: where its weights, keys and values are, and how far it is exact.

    Attributes:
        directions: .npy file, float32 [m, d_in], the P of its sketches, or None without any.
        states: After so many steps, ascending: weight, bias and momentum buffers, as in `initial`.
        rebuilt: Safetensors file, float64 by parameter: what all rows add up to with the trained
            layer's coefficients, sum c_t e_t (x) x_t and, for the bias, sum c'_t e_t. Where rows
            have no coefficients (Adam and its kin) what they became by being followed, and under
            "initial:<parameter>" what the initial state became. None where the optimizer is of no
            known family, without values, or where that is not finite.
        equal_keys: None where keys come again too seldom, or where nobody looked.
    """

    name: str
    kind: str
    d_in: int
    d_out: int
    weight: str
    bias: str | None
    space: int
    values: bool
    inexact: tuple[InexactMark, ...]
    directions: FileEntry | None
    initial: FileEntry
    final: FileEntry | None
    states: tuple[tuple[int, FileEntry], ...]
    shards: tuple[LayerShard, ...]
    rebuilt: FileEntry | None = None
    equal_keys: EqualKeys | None = None


@dataclass(frozen=True)
class SpaceShard:
    """Row ids [start, start + rows) of a row space, and the sidecar that holds their metadata."""

    sidecar: FileEntry
    start: int
    rows: int


@dataclass(frozen=True)
class RowSpace:
    """The rows of all layers that saw the same passes."""

    rows: int
    shards: tuple[SpaceShard, ...]


@dataclass(frozen=True)
class IndexManifest:
    """Everything there is to know of an index before opening its shards.

    Attributes:
        steps: Optimizer steps of the training run.
        optimizer: The optimizer's class name.
        complete: The recording was closed in an orderly way (final weights are there).
        layers: By name, as in `model.named_modules()`.
    """

    steps: int
    optimizer: str
    complete: bool
    ledger: FileEntry
    examples: FileEntry | None
    layers: Mapping[str, IndexLayer]
    spaces: tuple[RowSpace, ...]

    def save(self, directory: Path) -> None:
        """Write `manifest.json` atomically; this publishes what the directory holds."""
        data = asdict(self)
        data["layers"] = [asdict(layer) for layer in self.layers.values()]
        write_sealed(directory / MANIFEST, {"format": FORMAT, "version": VERSION, **data})

    @classmethod
    def load(cls, directory: Path) -> IndexManifest:
        """Read and check `manifest.json`.

        Raises:
            NotFoundError: No index there.
            VersionError: A newer format.
            DamagedError: Not what `save` writes.
        """
        path = directory / MANIFEST
        if not path.is_file():
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
            return _manifest(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(path, f"a field is missing or wrong ({error!r})", REBUILD) from None

    def load_ledger(self, directory: Path) -> Ledger:
        """Read the ledger of the whole run."""
        return Ledger(from_parquet(read_checked(directory, self.ledger, REBUILD)), self.steps)


def layer_directory(name: str) -> str:
    """A layer's directory in the index: its name, percent-encoded ("%root": the root module).

    A name that no directory can have is changed: dots alone are encoded too, and a long name ends
    in a digest of the whole.
    """
    encoded = quote(name, safe="") or "%root"
    if not encoded.strip("."):
        encoded = encoded.replace(".", "%2E")
    if len(encoded) > _LONGEST_NAME:
        encoded = f"{encoded[:_LONGEST_NAME]}%{digest(name.encode())}"
    return f"layers/{encoded}"


def faiss_header(d: int, n: int) -> bytes:
    """The 45 bytes that make n*d float32 after them a file of `faiss.IndexFlatIP`."""
    inner_product = 0
    return b"IxFI" + struct.pack("<iqqq?iQ", d, n, 1 << 20, 1 << 20, True, inner_product, n * d)


def npy_header(rows: int, d: int) -> bytes:
    """The 128 bytes that make rows*d float32 after them a .npy file [rows, d]."""
    return _npy_header("<f4", (rows, d))


def first_dtype(rows: int) -> np.dtype[Any]:
    """Of a layer's positions in `EqualKeys.first`."""
    return np.dtype("<i4" if rows < 2**31 else "<i8")


def first_header(rows: int) -> bytes:
    """The 128 bytes that make the positions after them a .npy file [rows]."""
    return _npy_header(first_dtype(rows).str, (rows,))


def read_first(directory: Path, own: EqualKeys, rows: int) -> np.ndarray:
    """A layer's `EqualKeys.first`, int32 or int64 [rows].

    Raises:
        DamagedError: Not what was written, or no such file.
    """
    data = read_checked(directory, own.first, REBUILD)
    header, dtype = first_header(rows), first_dtype(rows)
    wrong = None
    first = np.zeros(0, dtype)
    if data[: len(header)] != header or len(data) != len(header) + rows * dtype.itemsize:
        wrong = "its header is not the manifest's"
    else:
        first = np.frombuffer(data, dtype, offset=len(header))
        places = np.arange(rows, dtype=dtype)
        if ((first < 0) | (first > places)).any() or (first[first] != first).any():
            wrong = "a row is not the first with its key"
        elif np.count_nonzero(first == places) != own.distinct:
            wrong = "its distinct keys are not as many as the manifest's"
    if wrong is not None:
        raise DamagedError(directory / own.first.name, wrong, REBUILD)
    return first


def _npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    data = buffer.getvalue()
    if len(data) != NPY_HEADER_BYTES:
        raise ValueError(f"unexpected .npy header of {len(data)} bytes")
    return data


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


def _manifest(data: dict[str, Any]) -> IndexManifest:
    layers = [_layer(layer) for layer in data["layers"]]
    spaces = tuple(
        RowSpace(
            int(space["rows"]),
            tuple(
                SpaceShard(FileEntry.from_json(s["sidecar"]), int(s["start"]), int(s["rows"]))
                for s in space["shards"]
            ),
        )
        for space in data["spaces"]
    )
    return IndexManifest(
        steps=int(data["steps"]),
        optimizer=str(data["optimizer"]),
        complete=bool(data["complete"]),
        ledger=FileEntry.from_json(data["ledger"]),
        examples=_entry(data["examples"]),
        layers={layer.name: layer for layer in layers},
        spaces=spaces,
    )


def _layer(data: dict[str, Any]) -> IndexLayer:
    return IndexLayer(
        name=str(data["name"]),
        kind=str(data["kind"]),
        d_in=int(data["d_in"]),
        d_out=int(data["d_out"]),
        weight=str(data["weight"]),
        bias=None if data["bias"] is None else str(data["bias"]),
        space=int(data["space"]),
        values=bool(data["values"]),
        inexact=tuple(InexactMark(int(m["from_step"]), str(m["reason"])) for m in data["inexact"]),
        directions=_entry(data["directions"]),
        initial=FileEntry.from_json(data["initial"]),
        final=_entry(data["final"]),
        states=tuple((int(j), FileEntry.from_json(file)) for j, file in data.get("states", ())),
        shards=tuple(
            LayerShard(
                keys=FileEntry.from_json(s["keys"]),
                values=_entry(s["values"]),
                sketch=_entry(s["sketch"]),
                sums=_entry(s["sums"]),
                nonnegative=bool(s["nonnegative"]),
                max_norm=float(s["max_norm"]),
                nonfinite=tuple((int(a), int(b)) for a, b in s["nonfinite"]),
            )
            for s in data["shards"]
        ),
        rebuilt=_entry(data.get("rebuilt")),
        equal_keys=_equal_keys(data.get("equal_keys")),
    )


def _equal_keys(data: dict[str, Any] | None) -> EqualKeys | None:
    if data is None:
        return None
    return EqualKeys(int(data["distinct"]), FileEntry.from_json(data["first"]))


def _entry(data: dict[str, Any] | None) -> FileEntry | None:
    return None if data is None else FileEntry.from_json(data)
