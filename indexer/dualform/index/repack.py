"""The same index with its keys and values packed, or plain: a new one beside the old.

No recording is needed. What is neither keys nor values is shared with the old index by hard links,
where the file system has them: published files never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from dualform.index.errors import BuildError
from dualform.index.pieces import share_file
from dualform.index.shards import write_parts
from dualform.index.workspace import failures_told, workspace
from dualform.store.encoding import encoding
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_size, read_checked, sync_directory
from dualform.store.index import REBUILD, IndexManifest
from dualform.store.index_parts import IndexLayer, LayerShard, layer_directory, shard_file
from dualform.store.packed_rows import Rows, is_packed, pack_rows, packed_name, read_rows
from dualform.store.versions import newest

Progress = Callable[[int, int], None]


def pack_index(index: Path | str, target: Path | str, progress: Progress | None = None) -> None:
    """Publish an index once more, with keys and values packed where that pays.

    Args:
        index: It stays as it is. Of a folder of versions the newest is taken.
        target: The directory to create. It appears at the end, whole.
        progress: Called with (bytes done, bytes to do), unpacked ones.

    Raises:
        NotFoundError, VersionError, DamagedError: The index can't be read.
        ExistsError: The target exists, or somebody is writing it.
        NoSpaceError: The disk is full; nothing of the target is left on it.
        BuildError: It is packed already, or the target lies in it.
    """
    _publish(Path(index), Path(target), progress, pack=True)


def unpack_index(index: Path | str, target: Path | str, progress: Progress | None = None) -> None:
    """Publish a packed index once more, with the keys and values that it was packed from: the files
    of a build without packing, byte for byte. Arguments and errors are those of `pack_index`.
    """
    _publish(Path(index), Path(target), progress, pack=False)


def _publish(index: Path, target: Path, progress: Progress | None, *, pack: bool) -> None:
    index = newest(index)
    manifest = IndexManifest.load(index)
    is_now = any(any(layer.packed) for layer in manifest.layers.values())
    if target.resolve().is_relative_to(index.resolve()):
        raise BuildError(
            f"{target} lies in {index}, which is never changed: choose a folder beside it"
        )
    if is_now == pack:
        raise BuildError(f"{index} is {'packed already' if pack else 'not packed'}")
    total = sum(manifest.row_bytes(name)[1] for name in manifest.layers)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    with failures_told(target, total), workspace(target.absolute()) as directory:
        (directory / "rows").mkdir()
        for name in manifest.layers:
            (directory / layer_directory(name)).mkdir(parents=True)
        for entry in _shared(manifest):
            _share(index, directory, entry)
        layers = {
            name: replace(
                layer,
                shards=tuple(_shards(index, directory, manifest, layer, advance, pack=pack)),
            )
            for name, layer in manifest.layers.items()
        }
        replace(manifest, layers=layers).save(directory)
        for path in (directory / "layers").iterdir():
            sync_directory(path)
        sync_directory(directory)


def _shared(manifest: IndexManifest) -> Iterator[FileEntry]:
    """All files but the manifest, keys and values."""
    found = [manifest.ledger, manifest.examples, manifest.payloads]
    for space in manifest.spaces:
        found += [shard.sidecar for shard in space.shards]
    for layer in manifest.layers.values():
        found += [layer.directions, layer.initial, layer.final, layer.rebuilt]
        found += [entry for _, entry in layer.states]
        found += [part.file for part in layer.parts]
        found += [None if layer.equal_keys is None else layer.equal_keys.first]
        for shard in layer.shards:
            found += [shard.sketch, shard.sums]
    return (entry for entry in found if entry is not None)


def _shards(
    index: Path,
    directory: Path,
    manifest: IndexManifest,
    layer: IndexLayer,
    advance: Callable[[int], None],
    *,
    pack: bool,
) -> Iterator[LayerShard]:
    """The layer's shards, written anew."""
    of_keys, of_values = (encoding(name) for name in layer.encodings)
    places = manifest.spaces[layer.space].shards
    for number, (shard, place) in enumerate(zip(layer.shards, places, strict=True)):

        def again(entry: FileEntry, name: str, shape: Rows, number: int = number) -> FileEntry:
            name = shard_file(layer.name, number, name)
            found = (_packed if pack else _plain)(index, directory, entry, name, shape)
            advance(shape.plain_bytes)
            return found

        rows, d_in, d_out = place.rows, layer.d_in, layer.d_out
        shape = Rows.of(of_keys, d_in, rows, of_keys.keys_header(d_in, rows))
        keys, values = again(shard.keys, of_keys.keys_file, shape), shard.values
        if values is not None:
            shape = Rows.of(of_values, d_out, rows, of_values.values_header(rows, d_out))
            values = again(values, "values.npy", shape)
        yield replace(shard, keys=keys, values=values)


def _packed(index: Path, directory: Path, entry: FileEntry, name: str, shape: Rows) -> FileEntry:
    data = read_checked(index, entry, REBUILD)
    if data[: len(shape.header)] != shape.header:
        raise DamagedError(index / entry.name, "its header is not the manifest's", REBUILD)
    blocks = pack_rows(memoryview(data), shape)
    if blocks is None:
        return _share(index, directory, entry)
    return write_parts(directory, packed_name(name), blocks)


def _plain(index: Path, directory: Path, entry: FileEntry, name: str, shape: Rows) -> FileEntry:
    if not is_packed(entry):
        return _share(index, directory, entry)
    rows = read_rows(index, entry, shape, REBUILD)
    return write_parts(directory, name, [shape.header, memoryview(rows.reshape(-1))])


def _share(index: Path, directory: Path, entry: FileEntry) -> FileEntry:
    share_file(check_size(index, entry, REBUILD), directory / entry.name)
    return entry
