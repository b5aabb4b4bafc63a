"""Build an index from a recording.

The build streams: for each row space, shard by shard, each layer's keys and values are read pass by
pass, put in the order of the shard's sidecar and written with their digest. Memory is bounded by
the shard (two buffers of its bytes), whatever the recording's length.

How a shard's rows are ordered is in sidecar.py, how a layer's files are filled in layer.py. Of two
background threads, one asks for the next shard's part of the recording to be read, the other sums
up keys and values while this one copies. The products are small and many: a second BLAS thread
would mostly wait, spinning, so a build leaves BLAS one, and gives back what it had.

Everything is written below a hidden directory beside the target and renamed at the end: a build
that was killed leaves no index, and the next one starts afresh.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from dualform.index.equal_keys import MOST_KEYS, EqualKeysWriter
from dualform.index.errors import BuildError
from dualform.index.layer import LayerSource, LayerWriter
from dualform.index.parts import PartsPlan, plan_parts
from dualform.index.payloads import write_payloads
from dualform.index.row_spaces import Space, row_spaces
from dualform.index.row_sum import FollowedSum, RowSums, at_once
from dualform.index.shards import ShardWriter
from dualform.index.sidecar import write_sidecar
from dualform.index.sketch import MIN_D_IN, SAMPLE_ROWS, leading_directions
from dualform.index.workspace import workspace
from dualform.store.encoding import HALVES
from dualform.store.errors import NoSpaceError
from dualform.store.files import sync_directory, write_atomic
from dualform.store.index import IndexManifest
from dualform.store.index_parts import LEDGER, RowSpace, layer_directory, layer_file
from dualform.store.ledger import InexactMark, to_parquet
from dualform.store.recording import Recording
from dualform.store.recording_ranks import open_recordings

SHARD_ROWS = 65_536
"""Rows of a shard at most."""

SHARD_BYTES = 256 << 20
"""Bytes of a shard's file at most: where rows are wide, a shard has fewer. The build holds two."""

Progress = Callable[[int, int], None]


def build_index(
    recording: Path | str | Sequence[Path | str],
    index: Path | str,
    *,
    values: bool = True,
    shard_rows: int = SHARD_ROWS,
    parts: Sequence[str] = (),
    round_keys: str | None = None,
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Publish a recording as an index.

    Args:
        recording: A recording's directory; one that was cut short is indexed up to its last commit.
            Of a data-parallel run the directory with its ranks', or those of all ranks: they become
            one index, up to the last step that all have committed.
        index: The directory to create. It appears at the end, whole.
        values: False leaves the values out: attention weights only, no dual output.
        shard_rows: Rows per shard at most.
        parts: Metadata columns: what the rows of each of their values became in the trained weights
            is kept, so that outputs by these groups are one small product.
        round_keys: "bfloat16" or "float16": what keys are rounded to that were recorded as float32,
            for half their bytes. Attention weights are then those of the rounded keys, the layer is
            marked as rounded, and the remainder of its outputs has what that leaves.
        announce: Called, before anything is written, with a sentence on what the parts take, or on
            steps that not all ranks have.
        progress: Called with (bytes written, bytes to write).

    Raises:
        ExistsError: The target exists, or another build is writing it.
        NotFoundError, VersionError, DamagedError: The recording can't be read.
        RanksError: A rank's recording is missing, or they are not of one run.
        NoSpaceError: The disk is full; nothing of the index is left on it.
        BuildError: The recording holds no step, shard_rows < 1, keys can't be rounded so, or parts
            of a column can't be kept: it is not there, has no value or more than `MOST_GROUPS`, or
            its parts take too much memory.
    """
    if shard_rows < 1:
        raise BuildError(f"shard_rows is {shard_rows}; it must be at least 1")
    if round_keys is not None and round_keys not in HALVES:
        raise BuildError(f"round_keys is {round_keys!r}; it may be {' or '.join(HALVES)}")
    target = Path(index).absolute()
    given = [recording] if isinstance(recording, (str, Path)) else recording
    source = open_recordings([Path(path) for path in given])
    if source.steps == 0:
        raise BuildError(f"{source.path} holds no committed step yet; there is nothing to index")
    values = values and source.manifest.values
    spaces = row_spaces(source)
    plan = plan_parts(source, spaces, parts, values)
    layers = {
        name: LayerSource(source, spec, values=values, round_keys=round_keys)
        for name, spec in source.manifest.layers.items()
    }
    build = _Build(source, layers, spaces, plan, values, shard_rows, progress)
    if announce is not None:
        for said in (source.cut, plan.describe() if parts else None):
            if said is not None:
                announce(said)
    with workspace(target) as directory, threadpool_limits(1, user_api="blas"):
        try:
            build.run(directory)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise NoSpaceError(
                f"{target}: there is no space left; keys and values alone take "
                f"{build.nbytes / 1e9:.2f} GB. Nothing of the index was kept: free some space or "
                "choose another disk; without values (--no-values) it needs less"
            ) from error


class _Build:
    """One build.

    Attributes:
        nbytes: Of all keys and values that it writes.
    """

    def __init__(
        self,
        source: Recording,
        layers: Mapping[str, LayerSource],
        spaces: list[Space],
        parts: PartsPlan,
        values: bool,
        shard_rows: int,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._values = values
        self._shard_rows = shard_rows
        self._progress = progress
        self._spaces = spaces
        self._parts = parts
        self._done = 0
        self._layers = layers
        self._space_of = {
            name: number for number, space in enumerate(spaces) for name in space.layers
        }
        # Marks are the remainder's matter; under an optimizer of no family all that moved is one.
        self._summed: frozenset[str] = frozenset()
        self._at_once: frozenset[str] = frozenset()
        family = source.ledger().family
        if values and family.explains:
            self._summed = frozenset(self._layers)
            counts = {name: parts.count(number) for name, number in self._space_of.items()}
            self._at_once = at_once(source.manifest.layers, family, counts)
        self.nbytes = sum(
            space.rows * sum(self._layers[name].row_bytes)
            for space in spaces
            for name in space.layers
        )

    def run(self, directory: Path) -> None:
        self._directory = directory
        (self._directory / "rows").mkdir()
        for name in self._layers:
            (self._directory / layer_directory(name)).mkdir(parents=True)
        writers = self._start_layers()
        with (
            ShardWriter(self._directory, self._largest_file()) as writer,
            ThreadPoolExecutor(1, "dualform-read-ahead") as ahead,
        ):
            for number, space in enumerate(self._spaces):
                step = self._rows_per_shard(space)
                for start in range(0, space.rows, step):
                    stop = min(start + step, space.rows)
                    ahead.submit(self._read_ahead, space, start, min(stop + step, space.rows))
                    order = write_sidecar(
                        self._directory, self._source, self._parts, number, space, start, stop
                    )
                    for name in space.layers:
                        writers[name].write_shard(writer, space, order)
        for layer in writers.values():
            layer.wait()
        self._finish(writers)

    def _rows_per_shard(self, space: Space) -> int:
        """The rows of a shard: fewer than asked for where a file would outgrow its bytes."""
        widest = max(max(self._layers[name].row_bytes) for name in space.layers)
        return max(1, min(self._shard_rows, SHARD_BYTES // widest))

    def _largest_file(self) -> int:
        sizes = [
            min(self._rows_per_shard(space), space.rows) * max(self._layers[name].row_bytes)
            for space in self._spaces
            for name in space.layers
        ]
        return max(sizes, default=0) + 4096

    def _read_ahead(self, space: Space, start: int, stop: int) -> None:
        """Have the recording of rows [start, stop) read, as far as nobody asked for it before."""
        records = self._layers[space.layers[0]].passes
        for i in space.passes_in(start, stop):
            if records[i].segment > space.asked_for:
                space.asked_for = records[i].segment
                self._source.read_ahead(space.asked_for)

    def _start_layers(self) -> dict[str, LayerWriter]:
        directions = {name: _find_directions(layer) for name, layer in self._layers.items()}
        equal_keys = self._start_equal_keys()
        initial = self._source.initial()
        return {
            name: LayerWriter(
                self._directory,
                layer,
                values=self._values,
                directions=directions[name],
                row_sum=self._row_sum(name, initial) if name in self._at_once else None,
                equal_keys=equal_keys[name],
                advance=self._advance,
            )
            for name, layer in self._layers.items()
        }

    def _row_sum(self, name: str, initial: Mapping[str, np.ndarray]) -> RowSums | FollowedSum:
        """What takes a layer's rows to what they add up to, from the recording's initial state."""
        source, ledger, spec = self._source, self._source.ledger(), self._layers[name].spec
        parts = self._parts.count(self._space_of[name])
        if not ledger.family.scalar:
            return FollowedSum(spec, ledger, initial, parts)
        return RowSums(
            spec,
            ledger.coefficients(spec.weight, source.steps),
            None if spec.bias is None else ledger.coefficients(spec.bias, source.steps),
            parts,
        )

    def _add_up(self, name: str, writer: LayerWriter, initial: Mapping[str, np.ndarray]) -> None:
        """Add up the rows of a layer whose were not while its files were written."""
        number = self._space_of[name]
        space, columns = self._spaces[number], len(self._parts.spaces[number])

        def parts(place: int, rows: int) -> np.ndarray:
            if not columns:
                return np.empty((0, rows), np.int32)
            return self._parts.codes(number, self._source.read_rows([space.blocks[place]]))

        writer.add_up(self._row_sum(name, initial), parts)

    def _start_equal_keys(self) -> dict[str, EqualKeysWriter]:
        most = MOST_KEYS // max(1, len(self._source.manifest.layers))
        return {
            name: EqualKeysWriter(self._directory, layer_file(name, "equal.npy"), space.rows, most)
            for space in self._spaces
            for name in space.layers
        }

    def _marks(self, name: str) -> list[InexactMark]:
        rounded = self._layers[name].mark()
        return [*([] if rounded is None else [rounded]), *self._source.marks.get(name, ())]

    def _advance(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self.nbytes)

    def _finish(self, writers: Mapping[str, LayerWriter]) -> None:
        source = self._source
        ledger_rows = [
            row for parameter in source.ledger().parameters.values() for row in parameter
        ]
        initial, final = source.initial(), source.final()
        # An index without values has no use for the states kept on the way.
        for step, read in source.states() if self._values else ():
            state = read()
            for layer in writers.values():
                layer.add_state(step, state)
        layers = {}
        # Those whose rows were added up already let go of what they hold before others begin.
        for name in sorted(writers, key=lambda name: name not in self._at_once):
            if name in self._summed - self._at_once:
                self._add_up(name, writers[name], initial)
            number = self._space_of[name]
            layers[name] = writers[name].finish(
                number,
                self._parts.spaces[number],
                self._marks(name),
                initial,
                final,
                source.dropped(name),
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
            sampling=source.manifest.sampling,
        )
        manifest.save(self._directory)
        for path in (self._directory / "layers").iterdir():
            sync_directory(path)
        sync_directory(self._directory)


def _find_directions(layer: LayerSource) -> np.ndarray | None:
    """The directions of the layer's sketches, from passes spread over the whole recording."""
    d = layer.spec.d_in
    if d < MIN_D_IN or layer.encodings[0].numbers(d) < d:  # places are shorter than sketches
        return None
    sample: list[np.ndarray] = []
    rows = 0
    for i in np.random.default_rng(0).permutation(len(layer.passes)):
        if rows >= SAMPLE_ROWS:
            break
        keys = layer.read(layer.passes[i], values=False)[:SAMPLE_ROWS]
        sample.append(layer.encodings[0].widen(keys, d))
        rows += len(sample[-1])
    return leading_directions(sample) if sample else None
