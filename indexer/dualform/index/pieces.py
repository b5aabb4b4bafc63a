"""Shards that are made one at a time, and kept until an index is put together of them.

A *piece* is a shard of a row space: its sidecar, the files of every layer, and what an index must
know of them. It depends on its rows alone, not on how many come after, and not on who makes it. A
piece is kept once its note is there, which is written last.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualform.index.layer import LayerWriter, write_array
from dualform.index.lineage import Chains, Mark, begins_with, mark_of
from dualform.index.plan import Plan
from dualform.index.shards import ShardWriter
from dualform.index.sidecar import write_sidecar
from dualform.index.sketch import sketch
from dualform.store.errors import StoreError
from dualform.store.files import (
    FileEntry,
    check_seal,
    check_size,
    digest,
    read_checked,
    read_json,
    sync_directory,
    write_atomic,
    write_sealed,
)
from dualform.store.index_parts import LayerShard, SpaceShard, layer_directory, shard_file
from dualform.store.packed_rows import Rows, read_rows
from dualform.store.parquet import read_parquet

Directions = Mapping[str, "np.ndarray | None"]
_REMEDY = "remove it: it is made again"
_NOTES = "notes"
_DIGEST = np.dtype("S16")


@dataclass(frozen=True)
class Piece:
    """A shard of a row space, with every layer's.

    Attributes:
        space, shard: Their numbers.
        sidecar: What the manifest says of the rows.
        layers: And of each layer's files.
        digests: Of each layer's keys, S16 [rows], by position.
    """

    space: int
    shard: int
    sidecar: SpaceShard
    layers: Mapping[str, LayerShard]
    digests: Mapping[str, np.ndarray]

    @property
    def files(self) -> Iterator[FileEntry]:
        """All that an index has of it."""
        yield self.sidecar.sidecar
        for shard in self.layers.values():
            for entry in (shard.keys, shard.values, shard.sketch, shard.sums):
                if entry is not None:
                    yield entry


class _Gathered:
    """Takes a shard's digests."""

    pays = True

    def __init__(self) -> None:
        self.hashes = np.empty(0, _DIGEST)

    def add(self, hashes: np.ndarray) -> None:
        self.hashes = hashes


def make_piece(
    directory: Path,
    plan: Plan,
    number: int,
    shard: int,
    start: int,
    stop: int,
    directions: Directions,
    advance: Callable[[int], None],
) -> Piece:
    """Make a shard's files below a directory, as a build of the whole index does.

    Args:
        directory: It has the index's folders.
        plan: What is built.
        number: Of the row space.
        shard: Of the shard in it.
        start, stop: Its rows.
        directions: Of the layers' sketches.
        advance: Called with the bytes that were read, as they come.
    """
    space = plan.spaces[number]
    order, sidecar = write_sidecar(
        directory, plan.source, plan.parts, number, space, shard, start, stop
    )
    widest = max(max(plan.layers[name].row_bytes) for name in space.layers)
    gathered = {name: _Gathered() for name in space.layers}
    writers = {}
    largest = (stop - start) * widest + 4096
    with ShardWriter(directory, largest, pack=plan.options.pack) as writer:
        for name in space.layers:
            writers[name] = LayerWriter(
                directory,
                plan.layers[name],
                values=plan.options.values,
                directions=directions[name],
                row_sum=None,
                equal_keys=gathered[name],
                advance=advance,
            )
            writers[name].write_shard(writer, space, order)
    layers = {name: each.wait()[0] for name, each in writers.items()}
    hashes = {name: each.hashes for name, each in gathered.items()}
    return Piece(number, shard, sidecar, layers, hashes)


class PieceStore:
    """Keeps whole shards below a directory, whoever made them.

    Args:
        directory: It is made where it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self, plan: Plan) -> None:
        """Make the folders that pieces of a plan go to."""
        for folder in ("rows", _NOTES, *map(layer_directory, plan.layers)):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)

    def make(
        self,
        plan: Plan,
        number: int,
        shard: int,
        chains: Chains,
        directions: Directions,
        advance: Callable[[int], None],
    ) -> Piece:
        """Make a piece and keep it; what a killed process left of it is removed first, and what was
        kept of other rows."""
        self._note_path(number, shard).unlink(missing_ok=True)
        for name in plan.spaces[number].layers:
            folder = self.directory / layer_directory(name)
            for file in folder.glob(f"{shard:06}.*"):
                file.unlink()
        start, stop = plan.shards(plan.spaces[number])[shard]
        piece = make_piece(self.directory, plan, number, shard, start, stop, directions, advance)
        for each in piece.layers.values():
            if each.sketch is not None:
                made = self.directory / each.sketch.name
                os.replace(made, self._path(each.sketch))
        self._note(plan, piece, chains, directions)
        return piece

    def get(
        self, plan: Plan, number: int, shard: int, chains: Chains, directions: Directions
    ) -> Piece | None:
        """A piece that is kept, if it is what would be made now; of other directions its sketches
        are made again."""
        path = self._note_path(number, shard)
        try:
            note = read_json(path, _REMEDY)
            check_seal(path, note, _REMEDY)
            if note["of"] != _asked(plan, number, shard) or not _lasts(chains, note["made_at"]):
                return None
            piece = self._read(plan, number, shard, note)
        except (StoreError, KeyError, TypeError, ValueError):
            return None
        known = note["directions"]
        stale = [name for name in piece.layers if known.get(name) != _named(directions[name])]
        if stale:
            for name in stale:
                piece = self._sketched(plan, piece, name, directions[name])
            self._note(plan, piece, chains, directions)
            self._sweep(piece)
        return piece

    def put(self, piece: Piece, index: Path) -> None:
        """Have a piece's files in an index under construction too, without copies where the file
        system has hard links."""
        for entry in piece.files:
            share_file(self._path(entry), index / entry.name)

    def _read(self, plan: Plan, number: int, shard: int, note: Any) -> Piece:
        entry = FileEntry.from_json(note["digests"])
        data = read_checked(self.directory, entry, _REMEDY)
        names = plan.spaces[number].layers
        hashes = np.frombuffer(data, _DIGEST).reshape(len(names), -1)
        sidecar = note["sidecar"]
        rows = SpaceShard(
            FileEntry.from_json(sidecar["sidecar"]), int(sidecar["start"]), int(sidecar["rows"])
        )
        layers = {name: _layer_shard(note["layers"][name]) for name in names}
        piece = Piece(number, shard, rows, layers, dict(zip(names, hashes, strict=True)))
        for file in piece.files:
            check_size(self.directory, replace(file, name=self._name(file)), _REMEDY)
        return piece

    def _note(self, plan: Plan, piece: Piece, chains: Chains, directions: Directions) -> None:
        """Write what is to be known of a piece; from now on it is kept."""
        number, shard = piece.space, piece.shard
        data = b"".join(hashes.tobytes() for hashes in piece.digests.values())
        path = self._note_path(number, shard)
        entry = write_atomic(path.with_suffix(".digests"), data)
        for folder in map(layer_directory, piece.layers):
            sync_directory(self.directory / folder)
        note = {
            "of": _asked(plan, number, shard),
            "made_at": _made_at(plan, piece, chains),
            "directions": {name: _named(directions[name]) for name in piece.layers},
            "digests": replace(entry, name=f"{_NOTES}/{entry.name}").to_json(),
            "sidecar": asdict(piece.sidecar),
            "layers": {name: asdict(each) for name, each in piece.layers.items()},
        }
        write_sealed(path, note)

    def _sketched(
        self, plan: Plan, piece: Piece, name: str, directions: np.ndarray | None
    ) -> Piece:
        """A piece with other sketches of a layer, made of its keys as those of a build are."""
        shard, layer = piece.layers[name], plan.layers[name]
        entry = None
        if directions is not None:
            start, rows = piece.sidecar.start, piece.sidecar.rows
            kind, d = layer.encodings[0], layer.spec.d_in
            shape = Rows.of(kind, d, rows, kind.keys_header(d, rows))
            keys = read_rows(self.directory, shard.keys, shape, _REMEDY).view(kind.stored)
            sidecar = read_parquet(read_checked(self.directory, piece.sidecar.sidecar, _REMEDY))
            positions = np.empty(rows, np.int64)
            positions[sidecar["row"].to_numpy() - start] = np.arange(rows)
            found = np.empty((rows, len(directions) + 1), np.float32)
            space = plan.spaces[piece.space]
            for inside in space.inside(start, start + rows):
                where = positions[inside]
                found[where] = sketch(kind.widen(keys[where], d), directions)
            canonical = shard_file(name, piece.shard, "sketch.npy")
            entry = write_array(self.directory, canonical, found)
            os.replace(self.directory / canonical, self._path(entry))
        layers = {**piece.layers, name: replace(shard, sketch=entry)}
        return replace(piece, layers=layers)

    def _sweep(self, piece: Piece) -> None:
        """Remove sketches that the piece has no more."""
        for shard in piece.layers.values():
            if shard.sketch is not None:
                path = self._path(shard.sketch)
                for other in path.parent.glob(f"{Path(shard.sketch.name).name}.*"):
                    if other != path:
                        other.unlink()

    def _path(self, entry: FileEntry) -> Path:
        return self.directory / self._name(entry)

    def _name(self, entry: FileEntry) -> str:
        """Where a file of a piece lies: sketches by their digest, since they are made again."""
        sketched = entry.name.endswith(".sketch.npy")
        return f"{entry.name}.{entry.xxh3}" if sketched else entry.name

    def _note_path(self, number: int, shard: int) -> Path:
        return self.directory / _NOTES / f"{number}-{shard:06}.json"


def share_file(file: Path, other: Path) -> None:
    """The same file under another name; a copy where the file system has no hard links."""
    try:
        os.link(file, other)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS):
            raise
        shutil.copyfile(file, other)
        with open(other, "rb") as copied:
            os.fsync(copied.fileno())


def plan_digest(plan: Plan) -> str:
    """A digest of what every piece of a plan depends on."""
    options = plan.options
    parts = options.values, options.round_keys, options.pack, str(plan.source.schema)
    return digest(repr(parts).encode())


def _asked(plan: Plan, number: int, shard: int) -> str:
    """A digest of what the bytes of a piece depend on beside the recording's."""
    space = plan.spaces[number]
    start, stop = plan.shards(space)[shard]
    parts = [
        repr((plan_digest(plan), number, start, stop)),
        *(
            repr((spec.name, spec.kind, spec.d_in, spec.d_out, of_keys.name, of_values.name))
            for spec, (of_keys, of_values) in (
                (plan.layers[name].spec, plan.layers[name].encodings) for name in space.layers
            )
        ),
    ]
    return digest("\n".join(parts).encode())


def _made_at(plan: Plan, piece: Piece, chains: Chains) -> Mark:
    """What of the recording a piece rests on."""
    if len(chains) > 1:
        return mark_of(chains)
    layer = plan.layers[plan.spaces[piece.space].layers[0]]
    start = piece.sidecar.start
    passes = plan.spaces[piece.space].passes_in(start, start + piece.sidecar.rows)
    return mark_of(chains, [layer.passes[passes[-1]].segment + 1])


def _lasts(chains: Chains, made_at: Mark) -> bool:
    return begins_with(chains, made_at)


def _named(directions: np.ndarray | None) -> str:
    return "" if directions is None else digest(directions.tobytes())


def _layer_shard(data: Any) -> LayerShard:
    def entry(name: str) -> FileEntry | None:
        return None if data[name] is None else FileEntry.from_json(data[name])

    return LayerShard(
        keys=FileEntry.from_json(data["keys"]),
        values=entry("values"),
        sketch=entry("sketch"),
        sums=entry("sums"),
        nonnegative=bool(data["nonnegative"]),
        max_norm=float(data["max_norm"]),
        nonfinite=tuple((int(first), int(end)) for first, end in data["nonfinite"]),
    )
