"""An index's manifest from JSON, with every field checked against the others.

What is refused here: a field of the wrong type or range, a file that is not called as the format
says, and sizes that do not fit one another: of a file, its rows and the length of a row. So nothing
is allocated, and no file opened, because a manifest says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dualform.store.encoding import FLOAT32, NPY_HEADER_BYTES, Encoding, encoding
from dualform.store.fields import Fields, integer, pair, wrong
from dualform.store.files import FileEntry
from dualform.store.index_parts import (
    EqualKeys,
    IndexLayer,
    LayerShard,
    RowSpace,
    SpaceShard,
    StoredParts,
    layer_file,
    parts_file,
    shard_file,
    sidecar_file,
)
from dualform.store.ledger import InexactMark
from dualform.store.packed_rows import is_packed, least_bytes, packed_name
from dualform.store.sampling import read_counts

_MAY_BE_PACKED = ("keys", "values")


def read_spaces(data: Fields) -> tuple[RowSpace, ...]:
    """The row spaces, their shards one after the other from row 0.

    Raises:
        ValueError: A field is wrong; it says which.
    """
    spaces = data.objects("spaces", _space)
    for i, space in enumerate(spaces):
        start = 0
        for j, shard in enumerate(space.shards):
            where = f"spaces[{i}].shards[{j}]"
            _called(shard.sidecar, sidecar_file(i, j), f"{where}.sidecar")
            if shard.start != start:
                raise wrong(f"{where}.start", shard.start, f"{start:,}, after the shard before it")
            start += shard.rows
        if space.rows != start:
            raise wrong(f"spaces[{i}].rows", space.rows, f"{start:,}, as its shards have")
    return spaces


def read_layers(data: Fields, spaces: Sequence[RowSpace], steps: int) -> Mapping[str, IndexLayer]:
    """The layers by name.

    Args:
        data: The manifest.
        spaces: The row spaces that they refer to.
        steps: Of the training run.

    Raises:
        ValueError: A field is wrong; it says which.
    """
    layers: dict[str, IndexLayer] = {}
    for layer in data.objects("layers", lambda fields: _layer(fields, spaces, steps)):
        if layer.name in layers:
            raise ValueError(f"layers: two are called {layer.name!r}")
        layers[layer.name] = layer
    if not layers:
        raise ValueError("layers: an index has at least one")
    unused = set(range(len(spaces))) - {layer.space for layer in layers.values()}
    if unused:
        raise ValueError(f"spaces[{min(unused)}]: no layer has it")
    return layers


def first_dtype(rows: int) -> np.dtype[Any]:
    """Of a layer's positions in `EqualKeys.first`."""
    return np.dtype("<i4" if rows < 2**31 else "<i8")


def _space(data: Fields) -> RowSpace:
    def shard(fields: Fields) -> SpaceShard:
        return SpaceShard(
            fields.entry("sidecar"), fields.integer("start"), fields.integer("rows", 1)
        )

    return RowSpace(data.integer("rows"), data.objects("shards", shard))


def _layer(data: Fields, spaces: Sequence[RowSpace], steps: int) -> IndexLayer:
    number = data.integer("space", 0, len(spaces) - 1)
    layer = IndexLayer(
        name=data.text("name"),
        kind=data.text("kind"),
        d_in=data.integer("d_in", 1, 2**31),
        d_out=data.integer("d_out", 1, 2**31),
        weight=data.text("weight"),
        bias=data.optional_text("bias"),
        space=number,
        values=data.boolean("values"),
        inexact=data.objects("inexact", _mark),
        directions=data.optional_entry("directions"),
        initial=data.entry("initial"),
        final=data.optional_entry("final"),
        states=_states(data, steps),
        shards=data.objects("shards", _shard),
        rebuilt=data.optional_entry("rebuilt"),
        equal_keys=_equal_keys(data) if data.has("equal_keys") else None,
        key_encoding=_encoding(data, "key_encoding").name,
        value_encoding=_encoding(data, "value_encoding").name,
        parts=data.objects("parts", _parts) if data.has("parts") else (),
        dropped=read_counts(data),
    )
    if layer.weight == layer.bias:
        raise wrong(data.called("bias"), layer.bias, "another name than the weight's")
    _check_files(data, layer)
    _check_shards(data, layer, spaces[number])
    return layer


def _shard(data: Fields) -> LayerShard:
    def limits(value: Any, where: str) -> tuple[int, int]:
        first, last = pair(value, where)
        return integer(first, where), integer(last, where)

    return LayerShard(
        keys=data.entry("keys"),
        values=data.optional_entry("values"),
        sketch=data.optional_entry("sketch"),
        sums=data.optional_entry("sums"),
        nonnegative=data.boolean("nonnegative"),
        max_norm=data.number("max_norm"),
        nonfinite=data.each("nonfinite", limits),
    )


def _mark(data: Fields) -> InexactMark:
    return InexactMark(data.integer("from_step"), data.text("reason"))


def _states(data: Fields, steps: int) -> tuple[tuple[int, FileEntry], ...]:
    def state(value: Any, where: str) -> tuple[int, FileEntry]:
        step, file = pair(value, where)
        fields = Fields({"step": step, "file": file}, where)
        return fields.integer("step", 1, steps), fields.entry("file")

    found = data.each("states", state) if data.has("states") else ()
    if any(a >= b for (a, _), (b, _) in pairwise(found)):
        raise ValueError(f"{data.called('states')}: steps must ascend")
    return found


def _equal_keys(data: Fields) -> EqualKeys:
    fields = data.object("equal_keys")
    return EqualKeys(fields.integer("distinct", 1), fields.entry("first"))


def _parts(data: Fields) -> StoredParts:
    return StoredParts(data.text("column"), data.integer("groups", 1), data.entry("file"))


def _encoding(data: Fields, name: str) -> Encoding:
    try:
        return encoding(data.get(name)) if data.has(name) else FLOAT32
    except ValueError as error:
        raise ValueError(f"{data.called(name)}: {error}") from None


def _check_files(data: Fields, layer: IndexLayer) -> None:
    """The names of the layer's files, and the sizes of those that are not shards."""

    def called(entry: FileEntry | None, name: str, field: str) -> None:
        _called(entry, layer_file(layer.name, name), data.called(field))

    called(layer.initial, "initial.safetensors", "initial")
    called(layer.final, "final.safetensors", "final")
    called(layer.rebuilt, "rebuilt.safetensors", "rebuilt")
    called(layer.directions, "directions.npy", "directions")
    for step, entry in layer.states:
        called(entry, f"states-{step}.safetensors", "states")
    if layer.equal_keys is not None:
        called(layer.equal_keys.first, "equal.npy", "equal_keys.first")
    for i, part in enumerate(layer.parts):
        where = data.called(f"parts[{i}]")
        _called(part.file, parts_file(layer.name, part.column), f"{where}.file")
        least = 4 * part.groups * layer.d_out * (layer.d_in + (layer.bias is not None))
        if part.file.bytes < least:
            raise wrong(f"{where}.file.bytes", part.file.bytes, "what its groups take")
    if layer.directions is not None and _directions(layer) < 1:
        size = layer.directions.bytes
        raise wrong(f"{data.called('directions')}.bytes", size, "some rows of d_in numbers")


def _check_shards(data: Fields, layer: IndexLayer, space: RowSpace) -> None:
    """The shards beside those of the row space: names, sizes, ranges."""
    if len(layer.shards) != len(space.shards):
        count = len(space.shards)
        raise wrong(data.called("shards"), len(layer.shards), f"{count:,}, as its row space has")
    for i, (shard, place) in enumerate(zip(layer.shards, space.shards, strict=True)):
        where, rows = f"{data.called('shards')}[{i}]", place.rows
        _check_shard_files(where, layer, i, rows)
        if shard.max_norm > 1.01 * float(np.finfo(np.float32).max) * layer.d_in**0.5:
            raise wrong(f"{where}.max_norm", shard.max_norm, "a length that a key can have")
        last = -1
        for first, end in shard.nonfinite:
            if not last < first < end <= rows:
                raise wrong(f"{where}.nonfinite", [first, end], "ascending ranges inside the shard")
            last = end
    if layer.equal_keys is not None:
        size = layer.equal_keys.first.bytes
        if size != NPY_HEADER_BYTES + space.rows * first_dtype(space.rows).itemsize:
            raise wrong(data.called("equal_keys.first.bytes"), size, "what its rows take")
        if layer.equal_keys.distinct > space.rows:
            raise wrong(data.called("equal_keys.distinct"), layer.equal_keys.distinct, "fewer")


def _check_shard_files(where: str, layer: IndexLayer, i: int, rows: int) -> None:
    """The files of shard i, which has so many rows: those that belong, by name and size."""
    shard = layer.shards[i]
    keys, values = encoding(layer.key_encoding), encoding(layer.value_encoding)
    values_size = values.values_bytes(rows, layer.d_out)
    sketch_size = FLOAT32.values_bytes(rows, _directions(layer) + 1)
    sums_size = shard.sums.bytes if shard.sums and _fits(shard.sums, layer.d_in, rows) else -1
    for name, entry, file, there, size in (
        ("keys", shard.keys, keys.keys_file, True, keys.keys_bytes(layer.d_in, rows)),
        ("values", shard.values, "values.npy", layer.values, values_size),
        ("sketch", shard.sketch, "sketch.npy", layer.directions is not None, sketch_size),
        ("sums", shard.sums, "sums.npy", shard.sums is not None, sums_size),
    ):
        if (entry is not None) != there:
            raise ValueError(f"{where}.{name} {'is missing' if there else 'does not belong'}")
        if entry is not None and name in _MAY_BE_PACKED and is_packed(entry):
            _called(entry, shard_file(layer.name, i, packed_name(file)), f"{where}.{name}")
            least = least_bytes(rows)
            if not least <= entry.bytes < size:
                what = f"{least:,} or more, and fewer than its rows take"
                raise wrong(f"{where}.{name}.bytes", entry.bytes, what)
            continue
        _called(entry, shard_file(layer.name, i, file), f"{where}.{name}")
        if entry is not None and entry.bytes != size:
            raise wrong(f"{where}.{name}.bytes", entry.bytes, f"what {rows:,} rows take")


def _directions(layer: IndexLayer) -> int:
    """How many directions the sketches project on; -1 where the file has no such size."""
    if layer.directions is None:
        return 0
    count, rest = divmod(layer.directions.bytes - NPY_HEADER_BYTES, FLOAT32.row_bytes(layer.d_in))
    return -1 if rest else count


def _fits(sums: FileEntry, d_in: int, rows: int) -> bool:
    """Whether a file has the size of 1 to `rows` sums."""
    runs, rest = divmod(sums.bytes - NPY_HEADER_BYTES, 8 * d_in)
    return rest == 0 and 1 <= runs <= rows


def _called(entry: FileEntry | None, name: str, where: str) -> None:
    if entry is not None and entry.name != name:
        raise wrong(f"{where}.name", entry.name, repr(name))
