"""The recording's names, manifest and segment tables, as JSON and back (docs/format-recording.md).

A recording is an append-only log of segments. `segments/NNNNNN.json` commits a segment; it is
written last and carries its own digest, so that a segment is there as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualform.store.errors import DamagedError, NotFoundError, VersionError
from dualform.store.files import FileEntry, check_seal, read_json, write_sealed
from dualform.store.ledger import InexactMark

FORMAT = "dualform-recording"
VERSION = 1
MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
FINAL = "final.safetensors"
CLOSED = "closed.json"
SEGMENTS = "segments"
EXAMPLES = "examples"

ALIGNMENT = 4096
"""Every record starts at a multiple of this many bytes, and is padded to one with zeros."""

ROW_COLUMNS = ("step", "slot", "position")
"""Metadata columns that the recorder fills by itself, all int64."""

_PASS_COLUMNS = (
    "layer",
    "step",
    "rows",
    "block",
    "keys_offset",
    "keys_xxh3",
    "values_offset",
    "values_xxh3",
)

RERECORD = "record again, or restore the file from a copy"


@dataclass(frozen=True)
class LayerSpec:
    """A recorded layer.

    Attributes:
        name: As in `model.named_modules()`.
        kind: "linear" or "lstm".
        d_in: Length of a key.
        d_out: Length of a value.
        weight: Name of the weight as in `model.named_parameters()`.
        bias: Name of the bias, or None.
        dtype: The weight's own dtype, such as "float32".
    """

    name: str
    kind: str
    d_in: int
    d_out: int
    weight: str
    bias: str | None
    dtype: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weight and, where there is one, the bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class RecordingManifest:
    """What is recorded; written first.

    Attributes:
        optimizer: Class name, such as "SGD".
        layers: By name, in the model's order.
        values: False for a recording of keys alone.
        created_by: Program and version.
    """

    optimizer: str
    layers: Mapping[str, LayerSpec]
    values: bool
    created_by: str

    def save(self, directory: Path) -> None:
        """Write `manifest.json` atomically."""
        layers = [asdict(layer) for layer in self.layers.values()]
        fields = {"optimizer": self.optimizer, "values": self.values, "created_by": self.created_by}
        write_sealed(
            directory / MANIFEST, {"format": FORMAT, "version": VERSION, **fields, "layers": layers}
        )

    @classmethod
    def load(cls, directory: Path) -> RecordingManifest:
        """Read and check `manifest.json`.

        Raises:
            NotFoundError: No recording there.
            VersionError: A newer format.
            DamagedError: Not what `save` writes.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise NotFoundError(
                f"{directory} is not a recording (no {MANIFEST}); make one with "
                "dualform.record.Recorder(model, optimizer, path)"
            )
        data = read_json(path, RERECORD)
        if data.get("format") != FORMAT:
            raise NotFoundError(f"{directory} is not a recording (format {data.get('format')!r})")
        version = data.get("version")
        if isinstance(version, int) and version > VERSION:
            raise VersionError(
                f"{directory} is a recording of version {version}; this dualform reads up to "
                f"version {VERSION}: upgrade it"
            )
        try:
            check_seal(path, data, RERECORD)
            layers = [LayerSpec(**layer) for layer in data["layers"]]
            return cls(
                optimizer=data["optimizer"],
                layers={layer.name: layer for layer in layers},
                values=data["values"],
                created_by=data["created_by"],
            )
        except (KeyError, TypeError) as error:
            raise DamagedError(path, f"a field is missing or wrong ({error!r})", RERECORD) from None


class Span(NamedTuple):
    """One record in a segment's .bin file: where it starts, its bytes, their digest."""

    offset: int
    nbytes: int
    xxh3: str


class PassRecord(NamedTuple):
    """The rows that one layer took from one forward pass.

    Attributes:
        segment: Number of the segment that holds them.
        step: The optimizer step that used them.
        rows: How many.
        block: Number of the rows' metadata, in the whole recording.
        keys: float32 [rows, d_in].
        values: float32 [rows, d_out], raw (-dL/dy); None in a recording of keys alone.
    """

    segment: int
    step: int
    rows: int
    block: int
    keys: Span
    values: Span | None


@dataclass(frozen=True)
class SegmentTable:
    """Everything that `segments/NNNNNN.json` says.

    Attributes:
        number: The segment's own.
        first_step: Its first step.
        steps: How many steps it holds; 0 where it only carries marks or examples.
        initial: The file of the initial state, the same in every segment.
        bin_bytes: Size of its .bin file; each record has its own digest.
        rows: The row metadata file.
        ledger: The ledger file.
        passes: In row order per layer: layer name and record.
        first_block: Number of its first block.
        block_rows: Rows of each block, which lie one after the other in the metadata file.
        columns: The user's metadata columns: "int64", "float64", "string" or "bool" by name.
        marks: Layer name and mark, those raised in this segment.
        examples: Example files completed with this segment.
        states: The state after so many steps, and its file; none is before the segment's first
            step or after its last.
    """

    number: int
    first_step: int
    steps: int
    initial: FileEntry
    bin_bytes: int
    rows: FileEntry
    ledger: FileEntry
    passes: Sequence[tuple[str, PassRecord]]
    first_block: int
    block_rows: Sequence[int]
    columns: Mapping[str, str]
    marks: Sequence[tuple[str, InexactMark]]
    examples: Sequence[FileEntry]
    states: Sequence[tuple[int, FileEntry]] = ()

    def save(self, directory: Path, layers: Mapping[str, LayerSpec]) -> None:
        """Write the segment's .json atomically into `directory`: this commits the segment."""
        index = {name: i for i, name in enumerate(layers)}
        records = [record for _, record in self.passes]
        values = [record.values for record in records]
        data = {
            "segment": self.number,
            "first_step": self.first_step,
            "steps": self.steps,
            "initial": self.initial.to_json(),
            "bin_bytes": self.bin_bytes,
            "rows": self.rows.to_json(),
            "ledger": self.ledger.to_json(),
            "passes": {
                "layer": [index[name] for name, _ in self.passes],
                "step": [record.step for record in records],
                "rows": [record.rows for record in records],
                "block": [record.block for record in records],
                "keys_offset": [record.keys.offset for record in records],
                "keys_xxh3": [record.keys.xxh3 for record in records],
                "values_offset": [None if span is None else span.offset for span in values],
                "values_xxh3": [None if span is None else span.xxh3 for span in values],
            },
            "blocks": {"first": self.first_block, "rows": list(self.block_rows)},
            "columns": dict(self.columns),
            "marks": [{"layer": name, **asdict(mark)} for name, mark in self.marks],
            "examples": [entry.to_json() for entry in self.examples],
            "states": [{"step": step, "file": file.to_json()} for step, file in self.states],
        }
        write_sealed(directory / segment_name(self.number, "json"), data)

    @classmethod
    def load(cls, path: Path, layers: Mapping[str, LayerSpec]) -> SegmentTable:
        """Read what `save` wrote.

        Raises:
            DamagedError: It is something else.
        """
        data = read_json(path, RERECORD)
        check_seal(path, data, RERECORD)
        try:
            return _segment_table(data, list(layers.values()))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DamagedError(path, f"a field is missing or wrong ({error!r})", RERECORD) from None


def segment_name(number: int, suffix: str) -> str:
    """File name of a segment's part: "000003.bin"."""
    return f"{number:06d}.{suffix}"


def padded(nbytes: int) -> int:
    """Bytes that a record takes in the .bin file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote.

    Raises:
        DamagedError: It is something else.
    """
    data = read_json(path, RERECORD)
    check_seal(path, data, RERECORD)
    return data


def _segment_table(data: Mapping[str, Any], layers: Sequence[LayerSpec]) -> SegmentTable:
    number, passes = data["segment"], []
    columns = [data["passes"][name] for name in _PASS_COLUMNS]
    for layer, step, rows, block, k, k_xxh3, v, v_xxh3 in zip(*columns, strict=True):
        spec = layers[layer]
        keys = Span(k, rows * spec.d_in * 4, k_xxh3)
        values = None if v is None else Span(v, rows * spec.d_out * 4, v_xxh3)
        passes.append((spec.name, PassRecord(number, step, rows, block, keys, values)))
    return SegmentTable(
        number=number,
        first_step=data["first_step"],
        steps=data["steps"],
        initial=FileEntry.from_json(data["initial"]),
        bin_bytes=data["bin_bytes"],
        rows=FileEntry.from_json(data["rows"]),
        ledger=FileEntry.from_json(data["ledger"]),
        passes=passes,
        first_block=data["blocks"]["first"],
        block_rows=data["blocks"]["rows"],
        columns=data["columns"],
        marks=[(m["layer"], InexactMark(m["from_step"], m["reason"])) for m in data["marks"]],
        examples=[FileEntry.from_json(entry) for entry in data["examples"]],
        states=[
            (int(state["step"]), FileEntry.from_json(state["file"]))
            for state in data.get("states", ())
        ],
    )
