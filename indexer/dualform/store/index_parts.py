"""What an index's manifest consists of, and what its files are called (docs/format.md, *Index*)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from dualform.store.encoding import FLOAT32
from dualform.store.files import FileEntry, digest
from dualform.store.ledger import InexactMark
from dualform.store.packed_rows import is_packed

LEDGER = "ledger.parquet"
EXAMPLES = "examples.parquet"
PAYLOADS = "examples.bin"

# Characters: file systems take 255 bytes.
_LONGEST_NAME = 200


@dataclass(frozen=True)
class LayerShard:
    """One layer's rows of one shard.

    Attributes:
        keys: FAISS file, [n, d_in] in the layer's encoding, rows in sidecar order; or packed
            (`dualform.store.packed_rows`).
        values: .npy file, [n, d_out] likewise, or packed; None for an index without values.
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
class StoredParts:
    """What the rows of each value of a column became in a layer's trained weights.

    Attributes:
        column: The metadata column.
        groups: Its values in the layer's row space, null among them.
        file: Safetensors file, float32 by parameter, [groups, d_out, d_in] and [groups, d_out]; the
            groups ascending by value, null last.
    """

    column: str
    groups: int
    file: FileEntry


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
        key_encoding: Name of the encoding of its keys (`dualform.store.encoding`).
        value_encoding: Likewise of its values.
        parts: Of the columns that the build was asked for; each column's add up to `rebuilt`.
        dropped: How many rows training had that were not recorded, by reason
            (`dualform.store.sampling.REASONS`).
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
    key_encoding: str = FLOAT32.name
    value_encoding: str = FLOAT32.name
    parts: tuple[StoredParts, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def encodings(self) -> tuple[str, str]:
        """Of keys and values."""
        return self.key_encoding, self.value_encoding

    @property
    def packed(self) -> tuple[bool, bool]:
        """Whether any of its keys are, and any of its values."""
        return (
            any(is_packed(shard.keys) for shard in self.shards),
            any(shard.values is not None and is_packed(shard.values) for shard in self.shards),
        )


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


def layer_directory(name: str) -> str:
    """A layer's directory in the index: its name, percent-encoded ("%root": the root module).

    A name that no directory can have is changed: dots alone are encoded too, and a long name ends
    in a digest of the whole.
    """
    return f"layers/{_encoded(name)}"


def _encoded(name: str) -> str:
    encoded = quote(name, safe="") or "%root"
    if not encoded.strip("."):
        encoded = encoded.replace(".", "%2E")
    if len(encoded) > _LONGEST_NAME:
        encoded = f"{encoded[:_LONGEST_NAME]}%{digest(name.encode())}"
    return encoded


def layer_file(layer: str, what: str) -> str:
    """The name of a file of a layer, such as "initial.safetensors"."""
    return f"{layer_directory(layer)}/{what}"


def parts_file(layer: str, column: str) -> str:
    """The name of the file with a layer's parts by the values of a column."""
    return layer_file(layer, f"parts-{_encoded(column)}.safetensors")


def shard_file(layer: str, number: int, what: str) -> str:
    """The name of a file of one of a layer's shards, such as "keys.faiss"."""
    return f"{layer_directory(layer)}/{number:06}.{what}"


def sidecar_file(space: int, number: int) -> str:
    """The name of the sidecar of one of a row space's shards."""
    return f"rows/{space}-{number:06}.parquet"
