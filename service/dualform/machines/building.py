"""An index that several machines build: each makes shards of it, or adds up a layer's rows.

What is made lies below a hidden folder beside the index, on a file system that all machines have:
pieces with notes, which the next build goes on with where this one is interrupted. The process that
was asked puts the index together of them, and renames it at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from dualform import __version__
from dualform._errors import DualformError
from dualform.index import BuildError
from dualform.index.assemble import assemble, kept_sum, sum_layer
from dualform.index.build import failures_of
from dualform.index.finish import Summed, make_directories
from dualform.index.lineage import Chains, Mark, chains_of, mark_of
from dualform.index.pieces import Piece, PieceStore
from dualform.index.plan import Options, Plan, make_plan
from dualform.index.workspace import pieces_of, workspace
from dualform.machines.cluster import connect, imported

_LOOK_S = 0.2
_RETRIES = 3
"""So often a piece of work is given to another process where one ends in the middle of it."""


@dataclass(frozen=True)
class Job:
    """What every process that works on a build has to know.

    Attributes:
        recordings: The same paths on every machine.
        options: What is built.
        made_at: What of the recordings was there when it began.
        pieces: Where they go.
        version: Of dualform.
        threads: With so many threads torch multiplies; with others, sums have other last bits.
    """

    recordings: tuple[Path, ...]
    options: Options
    made_at: tuple[tuple[int, str], ...]
    pieces: Path
    version: str
    threads: int


@dataclass(frozen=True)
class Task:
    """A piece of work: a shard of a row space, or a layer's sum.

    Attributes:
        space, shard: Of a shard.
        layer: Of a sum.
    """

    space: int = -1
    shard: int = -1
    layer: str | None = None

    def __str__(self) -> str:
        if self.layer is not None:
            return f"the sum of layer {self.layer!r}"
        return f"shard {self.shard} of row space {self.space}"


@dataclass(frozen=True)
class Failure:
    """Why a piece of work could not be done; exceptions do not travel well."""

    message: str


def build_on_machines(
    recording: Path | str | Sequence[Path | str],
    index: Path | str,
    *,
    address: str,
    workers: int | None = None,
    options: Options | None = None,
    announce: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Build an index with the processes of a Ray cluster; the same files as `build_index` writes.

    Args:
        recording: As of `build_index`; every node has it under the same path.
        index: Likewise.
        address: Of the cluster, as of `Fleet`.
        workers: So many pieces of work are done at a time; None for as many as the cluster has
            CPUs.
        options: What is built.
        announce: Called with sentences before anything is written.
        progress: Called with (bytes of keys and values made, bytes to make).

    Where this process was connected to Ray before, pieces that are being made when the build ends
    early come to their end first.

    Raises:
        FleetError: There is no Ray, or no such cluster.
        BuildError: As `build_index`, or a piece of work failed on some machine. What was made stays
            for the next build of the same index.
        ExistsError, NoSpaceError, dualform.store.StoreError: As `build_index`.
    """
    if workers is not None and workers < 1:
        raise BuildError(f"workers is {workers}; it must be at least 1")
    options = options or Options()
    given = [recording] if isinstance(recording, (str, Path)) else recording
    paths = tuple(Path(path).absolute() for path in given)
    plan = make_plan(paths, options)
    if announce is not None:
        plan.announce(announce)
    target = Path(index).absolute()
    ray = imported()
    connected = ray.is_initialized()
    connect(ray, address, workers)
    try:
        with failures_of(target, plan), workspace(target) as directory:
            chains = chains_of(plan.source)
            store = PieceStore(pieces_of(target))
            store.prepare(plan)
            mark = tuple((int(count), str(link)) for count, link in mark_of(chains))
            threads = torch.get_num_threads()
            job = Job(paths, plan.options, mark, store.directory, __version__, threads)
            count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
            work = _Work(ray, plan, chains, store, job, count, progress, connected)
            spaces = work.run()
            make_directories(directory, plan)
            for pieces in spaces:
                for piece in pieces:
                    store.put(piece, directory)
            with threadpool_limits(1, user_api="blas"):
                summed = {name: work.summed(name) for name in plan.summed}
                assemble(directory, plan, spaces, work.directions, summed)
    finally:
        if not connected:
            ray.shutdown()


class _Work:
    """Shares the work out, and takes what comes of it."""

    def __init__(
        self,
        ray: Any,
        plan: Plan,
        chains: Chains,
        store: PieceStore,
        job: Job,
        workers: int,
        progress: Callable[[int, int], None] | None,
        stays: bool,
    ) -> None:
        self._ray, self._plan, self._chains, self._store = ray, plan, chains, store
        self._job, self._workers, self._progress = job, workers, progress
        self._stays = stays
        self._done = 0
        with threadpool_limits(1, user_api="blas"):
            self.directions = {name: plan.directions(name) for name in plan.layers}
        self._remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(do)

    def run(self) -> list[list[Piece]]:
        """Have all done; the pieces of each row space."""
        plan = self._plan
        pieces: dict[Task, Piece | None] = {
            (task := Task(number, shard)): self._piece(task)
            for number in range(len(plan.spaces))
            for shard, _, _ in plan.shards_of(number)
        }
        # The longest first: a sum reads a whole layer.
        tasks = [Task(layer=name) for name in sorted(plan.summed) if self._sum(name) is None]
        tasks += [task for task, piece in pieces.items() if piece is None]
        for task in pieces.keys() - set(tasks):
            self._advance(task)
        self._share_out(deque(tasks))
        made = {task: piece or self._made(task) for task, piece in pieces.items()}
        for name in plan.summed:
            if self._sum(name) is None:
                raise self._unseen(Task(layer=name))
        return [
            [piece for task, piece in made.items() if task.space == number]
            for number in range(len(plan.spaces))
        ]

    def _made(self, task: Task) -> Piece:
        """A piece that was made just now."""
        piece = self._piece(task)
        if piece is None:
            raise self._unseen(task)
        return piece

    def _unseen(self, task: Task) -> BuildError:
        return BuildError(
            f"{task} was made, and is not below {self._store.directory}: all machines must see one "
            "file system there; choose a path on one that they share"
        )

    def summed(self, name: str) -> Callable[[], Summed]:
        """Gives what a layer's rows add up to."""

        def found() -> Summed:
            kept = self._sum(name)
            assert kept is not None
            return kept

        return found

    def _share_out(self, tasks: deque[Task]) -> None:
        ray = self._ray
        job, directions = ray.put(self._job), ray.put(self.directions)
        waiting: dict[Any, Task] = {}
        try:
            while tasks or waiting:
                while tasks and len(waiting) < self._workers:
                    task = tasks.popleft()
                    waiting[self._remote.remote(job, task, directions)] = task
                ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_S)
                self._tell()
                for reply in ready:
                    self._take(reply, waiting.pop(reply))
        finally:
            # Ray's own `cancel` of what has just ended aborts the process. Leaving the cluster ends
            # what still runs; where that is the caller's to leave, it comes to its end and is kept.
            if waiting and self._stays:
                ray.wait(list(waiting), num_returns=len(waiting))

    def _take(self, reply: Any, task: Task) -> None:
        try:
            failed = self._ray.get(reply)
        except self._ray.exceptions.RayError as error:
            raise BuildError(
                f"{task} was not made: {str(error).strip().splitlines()[0]}; what was made is "
                "kept, and the same command goes on from there"
            ) from None
        if isinstance(failed, Failure):
            raise BuildError(f"{task}: {failed.message}")
        self._advance(task)

    def _advance(self, task: Task) -> None:
        if task.layer is None:
            space = self._plan.spaces[task.space]
            start, stop = self._plan.shards(space)[task.shard]
            widths = [sum(self._plan.layers[name].row_bytes) for name in space.layers]
            self._done += (stop - start) * sum(widths)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._plan.nbytes)

    def _piece(self, task: Task) -> Piece | None:
        return self._store.get(self._plan, task.space, task.shard, self._chains, self.directions)

    def _sum(self, name: str) -> Summed | None:
        return kept_sum(self._store, self._plan, name, self._chains)


def do(job: Job, task: Task, directions: Any) -> Failure | None:
    """Do a piece of work; on any machine.

    Args:
        job: Of the build.
        task: Which.
        directions: Of each layer's sketches.
    """
    try:
        if job.version != __version__:
            return Failure(f"a node has dualform {__version__}, and the build {job.version}")
        torch.set_num_threads(1 if task.layer is None else job.threads)
        plan, chains = _planned(job)
        store = PieceStore(job.pieces)
        with threadpool_limits(1, user_api="blas"):
            if task.layer is not None:
                sum_layer(store, plan, task.layer, chains)
            else:
                store.make(plan, task.space, task.shard, chains, directions, _nothing)
    except (DualformError, ValueError, OSError) as error:
        return Failure(str(error))
    return None


@lru_cache(maxsize=1)
def _planned(job: Job) -> tuple[Plan, Chains]:
    """The plan, read once in each process; of the same recordings as the build's."""
    plan = make_plan(job.recordings, job.options)
    chains = chains_of(plan.source)
    found: Mark = mark_of(chains)
    if [list(each) for each in job.made_at] != found:
        raise BuildError(
            f"{plan.source.path} is not on this node what it is where the build was begun: another "
            "recording, or other steps of it; give every node the same, and build what no training "
            "writes (--follow does while it does)"
        )
    return plan, chains


def _nothing(size: int) -> None:
    """Nobody is told how far one piece is."""
