"""Build an index from a recording.

The build streams: for each row space, shard by shard, each layer's keys and values are read pass by
pass, put in the order of the shard's sidecar and written with their digest. Memory is bounded by
the shard (two buffers of its bytes), whatever the recording's length.

What is made of a recording is planned in plan.py, how a shard's rows are ordered is in sidecar.py,
how a layer's files are filled in layer.py, what belongs to no shard in finish.py. Of two
background threads, one asks for the next shard's part of the recording to be read, the other sums
up keys and values while this one copies. The products are small and many: a second BLAS thread
would mostly wait, spinning, so a build leaves BLAS one, and gives back what it had.

Everything is written below a hidden directory beside the target and renamed at the end: a build
that was killed leaves no index, and the next one starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from threadpoolctl import threadpool_limits

from dualform.index.equal_keys import EqualKeysWriter
from dualform.index.finish import MadeLayer, Summed, finish, make_directories
from dualform.index.layer import LayerWriter
from dualform.index.plan import SHARD_ROWS, Options, Plan, make_plan
from dualform.index.row_spaces import Space
from dualform.index.row_sum import FollowedSum, RowSums
from dualform.index.shards import ShardWriter
from dualform.index.sidecar import write_sidecar
from dualform.index.workspace import failures_told, workspace
from dualform.store.index_parts import SpaceShard, layer_file

Progress = Callable[[int, int], None]


def build_index(
    recording: Path | str | Sequence[Path | str],
    index: Path | str,
    *,
    values: bool = True,
    shard_rows: int = SHARD_ROWS,
    parts: Sequence[str] = (),
    round_keys: str | None = None,
    pack: bool = False,
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
        pack: Keys and values are packed without loss, each file the shortest way. Every answer
            stays the same, bit for bit, and those that read rows take longer; FAISS opens no packed
            file (docs/packed-index.md).
        announce: Called, before anything is written, with a sentence on what the parts take, on
            what packing is expected to leave, or on steps that not all ranks have.
        progress: Called with (bytes written, bytes to write).

    Raises:
        ExistsError: The target exists, or another build is writing it.
        NotFoundError, VersionError, DamagedError: The recording can't be read.
        RanksError: A rank's recording is missing, or they are not of one run.
        NoSpaceError: The disk is full; nothing of the index is left on it.
        WriteError: The target's folder can't be written, or the disk fails; nothing is left.
        UnreadableError: A file of the recording can't be read.
        BuildError: The recording holds no step, shard_rows < 1, keys can't be rounded so, or parts
            of a column can't be kept: it is not there, has no value or more than `MOST_GROUPS`, or
            its parts take too much memory.
    """
    columns = (parts,) if isinstance(parts, str) else tuple(parts)
    plan = make_plan(recording, Options(values, shard_rows, columns, round_keys, pack))
    target = Path(index).absolute()
    if announce is not None:
        plan.announce(announce)
    with (
        failures_of(target, plan),
        workspace(target) as directory,
        threadpool_limits(1, user_api="blas"),
    ):
        _Build(plan, progress).run(directory)


def failures_of(target: Path, plan: Plan) -> AbstractContextManager[None]:
    """What keeps this plan's index from being written is told as such."""
    return failures_told(target, plan.nbytes, "; without values (--no-values) it needs less")


class _Build:
    """One build: all shards, one after the other."""

    def __init__(self, plan: Plan, progress: Progress | None) -> None:
        self._plan = plan
        self._progress = progress
        self._done = 0
        self._asked_for: dict[int, int] = {}

    def run(self, directory: Path) -> None:
        plan = self._plan
        self._directory = directory
        make_directories(directory, plan)
        initial = plan.source.initial()
        self._sums: dict[str, RowSums | FollowedSum] = {
            name: plan.row_sum(name, initial) for name in plan.layers if name in plan.at_once
        }
        self._directions = {name: plan.directions(name) for name in plan.layers}
        self._keys = {
            name: EqualKeysWriter(
                directory, layer_file(name, "equal.npy"), space.rows, plan.most_keys()
            )
            for space in plan.spaces
            for name in space.layers
        }
        writers = {
            name: LayerWriter(
                directory,
                layer,
                values=plan.options.values,
                directions=self._directions[name],
                row_sum=self._sums.get(name),
                equal_keys=self._keys[name],
                advance=self._advance,
            )
            for name, layer in plan.layers.items()
        }
        with (
            ShardWriter(directory, plan.largest_file, pack=plan.options.pack) as writer,
            ThreadPoolExecutor(1, "dualform-read-ahead") as ahead,
        ):
            spaces = [
                self._write_space(number, writers, writer, ahead)
                for number in range(len(plan.spaces))
            ]
        made = {
            name: MadeLayer(
                layer.wait(),
                self._directions[name],
                self._keys[name].result(),
                partial(self._summed, name) if name in plan.summed else None,
            )
            for name, layer in writers.items()
        }
        del writers
        finish(directory, plan, spaces, made)

    def _write_space(
        self,
        number: int,
        writers: dict[str, LayerWriter],
        writer: ShardWriter,
        ahead: ThreadPoolExecutor,
    ) -> list[SpaceShard]:
        plan, space = self._plan, self._plan.spaces[number]
        shards = []
        for shard, start, stop in plan.shards_of(number):
            later = min(2 * stop - start, space.rows)
            ahead.submit(self._read_ahead, space, number, start, later)
            order, entry = write_sidecar(
                self._directory, plan.source, plan.parts, number, space, shard, start, stop
            )
            shards.append(entry)
            for name in space.layers:
                writers[name].write_shard(writer, space, order)
        return shards

    def _read_ahead(self, space: Space, number: int, start: int, stop: int) -> None:
        """Have the recording of rows [start, stop) read, as far as nobody asked for it before."""
        records = self._plan.layers[space.layers[0]].passes
        for i in space.passes_in(start, stop):
            if records[i].segment > self._asked_for.get(number, -1):
                self._asked_for[number] = records[i].segment
                self._plan.source.read_ahead(records[i].segment)

    def _summed(self, name: str) -> Summed:
        """What a layer's rows add up to; of those that were not added up yet they are read again,
        and nothing is kept of it."""
        plan = self._plan
        row_sum = self._sums.pop(name, None)
        if row_sum is None:
            row_sum = plan.row_sum(name, plan.source.initial())
            plan.add_up(name, row_sum, 0, plan.spaces[plan.space_of[name]].rows)
        return Summed.of(row_sum)

    def _advance(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._plan.nbytes)
