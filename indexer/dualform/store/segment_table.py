"""What a segment of a recording commits: its table, as JSON and back (docs/format-recording.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dualform.store.encoding import FLOAT32, encoding
from dualform.store.errors import DamagedError
from dualform.store.fields import Fields, entry, integer, wrong
from dualform.store.files import FileEntry, check_seal, read_json, write_sealed
from dualform.store.ledger import InexactMark
from dualform.store.packing import MOST_BYTES, PACKINGS, PLAIN
from dualform.store.patches import Patches
from dualform.store.recording_again import AGAIN
from dualform.store.recording_format import INITIAL, RERECORD, LayerSpec
from dualform.store.recording_masks import MASKED
from dualform.store.row_metadata import ROW_COLUMNS, TYPES
from dualform.store.sampling import DroppedRows, dropped_columns, read_dropped

ALIGNMENT = 4096
"""Where nothing is packed, every record starts at a multiple of this many bytes, and is padded to
one with zeros."""
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
_ENCODING_COLUMNS = ("keys_encoding", "values_encoding")
_PATCHES_COLUMN = "keys_patches"
_PACKING_COLUMNS = ("keys_packing", "keys_bytes", "values_packing", "values_bytes")
_RESERVED = {*ROW_COLUMNS, "row"}


class Span(NamedTuple):
    """One record in a segment's .bin file.

    Attributes:
        offset: Where it starts.
        nbytes: Of its numbers, unpacked.
        xxh3: Their digest.
        encoding: Name of their encoding.
        packing: How they lie in the file (`dualform.store.packing`).
        packed: Bytes there, where they are packed.
        patches: How rows are cut from what lies there, where that is inputs; None where it is the
            rows.
    """

    offset: int
    nbytes: int
    xxh3: str
    encoding: str = FLOAT32.name
    packing: str = PLAIN
    packed: int = 0
    patches: Patches | None = None

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self.nbytes if self.packing == PLAIN else self.packed

    @property
    def whole(self) -> int:
        """Bytes of the rows that readers get, in their encoding."""
        if self.patches is None:
            return self.nbytes
        return self.nbytes // self.patches.numbers * self.patches.rows * self.patches.d_in

    def inputs(self, rows: int) -> int:
        """How many inputs lie there, or where it is not inputs, rows."""
        return rows if self.patches is None else rows // self.patches.rows


class PassRecord(NamedTuple):
    """The rows that one layer took from one forward pass.

    Attributes:
        segment: Number of the segment that holds them.
        step: The optimizer step that used them.
        rows: How many.
        block: Number of the rows' metadata, in the whole recording.
        keys: [rows, d_in], in an encoding of their own.
        values: [rows, d_out] likewise, raw (-dL/dy); None in a recording of keys alone.
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
        bin: That file's name; empty for the usual one.
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
        dropped: Rows that its steps had, and that are not recorded.
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
    dropped: Sequence[DroppedRows] = ()
    bin: str = ""

    def __post_init__(self) -> None:
        if not self.bin:
            object.__setattr__(self, "bin", segment_name(self.number, "bin"))

    def save(self, directory: Path, layers: Mapping[str, LayerSpec]) -> None:
        """Write the segment's .json atomically into `directory`: this commits the segment."""
        data = {
            "segment": self.number,
            "first_step": self.first_step,
            "steps": self.steps,
            "initial": self.initial.to_json(),
            "bin_bytes": self.bin_bytes,
            "rows": self.rows.to_json(),
            "ledger": self.ledger.to_json(),
            "passes": _pass_columns(self.passes, list(layers)),
            **_patches_used(self.passes),
            "blocks": {"first": self.first_block, "rows": list(self.block_rows)},
            "columns": dict(self.columns),
            "marks": [{"layer": name, **asdict(mark)} for name, mark in self.marks],
            "examples": [entry.to_json() for entry in self.examples],
            "states": [{"step": step, "file": file.to_json()} for step, file in self.states],
        }
        if self.bin != segment_name(self.number, "bin"):
            data["bin"] = self.bin
        if self.dropped:
            data["dropped"] = dropped_columns(self.dropped, list(layers))
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
            table = _segment_table(Fields(data), list(layers.values()))
            if segment_name(table.number, "json") != path.name:
                raise wrong("segment", table.number, "the number that the file is called by")
            return table
        except ValueError as error:
            raise DamagedError(path, f"a field is wrong: {error}", RERECORD) from None


def segment_name(number: int, suffix: str) -> str:
    """File name of a segment's part: "000003.bin"."""
    return f"{number:06d}.{suffix}"


def padded(nbytes: int) -> int:
    """Bytes that a record takes in the .bin file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _segment_table(data: Fields, layers: Sequence[LayerSpec]) -> SegmentTable:
    number = data.integer("segment")
    first_step, steps = data.integer("first_step"), data.integer("steps")
    blocks = data.object("blocks")

    def state(fields: Fields) -> tuple[int, FileEntry]:
        return fields.integer("step", first_step + 1, first_step + steps), fields.entry("file")

    table = SegmentTable(
        number=number,
        first_step=first_step,
        steps=steps,
        initial=data.entry("initial"),
        bin_bytes=data.integer("bin_bytes"),
        rows=data.entry("rows"),
        ledger=data.entry("ledger"),
        passes=[],
        first_block=blocks.integer("first"),
        block_rows=list(blocks.each("rows", integer)),
        columns=_columns(data),
        marks=data.objects("marks", lambda fields: _mark(fields, layers)),
        examples=data.each("examples", entry),
        states=data.objects("states", state) if data.has("states") else (),
        dropped=read_dropped(
            data, [spec.name for spec in layers], range(first_step, first_step + steps)
        ),
        bin=data.text("bin") if data.has("bin") else "",
    )
    for called, files, start in (
        ("initial", [table.initial], INITIAL),
        ("bin", [FileEntry(table.bin, 0, "")], f"{number:06d}."),
        ("rows", [table.rows], f"{number:06d}."),
        ("ledger", [table.ledger], f"{number:06d}."),
        ("states", [file for _, file in table.states], f"{number:06d}."),
        ("examples", list(table.examples), ""),
    ):
        for file in files:
            if "/" in file.name or not file.name.startswith(start):
                raise wrong(f"{called}.name", file.name, f"the name of a file {start}*")
    for i, (step, file) in enumerate(table.states):
        name = segment_name(number, f"state-{step}.safetensors")
        if file.name != name:
            raise wrong(f"states[{i}].file.name", file.name, name)
        if i and step <= table.states[i - 1][0]:
            raise wrong(f"states[{i}].step", step, "after the one before it")
    patches = data.objects("patches", Patches.read) if data.has("patches") else ()
    return replace(table, passes=_passes(data.object("passes"), layers, table, patches))


def _pass_columns(
    passes: Sequence[tuple[str, PassRecord]], layers: Sequence[str]
) -> dict[str, list[int | str | None]]:
    """The passes as JSON has them: a column for each field; values that are not kept, as null."""
    index = {name: i for i, name in enumerate(layers)}
    records = [record for _, record in passes]
    keys, values = [record.keys for record in records], [record.values for record in records]

    def each(spans: Sequence[Span | None], name: str) -> list[int | str | None]:
        return [None if span is None else getattr(span, name) for span in spans]

    return {
        "layer": [index[name] for name, _ in passes],
        "step": [record.step for record in records],
        "rows": [record.rows for record in records],
        "block": [record.block for record in records],
        "keys_offset": each(keys, "offset"),
        "keys_xxh3": each(keys, "xxh3"),
        "values_offset": each(values, "offset"),
        "values_xxh3": each(values, "xxh3"),
        "keys_encoding": each(keys, "encoding"),
        "values_encoding": each(values, "encoding"),
        **_packing_columns(keys, values, each),
        **_patches_column(keys),
    }


def _patches_used(passes: Sequence[tuple[str, PassRecord]]) -> dict[str, list[dict[str, Any]]]:
    """How keys are cut from inputs, each way once; nothing where none are."""
    ways = dict.fromkeys(record.keys.patches for _, record in passes)
    ways.pop(None, None)
    return {"patches": [way.to_json() for way in ways if way is not None]} if ways else {}


def _patches_column(keys: Sequence[Span]) -> dict[str, list[int | str | None]]:
    """Which of `_patches_used` each pass has."""
    ways = dict.fromkeys(span.patches for span in keys if span.patches is not None)
    number = {way: i for i, way in enumerate(ways)}
    if not number:
        return {}
    return {
        _PATCHES_COLUMN: [None if s.patches is None else number[s.patches] for s in keys],
    }


def _packing_columns(
    keys: Sequence[Span],
    values: Sequence[Span | None],
    each: Callable[[Sequence[Span | None], str], list[int | str | None]],
) -> dict[str, list[int | str | None]]:
    """How records are packed; nothing where all start at whole pages, and none is packed."""
    spans = [span for span in (*keys, *values) if span is not None]
    if all(span.packing == PLAIN and span.offset % ALIGNMENT == 0 for span in spans):
        return {}
    columns = [each(side, name) for side in (keys, values) for name in ("packing", "stored")]
    return dict(zip(_PACKING_COLUMNS, columns, strict=True))


def _passes(
    data: Fields, layers: Sequence[LayerSpec], table: SegmentTable, patches: Sequence[Patches]
) -> list[tuple[str, PassRecord]]:
    """The passes, each inside its segment: its step, its block, and its bytes in the .bin file."""
    count = len(data.items("layer"))
    columns = {name: data.items(name) for name in _PASS_COLUMNS}
    for name in _ENCODING_COLUMNS:  # not in version 1
        columns[name] = data.items(name) if data.has(name) else [FLOAT32.name] * count
    packed = data.has(_PACKING_COLUMNS[0])  # from version 4 on, where something is
    if packed:
        columns |= {name: data.items(name) for name in _PACKING_COLUMNS}
    ways: Sequence[Patches] = ()
    if data.has(_PATCHES_COLUMN):  # from version 5 on, where keys are cut from inputs
        columns[_PATCHES_COLUMN] = data.items(_PATCHES_COLUMN)
        ways = patches
    for name, column in columns.items():
        if len(column) != count:
            raise wrong(data.called(name), f"{len(column):,} long", f"as long as layer: {count:,}")
    passes = []
    for i in range(count):
        fields = Fields({name: column[i] for name, column in columns.items()}, f"passes[{i}]")
        spec = layers[fields.integer("layer", 0, len(layers) - 1)]
        step = fields.integer("step", table.first_step, table.first_step + table.steps - 1)
        block = fields.integer("block", table.first_block)
        inside = block - table.first_block
        rows = fields.integer("rows")
        if inside >= len(table.block_rows) or table.block_rows[inside] != rows:
            raise wrong(fields.called("block"), block, f"one of this segment's, of {rows:,} rows")
        way = _way(fields, ways, rows, spec.d_in)
        keys = _span(fields, "keys", rows, spec.d_in, table.bin_bytes, packed, way)
        values = None
        if fields.has("values_offset"):
            values = _span(fields, "values", rows, spec.d_out, table.bin_bytes, packed)
        passes.append((spec.name, PassRecord(table.number, step, rows, block, keys, values)))
    return passes


def _way(data: Fields, ways: Sequence[Patches], rows: int, d: int) -> Patches | None:
    """How a pass's keys, so many of d numbers, are cut from inputs; None where they are not."""
    if not data.has(_PATCHES_COLUMN):
        return None
    way = ways[data.integer(_PATCHES_COLUMN, 0, len(ways) - 1)]
    if way.d_in != d or rows % way.rows:
        must_be = f"a way to cut {rows:,} rows of {d:,} numbers, not of {way.d_in:,}"
        must_be += f", {way.rows:,} of each input"
        raise wrong(data.called(_PATCHES_COLUMN), data.get(_PATCHES_COLUMN), must_be)
    return way


def _span(
    data: Fields,
    what: str,
    rows: int,
    d: int,
    most: int,
    packed: bool,
    patches: Patches | None = None,
) -> Span:
    """A record before the end of the .bin file, of which columns say how it is packed or do not."""
    if patches is not None:  # what lies there is inputs, a row of numbers each
        rows, d = rows // patches.rows, patches.numbers
    offset = data.integer(f"{what}_offset")
    try:
        kind = encoding(data.get(f"{what}_encoding"))
    except ValueError as error:
        raise ValueError(f"{data.called(f'{what}_encoding')}: {error}") from None
    nbytes = rows * kind.row_bytes(d)
    packing, stored, alignment = PLAIN, nbytes, ALIGNMENT
    if packed:
        packing, alignment = data.text(f"{what}_packing"), 1
        known = (*PACKINGS, MASKED, AGAIN) if what == "keys" and rows else (*PACKINGS, MASKED)
        if packing not in known:
            raise wrong(data.called(f"{what}_packing"), packing, f"one of {', '.join(known)}")
        stored = data.integer(f"{what}_bytes", 0, nbytes)
        if packing == PLAIN and stored != nbytes:
            raise wrong(data.called(f"{what}_bytes"), stored, f"{nbytes:,}, as it is not packed")
        if packing != PLAIN and nbytes > MOST_BYTES:
            must_be = f"{PLAIN}: {nbytes:,} bytes are too many to be packed"
            raise wrong(data.called(f"{what}_packing"), packing, must_be)
    if offset % alignment or offset + stored > most:
        must_be = f"a multiple of {alignment}, {stored:,} bytes before the end of the .bin file"
        raise wrong(data.called(f"{what}_offset"), offset, must_be)
    size = 0 if packing == PLAIN else stored
    return Span(offset, nbytes, data.text(f"{what}_xxh3"), kind.name, packing, size, patches)


def _columns(data: Fields) -> dict[str, str]:
    found = data.get("columns")
    if not isinstance(found, dict):
        raise wrong("columns", found, "an object")
    for name, kind in found.items():
        if not isinstance(kind, str) or kind not in TYPES or name in _RESERVED:
            raise wrong(f"columns.{name}", kind, f"one of {', '.join(TYPES)}, of a user's column")
    return dict(found)


def _mark(data: Fields, layers: Sequence[LayerSpec]) -> tuple[str, InexactMark]:
    name = data.text("layer")
    if name not in {spec.name for spec in layers}:
        raise wrong(data.called("layer"), name, "the name of a layer")
    return name, InexactMark(data.integer("from_step"), data.text("reason"))
