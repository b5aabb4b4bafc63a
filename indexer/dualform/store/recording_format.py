"""The recording's names and manifest, as JSON and back (docs/format-recording.md).

A recording is an append-only log of segments. `segments/NNNNNN.json` commits a segment; it is
written last and carries its own digest, so that a segment is there as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dualform.store.errors import DamagedError, NotFoundError, VersionError
from dualform.store.fields import Fields, text, wrong
from dualform.store.files import check_seal, is_there, read_json, write_sealed
from dualform.store.ranks import Rank
from dualform.store.sampling import (
    ALL_ROWS,
    Sampling,
)

FORMAT = "dualform-recording"
VERSION = 5
"""The newest that this program reads. 2 knows encodings of keys and values, 3 ranks, 4 packed
records, 5 inputs that keys are cut from; a recording is written as the oldest that has what is in
it."""
MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
FINAL = "final.safetensors"
CLOSED = "closed.json"
SEGMENTS = "segments"
EXAMPLES = "examples"
PAYLOADS = {"id": (pa.int64(), pa.string()), "kind": (pa.string(),), "data": (pa.binary(),)}
"""The columns of its files, and of what types they may be."""
PAYLOAD_KINDS = ("png", "bytes", "text")

RERECORD = "record again, or restore the file from a copy"


@dataclass(frozen=True)
class LayerSpec:
    """A recorded layer.

    Attributes:
        name: As in `model.named_modules()`.
        kind: "linear", "transposed_linear", "convolution", "embedding", "attention_in",
            "attention_out", "expert" or "lstm".
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
        sampling: Which rows are kept.
        ranks: Of which process of a data-parallel run; None of a run in one process.
        left_out: Modules that hold matrices and are not recorded, by reason; said, not compared.
        packed: Records may be packed; a matter of disk alone, so not compared either.
        patches: Keys may be cut from inputs; likewise.
    """

    optimizer: str
    layers: Mapping[str, LayerSpec]
    values: bool
    created_by: str
    sampling: Sampling = ALL_ROWS
    ranks: Rank | None = None
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    packed: bool = field(default=False, compare=False)
    patches: bool = field(default=False, compare=False)

    def save(self, directory: Path) -> None:
        """Write `manifest.json` atomically."""
        layers = [asdict(layer) for layer in self.layers.values()]
        fields = {"optimizer": self.optimizer, "values": self.values, "created_by": self.created_by}
        sampling = {} if self.sampling.whole else {"sampling": self.sampling.to_json()}
        ranks = {} if self.ranks is None else {"ranks": self.ranks.to_json()}
        packed = {"packed": True} if self.packed else {}
        patches = {"patches": True} if self.patches else {}
        version = 5 if patches else 4 if packed else 3 if ranks else 2
        head = {"format": FORMAT, "version": version}
        left_out = [{"reason": why, "layers": list(n)} for why, n in self.left_out.items()]
        data = {**head, **fields, **sampling, **ranks, **packed, **patches, "layers": layers}
        data |= {"left_out": left_out} if left_out else {}
        write_sealed(directory / MANIFEST, data)

    @classmethod
    def load(cls, directory: Path) -> RecordingManifest:
        """Read and check `manifest.json`.

        Raises:
            NotFoundError: No recording there.
            VersionError: A newer format.
            DamagedError: Not what `save` writes.
        """
        path = directory / MANIFEST
        if not is_there(path):
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
        check_seal(path, data, RERECORD)
        try:
            Fields(data).integer("version", 1, VERSION)
            return cls._read(Fields(data))
        except ValueError as error:
            raise DamagedError(path, f"a field is wrong: {error}", RERECORD) from None

    @classmethod
    def _read(cls, data: Fields) -> RecordingManifest:
        layers = data.objects("layers", _layer_spec)
        by_name = {layer.name: layer for layer in layers}
        if len(by_name) < len(layers):
            raise ValueError("layers: two have the same name")
        return cls(
            optimizer=data.text("optimizer"),
            layers=by_name,
            values=data.boolean("values"),
            created_by=data.text("created_by"),
            sampling=Sampling.read(data),
            ranks=Rank.read(data),
            left_out=_left_out(data),
            packed=data.has("packed") and data.boolean("packed"),
            patches=data.has("patches") and data.boolean("patches"),
        )


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote.

    Raises:
        DamagedError: It is something else.
    """
    data = read_json(path, RERECORD)
    check_seal(path, data, RERECORD)
    return data


def _left_out(data: Fields) -> dict[str, tuple[str, ...]]:
    if not data.has("left_out"):
        return {}
    groups = data.objects("left_out", lambda f: (f.text("reason"), f.each("layers", text)))
    return dict(groups)


def _layer_spec(data: Fields) -> LayerSpec:
    spec = LayerSpec(
        name=data.text("name"),
        kind=data.text("kind"),
        d_in=data.integer("d_in", 1, 2**31),
        d_out=data.integer("d_out", 1, 2**31),
        weight=data.text("weight"),
        bias=data.optional_text("bias"),
        dtype=data.text("dtype"),
    )
    if spec.weight == spec.bias:
        raise wrong(data.called("bias"), spec.bias, "another name than the weight's")
    return spec
