"""Versions of an index while its recording is being written, one after the other.

    target/000003-step-1200/       a whole index, as any other; its files are shared with
    target/.made/                  whole shards, each made once, and
    target/.next/                  the version that is being made

A shard whose rows are all committed never changes, and becomes hard links; the last, the sums and
the tables are made anew. Sums, and which keys are equal, are gone on with from the last whole
shard, in memory; after a restart they are made of what is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from dualform.index.build import failures_of
from dualform.index.equal_keys import EqualKeysWriter, KnownKeys
from dualform.index.errors import BuildError
from dualform.index.finish import MadeLayer, Share, Summed, finish, make_directories
from dualform.index.lineage import (
    Chains,
    Mark,
    begins_with,
    chains_of,
    mark_of,
    origin_of,
    why_another,
)
from dualform.index.pieces import Piece, PieceStore, make_piece, share_file
from dualform.index.plan import Options, Plan
from dualform.index.row_sum import FollowedSum, RowSums
from dualform.store.errors import BusyError, ExistsError, StoreError
from dualform.store.files import FileEntry, check_seal, digest, read_json, write_sealed
from dualform.store.index import IndexManifest, first_dtype
from dualform.store.index_parts import (
    EqualKeys,
    SpaceShard,
    layer_file,
)
from dualform.store.lock import WriterLock
from dualform.store.recording import Recording
from dualform.store.versions import (
    FOLLOWED,
    NEXT,
    check_target,
    next_name,
    publish_version,
    published,
    remove_old,
)

_NOTE = "published.json"
_REMEDY = "remove it: what it says is found again"
_GROWN = 2
"""Sketches are made with other directions once a layer has so many times the rows."""


class Published(NamedTuple):
    """A version that was published.

    Attributes:
        path: Where it is.
        steps: How many steps it has.
        complete: The recording was closed: no other version follows.
        made: How many whole shards were made for it.
        shared: How many had been made before.
    """

    path: Path
    steps: int
    complete: bool
    made: int
    shared: int


@dataclass
class _Running:
    """What is known of a layer's whole shards, to be gone on with.

    Attributes:
        known: Their keys.
        row_sum: What their rows add up to; None where nothing does, or where that takes too much
            memory to be kept.
        first: Of each shard, the first position with the key of each.
        shards: How many there are.
        directions: Of the sketches, float32 [m, d_in].
        of_rows: How many rows there were when these were found.
    """

    known: KnownKeys
    row_sum: RowSums | FollowedSum | None
    first: list[np.ndarray] = field(default_factory=list)
    shards: int = 0
    directions: np.ndarray | None = None
    of_rows: int = -1


class Follower:
    """Publishes versions of an index into a folder; one at a time does.

    Args:
        target: The folder; it is made.
        options: What is built.
        keep: How many of the newest versions stay, at least; others go once nobody uses them.

    Raises:
        ExistsError: Something else lies there (`check_target`), or another process publishes there.
        BuildError: An option can't be.
    """

    def __init__(self, target: Path, options: Options, keep: int = 2) -> None:
        options.check()
        if keep < 1:
            raise BuildError(f"keep is {keep}; it must be at least 1")
        self.target, self._options, self._keep = target.absolute(), options, keep
        check_target(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = WriterLock(self.target)
        except BusyError as error:
            raise ExistsError(
                f"another build ({error.holder}) publishes into {target}; wait for it to end"
            ) from None
        self._store = PieceStore(self.target / FOLLOWED)
        self._running: dict[str, _Running] = {}
        self._kind = ""
        self._at: Mark = []

    def close(self) -> None:
        """Let others publish."""
        self._lock.release()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(
        self, source: Recording, progress: Callable[[int, int], None] | None = None
    ) -> Published | None:
        """Publish what is committed of a recording, unless that was done already.

        Args:
            source: Opened now.
            progress: Called with (bytes made so far, bytes of all keys and values).

        Returns:
            The version; None where there is nothing new, or nothing yet.

        Raises:
            BuildError, NoSpaceError, dualform.store.StoreError: As `build_index`.
            ExistsError: The folder has versions of another recording.
        """
        if source.steps == 0:
            return None
        chains = chains_of(source)
        note = self._note()
        origin = origin_of(source)
        another = "" if note is None else why_another(origin, note["origin"])
        if another:
            raise ExistsError(
                f"{self.target} has versions of an index of another recording, {another}; choose "
                "another folder, or remove it"
            )
        now: dict[str, Any] = {"at": mark_of(chains), "complete": source.complete}
        if note is not None and (note["at"], note["complete"]) == (now["at"], now["complete"]):
            return None
        plan = Plan(source, self._options)
        kind = _kind(plan)
        if kind != self._kind or not begins_with(chains, self._at):
            self._running = {}
        lasts = note is not None and note["kind"] == kind and begins_with(chains, note["at"])
        path = self.target / next_name(self.target, source.steps)
        try:
            with threadpool_limits(1, user_api="blas"), failures_of(self.target, plan):
                work = self._work(plan)
                share = _shared(self.target, note if lasts else None, source, work)
                done = _Round(plan, chains, self._store, self._running, work, progress)
                done.run(share)
                publish_version(work, path)
                examples = _examples(source)
                said = {"origin": origin, "kind": kind, "version": path.name, "examples": examples}
                write_sealed(self._store.directory / _NOTE, {**now, **said})
        except BaseException:
            self._running = {}  # half of a round may have been added
            raise
        finally:
            shutil.rmtree(self.target / NEXT, ignore_errors=True)
        self._kind, self._at = kind, now["at"]
        remove_old(self.target, self._keep)
        return Published(path, source.steps, source.complete, done.made, done.shared)

    def _note(self) -> dict[str, Any] | None:
        """What is known of the newest version; None where there is none that is known."""
        path = self._store.directory / _NOTE
        try:
            note = read_json(path, _REMEDY)
            check_seal(path, note, _REMEDY)
        except StoreError:
            return None
        return note if self.target / str(note["version"]) in published(self.target) else None

    def _work(self, plan: Plan) -> Path:
        work = self.target / NEXT
        shutil.rmtree(work, ignore_errors=True)
        self._store.prepare(plan)
        work.mkdir()
        make_directories(work, plan)
        return work


class _Round:
    """One version: whole shards from the store, the rest made.

    Attributes:
        made, shared: How many whole shards were made for it, and how many were there.
    """

    def __init__(
        self,
        plan: Plan,
        chains: Chains,
        store: PieceStore,
        running: dict[str, _Running],
        work: Path,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._plan, self._chains, self._store, self._work = plan, chains, store, work
        self._progress, self._done = progress, 0
        self._running = running
        self._last: dict[int, Piece] = {}
        self.made = self.shared = 0

    def run(self, share: Share) -> None:
        plan = self._plan
        initial = plan.source.initial()
        for name in plan.layers:
            if name not in self._running:
                kept = name in plan.at_once
                row_sum = plan.row_sum(name, initial) if kept else None
                self._running[name] = _Running(KnownKeys(plan.most_keys()), row_sum)
            self._begin(name)
        spaces = [self._space(number) for number in range(len(plan.spaces))]
        made = {
            name: MadeLayer(
                [piece.layers[name] for piece in spaces[plan.space_of[name]]],
                self._running[name].directions,
                self._equal_keys(name),
                partial(self._summed, name) if name in plan.summed else None,
            )
            for name in plan.layers
        }
        sidecars: list[list[SpaceShard]] = [[piece.sidecar for piece in each] for each in spaces]
        finish(self._work, plan, sidecars, made, share)

    def _begin(self, name: str) -> None:
        """What later steps change in what is gone on with."""
        running, plan = self._running[name], self._plan
        if running.row_sum is not None:
            running.row_sum.go_on(plan.ledger)
        rows = plan.spaces[plan.space_of[name]].rows
        if plan.source.complete or rows >= _GROWN * running.of_rows:
            running.directions, running.of_rows = plan.directions(name), rows

    def _space(self, number: int) -> list[Piece]:
        plan, store = self._plan, self._store
        space = plan.spaces[number]
        directions = {name: self._running[name].directions for name in space.layers}
        whole = plan.rows_per_shard(space)
        pieces = []
        for shard, start, stop in plan.shards_of(number):
            place = plan, number, shard
            if stop - start < whole:
                piece = make_piece(self._work, *place, start, stop, directions, self._advance)
                self._last[number] = piece
                pieces.append(piece)
                continue
            found = store.get(*place, self._chains, directions)
            if found is None:
                found = store.make(*place, self._chains, directions, self._advance)
                self.made += 1
            else:
                self.shared += 1
                self._advance(sum(entry.bytes for entry in found.files))
            store.put(found, self._work)
            for name in space.layers:
                self._go_on(name, found, stop)
            pieces.append(found)
        return pieces

    def _go_on(self, name: str, piece: Piece, stop: int) -> None:
        """Add a whole shard to what is known, unless it was."""
        running = self._running[name]
        if piece.shard < running.shards:
            return
        running.shards += 1
        first = running.known.add(piece.digests[name])
        if running.known.forgotten:
            running.first.clear()
        else:
            running.first.append(first.astype(first_dtype(stop)))
        if running.row_sum is not None:
            self._plan.add_up(name, running.row_sum, piece.sidecar.start, stop)

    def _equal_keys(self, name: str) -> EqualKeys | None:
        """Write which keys of a layer are equal, if that pays."""
        plan, running = self._plan, self._running[name]
        number = plan.space_of[name]
        known, first = running.known.copied(), list(running.first)
        if number in self._last:
            first.append(known.add(self._last[number].digests[name]))
        rows = plan.spaces[number].rows
        if known.forgotten or known.distinct > rows // 2 or not rows:
            return None
        writer = EqualKeysWriter(self._work, layer_file(name, "equal.npy"), rows, rows)
        for each in first:
            writer.write(each)
        return writer.result(known.distinct)

    def _summed(self, name: str) -> Summed:
        """What all rows of a layer add up to."""
        plan, row_sum = self._plan, self._running[name].row_sum
        number = plan.space_of[name]
        begin, rows = 0, plan.spaces[number].rows
        if row_sum is None:
            row_sum = plan.row_sum(name, plan.source.initial())
        else:
            row_sum = row_sum.copied()
            begin = self._last[number].sidecar.start if number in self._last else rows
        plan.add_up(name, row_sum, begin, rows)
        return Summed.of(row_sum)

    def _advance(self, size: int) -> None:
        self._done = min(self._done + size, self._plan.nbytes)
        if self._progress is not None:
            self._progress(self._done, self._plan.nbytes)


def _kind(plan: Plan) -> str:
    """A digest of all that has to be the same for what is known of a layer to be gone on with."""
    ledger, source = plan.ledger, plan.source
    whole = ledger.family.follows_whole
    parts: Sequence[object] = [
        plan.options,
        str(source.schema),
        [(spec, plan.layers[name].encodings) for name, spec in source.manifest.layers.items()],
        [space.layers for space in plan.spaces],
        [
            [(grouping.column, grouping.values.to_pylist()) for grouping in space]
            for space in plan.parts.spaces
        ],
        sorted(plan.at_once),
        [
            name
            for name, rows in ledger.parameters.items()
            if not ledger.family.scalar and any(whole(r.settings) for r in rows if r.took_part)
        ],
    ]
    return digest(repr(parts).encode())


def _shared(target: Path, note: dict[str, Any] | None, source: Recording, work: Path) -> Share:
    """Shares what does not change with the version before, if that is of the same training."""
    if note is None:
        return lambda name: None
    before = target / str(note["version"])
    same_payloads = note["examples"] == _examples(source)
    known = {entry.name: entry for entry in _unchanging(before, same_payloads)}

    def share(name: str) -> FileEntry | None:
        entry = known.get(name)
        if entry is not None:
            share_file(before / name, work / name)
        return entry

    return share


def _unchanging(before: Path, payloads: bool) -> list[FileEntry]:
    try:
        manifest = IndexManifest.load(before)
    except StoreError:
        return []
    found: list[FileEntry | None] = []
    for layer in manifest.layers.values():
        found += [layer.initial, *(entry for _, entry in layer.states)]
    if payloads:
        found += [manifest.examples, manifest.payloads]
    return [entry for entry in found if entry is not None]


def _examples(source: Recording) -> list[str]:
    """The digests of all payload files, of all ranks."""
    return [
        entry.xxh3
        for part in source.recordings
        for segment in part.segments
        for entry in segment.examples
    ]
