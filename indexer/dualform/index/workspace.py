"""Where a build writes: beside the target, under a lock, renamed at the end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualform.store.errors import BusyError, ExistsError, NoSpaceError, WriteError
from dualform.store.files import FAILING, FULL, sync_directory, why_full
from dualform.store.lock import WriterLock
from dualform.store.versions import make_newest


@contextmanager
def failures_told(target: Path, nbytes: int, remedy: str = "") -> Iterator[None]:
    """What keeps an index from being written is told as such.

    Args:
        target: What was to be written.
        nbytes: What its keys and values take.
        remedy: What else may help where the disk is full.

    Raises:
        NoSpaceError: The disk is full.
        WriteError: The target, or what is beside it while it is made, can't be written.
    """
    folder = target.absolute().parent
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoSpaceError(
                f"{target}: {why_full(error)}; keys and values alone take {nbytes:,} bytes. "
                f"Nothing of it was kept: free some space or choose another disk{remedy}"
            ) from error
        if error.filename is None and error.errno in FAILING:
            raise WriteError(
                f"{target}: its disk failed ({error.strerror}). Nothing of it was kept: mend the "
                "disk or choose another"
            ) from error
        at = None if error.filename is None else Path(os.fsdecode(error.filename))
        ours = at is not None and (
            at == folder
            or at in folder.parents
            or any(target.name in each.name for each in (at, *at.parents) if each.parent == folder)
        )
        if not ours:
            raise
        raise WriteError(
            f"{target}: writing failed ({at}: {error.strerror}). Nothing of it was kept: choose a "
            "folder that this process may write to"
        ) from error


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """A locked, empty directory beside the target that becomes the target on success."""
    if os.path.lexists(target):
        raise _exists(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = target.with_name(f".{target.name}.partial")
    try:
        lock = WriterLock(target)
    except BusyError as error:
        raise ExistsError(
            f"another build ({error.holder}) is writing {target}; wait for it to end"
        ) from None
    try:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
        yield directory
        make_newest(directory, target.parent)
        _publish(directory, target)
        shutil.rmtree(pieces_of(target), ignore_errors=True)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def pieces_of(target: Path) -> Path:
    """Where a build that is shared out keeps what is made, until the target is there."""
    return target.with_name(f".{target.name}.pieces")


def _publish(directory: Path, target: Path) -> None:
    """Rename, unless something has appeared under the target's name since the build began."""
    if os.path.lexists(target):  # an empty folder would be replaced without a word
        raise _exists(target)
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise _exists(target) from None


def _exists(target: Path) -> ExistsError:
    return ExistsError(
        f"{target} exists; an index is never overwritten: remove it or choose another path"
    )
