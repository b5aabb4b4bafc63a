"""`dualform index build --follow`: versions of an index while its recording is being written."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualform.cli.errors import CommandError
from dualform.cli.interruption import Interruption, load_engine

if TYPE_CHECKING:
    from dualform.index.follow import Follower, Published
    from dualform.index.plan import Options
    from dualform.store.recording import Recording

EVERY_S, KEEP = 5.0, 2
_TRIES = 3
"""So often in a row a recording may be damaged: one that is being cut back is, for a moment."""
_STEP_S = 0.2


def run(options: argparse.Namespace) -> int:
    """Publish versions until the recording is closed."""
    every = EVERY_S if options.every is None else options.every
    if not (math.isfinite(every) and every > 0):
        options.parser.error(f"--every is {every:g}; it must be a number of seconds above 0")
    with Interruption() as interruption:
        load_engine()
        import pyarrow

        from dualform.index.follow import Follower

        pyarrow.enable_signal_handlers(False)  # its own make an error of Ctrl-C, or nothing
        asked = asked_for(options)
        _check_paths(options.recording, options.index)
        try:
            keep = KEEP if options.keep is None else options.keep
            with Follower(options.index, asked, keep) as follower:
                _Following(options, follower, interruption).run(every)
        except ValueError as error:
            raise CommandError(str(error)) from error
    return 0


def asked_for(options: argparse.Namespace) -> Options:
    """What of a build's options decides the index."""
    from dualform.index.plan import Options

    return Options(
        options.values,
        options.shard_rows,
        tuple(options.parts),
        options.round_keys,
        options.pack,
    )


class _Following:
    """Looks at a recording again and again."""

    def __init__(
        self, options: argparse.Namespace, follower: Follower, interruption: Interruption
    ) -> None:
        self._options, self._follower, self._interruption = options, follower, interruption
        self._said = ""
        self._damaged = 0

    def run(self, every: float) -> None:
        """Until the recording is closed and published."""
        while True:
            began = time.monotonic()
            if self._look():
                return
            # At most half of the time goes into versions, however long one takes.
            until = time.monotonic() + max(every, time.monotonic() - began)
            while (left := until - time.monotonic()) > 0:
                self._interruption.check()
                time.sleep(min(left, _STEP_S))

    def _look(self) -> bool:
        """Publish what is new; whether that was all."""
        from dualform.store.errors import DamagedError, MissingRankError, NotFoundError
        from dualform.store.recording_ranks import open_recordings

        began = time.monotonic()
        try:
            with open_recordings(self._options.recording) as source:
                found = self._follower.publish(source, self._progress)
                if found is not None:
                    self._tell(found, time.monotonic() - began)
                self._damaged = 0
                self._say(waits(source))
                return source.complete
        except (NotFoundError, MissingRankError) as error:
            for path in self._options.recording:
                _check_waited_for(path)
            self._say(f"waiting for training to begin: {error}")
        except DamagedError:
            self._damaged += 1
            if self._damaged >= _TRIES:
                raise
        return False

    def _progress(self, done: int, total: int) -> None:
        self._interruption.check()

    def _tell(self, found: Published, seconds: float) -> None:
        last = "; the recording is closed, this is the last" if found.complete else ""
        print(
            f"{found.path}: {found.steps:,} steps in {seconds:.1f} s, whole shards: "
            f"{found.made:,} new, {found.shared:,} shared{last}",
            flush=True,
        )

    def _say(self, text: str) -> None:
        """Once, until it is something else."""
        if text and text != self._said:
            print(text, flush=True)
        self._said = text


def _check_paths(recordings: Sequence[Path], target: Path) -> None:
    """Whether versions would lie in what they are made of."""
    place = Path(os.path.realpath(target))
    for path in recordings:
        recording = Path(os.path.realpath(path))
        if recording == place or recording in place.parents:
            where = "is" if recording == place else "lies in"
            raise CommandError(
                f"{target} {where} {path}, the recording that is followed; versions are published "
                "into a folder of their own: choose another path"
            )


def _check_waited_for(path: Path) -> None:
    """Whether a path that is no recording may become one: it is not there, or just being made."""
    from dualform.store.ranks import holds_nothing_yet, rank_folders
    from dualform.store.recording_format import MANIFEST
    from dualform.store.recording_writer import was_never_started
    from dualform.store.versions import kind_of

    if not path.exists():
        return
    what = kind_of(path)
    if what == "a recording" or (
        path.is_dir() and (holds_nothing_yet(path) or was_never_started(path))
    ):
        return
    ranks = rank_folders(path) if path.is_dir() else []
    if ranks and not what and not (path / MANIFEST).exists():
        for each in ranks:
            _check_waited_for(each)
        return
    raise CommandError(
        f"{path} is {what or 'no recording, and has other things in it'}; --follow takes what a "
        "Recorder writes, or a path where one will"
    )


def waits(source: Recording) -> str:
    """Why nothing more may come; empty where something may."""
    from dualform.store.lock import holder_of

    if source.complete:
        return ""
    alone = [part for part in source.recordings if holder_of(part.path) is None]
    if not alone:
        return "" if source.steps else "waiting for the first commit"
    if any(_went_on(part) for part in alone):  # since it was read
        return ""
    return (
        f"no process writes {alone[0].path} and it was not closed: training was cut off after "
        f"{source.steps:,} committed steps; waiting for it to be resumed (Ctrl-C ends this, and "
        "the newest version stays)"
    )


def _went_on(part: Recording) -> bool:
    """Whether a recording was closed, or has more steps, since it was opened."""
    with type(part).open(part.path) as now:
        return now.complete or now.steps != part.steps
