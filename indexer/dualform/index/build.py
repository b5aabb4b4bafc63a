"""Build an index from a recording.

The build streams: for each row space, shard by shard, each layer's keys and values are read pass by
pass, put in the order of the shard's sidecar and written with their digest. Memory is bounded by
the shard (two buffers of its bytes), whatever the recording's length.

Of two background threads, one asks for the next shard's part of the recording to be read, the other
sums up what the engine must know of the keys, and with the values what the rows add up to, while
this one copies. The products are small and many: a second BLAS thread would mostly wait, spinning,
so a build leaves BLAS one, and gives back what it had.

Everything is written below a hidden directory beside the target and renamed at the end: a build
that was killed leaves no index, and the next one starts afresh.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import save as save_safetensors
from threadpoolctl import threadpool_limits

from dualform.index.background import BackgroundWorker
from dualform.index.equal_keys import MOST_KEYS, EqualKeysWriter, digests
from dualform.index.key_summary import KeySummary
from dualform.index.parts import PartsPlan, plan_parts, write_parts
from dualform.index.payloads import write_payloads
from dualform.index.row_spaces import Space, row_spaces
from dualform.index.row_sum import FollowedSum, RowSums
from dualform.index.shards import ShardFile, ShardWriter
from dualform.index.sketch import MIN_D_IN, SAMPLE_ROWS, leading_directions, sketch
from dualform.index.workspace import workspace
from dualform.optimizers import Unknown
from dualform.store.encoding import FLOAT32, Encoding, encoding
from dualform.store.errors import NoSpaceError
from dualform.store.files import FileEntry, sync_directory, write_atomic
from dualform.store.grouping import group
from dualform.store.index import IndexManifest, runs
from dualform.store.index_parts import (
    LEDGER,
    IndexLayer,
    LayerShard,
    RowSpace,
    SpaceShard,
    StoredParts,
    layer_directory,
    layer_file,
    shard_file,
    sidecar_file,
)
from dualform.store.ledger import to_parquet
from dualform.store.parquet import write_parquet
from dualform.store.recording import LayerSpec, PassRecord, Recording

SHARD_ROWS = 65_536
"""Rows of a shard at most."""

SHARD_BYTES = 256 << 20
"""Bytes of a shard's file at most: where rows are wide, a shard has fewer. The build holds two."""

Progress = Callable[[int, int], None]


def build_index(
    recording: Path | str,
    index: Path | str,
    *,
    values: bool = True,
    shard_rows: int = SHARD_ROWS,
    parts: Sequence[str] = (),
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Publish a recording as an index.

    Args:
        recording: A recording's directory; one that was cut short is indexed up to its last commit.
        index: The directory to create. It appears at the end, whole.
        values: False leaves the values out: attention weights only, no dual output.
        shard_rows: Rows per shard at most.
        parts: Metadata columns: what the rows of each of their values became in the trained weights
            is kept, so that outputs by these groups are one small product.
        announce: Called, before anything is written, with a sentence on what the parts take.
        progress: Called with (bytes written, bytes to write).

    Raises:
        ExistsError: The target exists, or another build is writing it.
        NotFoundError, VersionError, DamagedError: The recording can't be read.
        NoSpaceError: The disk is full; nothing of the index is left on it.
        ValueError: The recording holds no step, shard_rows < 1, or parts of a column can't be
            kept: it is not there, has no value or more than `MOST_GROUPS`, or its parts take too
            much memory.
    """
    if shard_rows < 1:
        raise ValueError(f"shard_rows is {shard_rows}; it must be at least 1")
    target = Path(index).absolute()
    source = Recording.open(Path(recording))
    if source.steps == 0:
        raise ValueError(f"{recording} holds no committed step yet; there is nothing to index")
    values = values and source.manifest.values
    spaces = row_spaces(source)
    plan = plan_parts(source, spaces, parts, values)
    if parts and announce is not None:
        announce(plan.describe())
    with workspace(target) as directory, threadpool_limits(1, user_api="blas"):
        build = _Build(source, directory, spaces, plan, values, shard_rows, progress)
        try:
            build.run()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise NoSpaceError(
                f"{target}: there is no space left; keys and values alone take "
                f"{build.nbytes / 1e9:.2f} GB. Nothing of the index was kept: free some space or "
                "choose another disk; without values (--no-values) it needs less"
            ) from error


def layer_encodings(records: Sequence[PassRecord]) -> tuple[Encoding, Encoding]:
    """Of a layer's keys and values: that of its passes, or float32 where they have several."""
    spans = ([record.keys for record in records], [record.values for record in records])
    names = [{span.encoding for span in side if span is not None} for side in spans]
    keys, values = (encoding(found.pop()) if len(found) == 1 else FLOAT32 for found in names)
    return keys, values


@dataclass(frozen=True)
class _PendingShard:
    """A layer's shard whose files are still being written."""

    keys: Future[FileEntry]
    values: Future[FileEntry] | None
    sketch: FileEntry | None
    sums: FileEntry | None
    summary: KeySummary

    def result(self) -> LayerShard:
        return LayerShard(
            keys=self.keys.result(),
            values=None if self.values is None else self.values.result(),
            sketch=self.sketch,
            sums=self.sums,
            nonnegative=self.summary.nonnegative,
            max_norm=self.summary.max_norm,
            nonfinite=self.summary.nonfinite(),
        )


@dataclass(frozen=True)
class _Order:
    """How the rows of a shard lie.

    Attributes:
        positions: int64 [rows], of each row in the order of the recording.
        run_starts: Where the runs of (task, label) start.
        parts: int32 [columns, rows], the stored parts that each row of the recording belongs to.
    """

    positions: np.ndarray
    run_starts: np.ndarray
    parts: np.ndarray


class _Build:
    """One build.

    Attributes:
        nbytes: Of all keys and values that it writes.
    """

    def __init__(
        self,
        source: Recording,
        directory: Path,
        spaces: list[Space],
        parts: PartsPlan,
        values: bool,
        shard_rows: int,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._directory = directory
        self._values = values
        self._shard_rows = shard_rows
        self._progress = progress
        self._spaces = spaces
        self._parts = parts
        self._directions: dict[str, np.ndarray | None] = {}
        self._row_sums: dict[str, RowSums | FollowedSum] = {}
        self._equal_keys: dict[str, EqualKeysWriter] = {}
        self._done = 0
        layers = source.manifest.layers
        self._encodings = {name: layer_encodings(source.passes(name)) for name in layers}
        self.nbytes = sum(
            space.rows * sum(self._row_bytes(layers[name]))
            for space in self._spaces
            for name in space.layers
        )

    def _row_bytes(self, layer: LayerSpec) -> tuple[int, int]:
        """Of a key, and of a value where there are any."""
        keys, values = self._encodings[layer.name]
        return keys.row_bytes(layer.d_in), values.row_bytes(layer.d_out) if self._values else 0

    def run(self) -> None:
        (self._directory / "rows").mkdir()
        for name in self._source.manifest.layers:
            (self._directory / layer_directory(name)).mkdir(parents=True)
        layers = self._source.manifest.layers
        self._directions = {name: self._find_directions(layer) for name, layer in layers.items()}
        self._row_sums = self._start_row_sums()
        self._equal_keys = self._start_equal_keys()
        pending: dict[str, list[_PendingShard]] = {name: [] for name in layers}
        with (
            ShardWriter(self._directory, self._largest_file()) as writer,
            ThreadPoolExecutor(1, "dualform-read-ahead") as ahead,
        ):
            for number, space in enumerate(self._spaces):
                step = self._rows_per_shard(space)
                for start in range(0, space.rows, step):
                    stop = min(start + step, space.rows)
                    ahead.submit(self._read_ahead, space, start, min(stop + step, space.rows))
                    order = self._write_sidecar(number, space, start, stop)
                    for name in space.layers:
                        shard = self._write_layer(writer, layers[name], space, order, start, stop)
                        pending[name].append(shard)
        self._finish({name: tuple(p.result() for p in shards) for name, shards in pending.items()})

    def _rows_per_shard(self, space: Space) -> int:
        """The rows of a shard: fewer than asked for where a file would outgrow its bytes."""
        layers = [self._source.manifest.layers[name] for name in space.layers]
        widest = max(max(self._row_bytes(layer)) for layer in layers)
        return max(1, min(self._shard_rows, SHARD_BYTES // widest))

    def _largest_file(self) -> int:
        sizes = [
            min(self._rows_per_shard(space), space.rows) * max(self._row_bytes(layer))
            for space in self._spaces
            for layer in (self._source.manifest.layers[name] for name in space.layers)
        ]
        return max(sizes, default=0) + 4096

    def _write_sidecar(self, number: int, space: Space, start: int, stop: int) -> _Order:
        """Write the sidecar of rows [start, stop)."""
        passes = space.passes_in(start, stop)
        table = self._source.read_rows([space.blocks[i] for i in passes])
        table = table.slice(start - int(space.starts[passes[0]]), stop - start)
        codes = {
            name: group(table[name].combine_chunks()).codes
            for name in ("label", "task")
            if name in table.column_names
        }
        parts = self._parts.codes(number, table)
        order = np.lexsort(list(codes.values())) if codes else np.arange(len(table))
        task, label = (codes[name][order] if name in codes else None for name in ("task", "label"))
        row = pa.array(np.arange(start, stop)[order])
        table = table.take(pa.array(order)).combine_chunks().add_column(0, "row", row)
        name = sidecar_file(number, len(space.shards))
        entry = write_atomic(self._directory / name, write_parquet(table))
        space.shards.append(
            SpaceShard(FileEntry(name, entry.bytes, entry.xxh3), start, stop - start)
        )
        positions = np.empty(stop - start, np.int64)
        positions[order] = np.arange(stop - start)
        return _Order(positions, runs(task, label, stop - start), parts)

    def _write_layer(
        self,
        writer: ShardWriter,
        layer: LayerSpec,
        space: Space,
        order: _Order,
        start: int,
        stop: int,
    ) -> _PendingShard:
        """Fill and hand over the layer's keys, then its values, of rows [start, stop)."""
        summary = KeySummary(stop - start, layer.d_in, order.run_starts)
        directions = self._directions[layer.name]
        sketches = None
        if directions is not None:
            sketches = np.empty((stop - start, len(directions) + 1), np.float32)
        equal = self._equal_keys[layer.name]
        hashes = np.empty(stop - start, "S16") if equal.pays else None
        encodings = self._encodings[layer.name]
        number = len(space.shards) - 1

        def pieces(*, values: bool) -> Iterator[tuple[PassRecord, slice, np.ndarray]]:
            records = self._source.passes(layer.name)
            for i in space.passes_in(start, stop):
                begin = int(space.starts[i])
                first, last = max(begin, start), min(int(space.starts[i + 1]), stop)
                rows = self._read(records[i], layer, values=values)[first - begin : last - begin]
                yield records[i], slice(first - start, last - start), rows
                self._advance(rows.nbytes)

        def study(where: np.ndarray, rows: np.ndarray) -> None:
            keys = encodings[0].widen(rows)
            summary.add(where, keys)
            if sketches is not None and directions is not None:
                sketches[where] = sketch(keys, directions)
            if hashes is not None:
                hashes[where] = digests(rows)

        def fill_keys(file: ShardFile) -> None:
            with BackgroundWorker() as background:
                for _, inside, rows in pieces(values=False):
                    where = order.positions[inside]
                    background.submit(study, where, rows)
                    file.put(where, rows)
                if hashes is not None:
                    background.submit(equal.add, hashes)

        def fill_values(file: ShardFile) -> None:
            row_sum = self._row_sums.get(layer.name)

            def add(step: int, inside: slice, rows: np.ndarray) -> None:
                assert row_sum is not None
                keys = keys_file.take(order.positions[inside])
                row_sum.add(step, keys, encodings[1].widen(rows), order.parts[:, inside])

            with BackgroundWorker() as background:
                for record, inside, rows in pieces(values=True):
                    if row_sum is not None:
                        background.submit(add, record.step, inside, rows)
                    file.put(order.positions[inside], rows)

        rows = stop - start
        name = shard_file(layer.name, number, "keys.faiss")
        keys_file, keys = writer.keys(name, rows, layer.d_in, encodings[0], fill_keys)
        values = None
        if self._values:
            name = shard_file(layer.name, number, "values.npy")
            values = writer.values(name, rows, layer.d_out, encodings[1], fill_values)
        keys_file.let_go()
        entry = sums = None
        if sketches is not None:
            entry = self._write_array(shard_file(layer.name, number, "sketch.npy"), sketches)
        if summary.sums is not None:
            sums = self._write_array(shard_file(layer.name, number, "sums.npy"), summary.sums)
        return _PendingShard(keys, values, entry, sums, summary)

    def _read_ahead(self, space: Space, start: int, stop: int) -> None:
        """Have the recording of rows [start, stop) read, as far as nobody asked for it before."""
        records = self._source.passes(space.layers[0])
        for i in space.passes_in(start, stop):
            if records[i].segment > space.asked_for:
                space.asked_for = records[i].segment
                self._source.read_ahead(space.asked_for)

    def _find_directions(self, layer: LayerSpec) -> np.ndarray | None:
        """The directions of the layer's sketches, from passes spread over the whole recording."""
        if layer.d_in < MIN_D_IN:
            return None
        records = self._source.passes(layer.name)
        sample: list[np.ndarray] = []
        rows = 0
        for i in np.random.default_rng(0).permutation(len(records)):
            if rows >= SAMPLE_ROWS:
                break
            keys = self._read(records[i], layer, values=False)[:SAMPLE_ROWS]
            sample.append(self._encodings[layer.name][0].widen(keys))
            rows += len(sample[-1])
        return leading_directions(sample) if sample else None

    def _start_row_sums(self) -> dict[str, RowSums | FollowedSum]:
        """Of every layer whose optimizer is of a known family; marks are the remainder's matter."""
        ledger, steps = self._source.ledger(), self._source.steps
        if not self._values or ledger.family.name == Unknown.name:
            return {}
        layers = self._source.manifest.layers
        parts = {
            name: self._parts.count(number)
            for number, space in enumerate(self._spaces)
            for name in space.layers
        }
        if not ledger.family.scalar:
            initial = self._source.initial()
            return {
                name: FollowedSum(layer, ledger, initial, parts[name])
                for name, layer in layers.items()
            }
        return {
            name: RowSums(
                layer,
                ledger.coefficients(layer.weight, steps),
                None if layer.bias is None else ledger.coefficients(layer.bias, steps),
                parts[name],
            )
            for name, layer in layers.items()
        }

    def _start_equal_keys(self) -> dict[str, EqualKeysWriter]:
        most = MOST_KEYS // max(1, len(self._source.manifest.layers))
        return {
            name: EqualKeysWriter(self._directory, layer_file(name, "equal.npy"), space.rows, most)
            for space in self._spaces
            for name in space.layers
        }

    def _write_row_sum(
        self, spec: LayerSpec, space: int
    ) -> tuple[FileEntry | None, tuple[StoredParts, ...]]:
        """What all rows add up to, and the parts of it that are kept."""
        row_sum = self._row_sums.pop(spec.name, None)
        total = None if row_sum is None else row_sum.result()
        if row_sum is None or total is None:
            return None, ()
        parts = write_parts(self._directory, spec, self._parts.spaces[space], row_sum.parts())
        return self._write_state(spec, "rebuilt", total), parts

    def _write_array(self, name: str, array: np.ndarray) -> FileEntry:
        sink = io.BytesIO()
        np.save(sink, array, allow_pickle=False)
        entry = write_atomic(self._directory / name, sink.getvalue())
        return FileEntry(name, entry.bytes, entry.xxh3)

    def _read(self, record: PassRecord, layer: LayerSpec, *, values: bool) -> np.ndarray:
        """A pass's keys or values, as the index stores them."""
        if values:
            rows, span = self._source.stored_values(record), record.values
        else:
            rows, span = self._source.stored_keys(record), record.keys
        assert span is not None
        if span.encoding != self._encodings[layer.name][values].name:
            rows = encoding(span.encoding).widen(rows)
        return rows.reshape(record.rows, layer.d_out if values else layer.d_in)

    def _advance(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self.nbytes)

    def _finish(self, shards: dict[str, tuple[LayerShard, ...]]) -> None:
        source = self._source
        ledger_rows = [
            row for parameter in source.ledger().parameters.values() for row in parameter
        ]
        initial, final = source.initial(), source.final()
        states = self._write_states()
        layers = {}
        for number, space in enumerate(self._spaces):
            for name in space.layers:
                spec = source.manifest.layers[name]
                directions = self._directions[name]
                file = layer_file(name, "directions.npy")
                rebuilt, parts = self._write_row_sum(spec, number)
                layers[name] = IndexLayer(
                    name=name,
                    kind=spec.kind,
                    d_in=spec.d_in,
                    d_out=spec.d_out,
                    weight=spec.weight,
                    bias=spec.bias,
                    space=number,
                    values=self._values,
                    inexact=tuple(source.marks.get(name, ())),
                    directions=None if directions is None else self._write_array(file, directions),
                    initial=self._write_state(spec, "initial", initial),
                    final=None if final is None else self._write_state(spec, "final", final),
                    states=tuple(states[name]),
                    shards=shards[name],
                    rebuilt=rebuilt,
                    equal_keys=self._equal_keys[name].result(),
                    key_encoding=self._encodings[name][0].name,
                    value_encoding=self._encodings[name][1].name,
                    parts=parts,
                )
        examples, payloads = write_payloads(source, self._directory) or (None, None)
        manifest = IndexManifest(
            steps=source.steps,
            optimizer=source.manifest.optimizer,
            complete=source.complete,
            ledger=write_atomic(self._directory / LEDGER, to_parquet(ledger_rows)),
            examples=examples,
            payloads=payloads,
            layers={name: layers[name] for name in source.manifest.layers},
            spaces=tuple(RowSpace(space.rows, tuple(space.shards)) for space in self._spaces),
        )
        manifest.save(self._directory)
        for path in (self._directory / "layers").iterdir():
            sync_directory(path)
        sync_directory(self._directory)

    def _write_states(self) -> dict[str, list[tuple[int, FileEntry]]]:
        """The states kept on the way, per layer; an index without values has no use for them."""
        layers = self._source.manifest.layers
        written: dict[str, list[tuple[int, FileEntry]]] = {name: [] for name in layers}
        for step, read in self._source.states() if self._values else ():
            state = read()
            for name, spec in layers.items():
                if spec.weight in state:
                    written[name].append((step, self._write_state(spec, f"states-{step}", state)))
        return written

    def _write_state(self, spec: LayerSpec, which: str, state: dict[str, np.ndarray]) -> FileEntry:
        """The layer's weight, bias and optimizer buffers, by the names the recording uses."""
        parameters = [spec.weight] + ([] if spec.bias is None else [spec.bias])
        names = [n for n in state if n in parameters or n.partition(":")[2] in parameters]
        data = save_safetensors({n: np.ascontiguousarray(state[n]) for n in names})
        name = layer_file(spec.name, f"{which}.safetensors")
        entry = write_atomic(self._directory / name, data)
        return FileEntry(name, entry.bytes, entry.xxh3)
