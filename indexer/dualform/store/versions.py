"""A folder of an index's versions: which is the newest, who uses which, and which may go.

Whoever serves a version holds a lock of the operating system's on its manifest, shared with others;
whoever removes versions takes it alone, and leaves those that are held. The lock ends with the
process that holds it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from dualform.store.files import sync_directory

MANIFEST = "manifest.json"
_PARTIAL = ".partial"
FOLLOWED = ".made"
"""In a folder that versions are published into as they come, what they share."""
# The coarsest times that file systems keep.
_COARSE_NS = 2_000_000_000


def versions(folder: Path) -> list[Path]:
    """The complete versions below a folder, the newest last: the one whose manifest was written
    last, which is what is written last; of two written at the same time the later name. Where they
    are published as they come, their names are numbered, and no clock is asked."""
    numbered = is_followed(folder)
    complete = [
        (0 if numbered else child.stat().st_mtime_ns, child.parent.name, child.parent)
        for child in folder.glob(f"*/{MANIFEST}")
        if child.is_file()
        and not child.parent.name.startswith(".")
        and not child.parent.name.endswith(_PARTIAL)
    ]
    return [path for _, _, path in sorted(complete)]


def make_newest(work: Path, folder: Path) -> None:
    """Date a whole index, which is about to be moved into a folder, later than all versions in it.

    A clock that was set back since they were written would hide the new one, or have it removed as
    the oldest.
    """
    with suppress(OSError):
        before = versions(folder)
        if not before:
            return
        latest = (before[-1] / MANIFEST).stat().st_mtime_ns
        if latest >= (work / MANIFEST).stat().st_mtime_ns:
            os.utime(work / MANIFEST, ns=(latest + _COARSE_NS, latest + _COARSE_NS))


def newest(path: Path) -> Path:
    """What is meant by a path: an index, or the newest of a folder of them; where there is none,
    the path itself."""
    if (path / MANIFEST).is_file() or not path.is_dir():
        return path
    found = versions(path)
    return found[-1] if found else path


def is_followed(path: Path) -> bool:
    """Whether versions are published into a folder as they come."""
    return (path / FOLLOWED).is_dir()


class Use:
    """A version in use, until `end`, or the end of the process.

    Where the system has no locks there is none, and nothing is promised.

    Args:
        path: The version's folder.

    Raises:
        FileNotFoundError: It is not there, or about to be removed.
    """

    def __init__(self, path: Path) -> None:
        manifest = path / MANIFEST
        self._fd: int | None = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._fd), os.stat(manifest)):
                raise FileNotFoundError(path)
        except BlockingIOError:
            self.end()
            raise FileNotFoundError(path) from None
        except FileNotFoundError:
            self.end()
            raise
        except OSError:  # there are no locks here
            self.end()
            return
        _held.add(self)

    def end(self) -> None:
        """It is used no more. Twice does no harm."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.end()


def remove_old(folder: Path, keep: int) -> list[Path]:
    """Remove all versions but the newest, leaving those that somebody uses.

    Args:
        folder: Of the versions.
        keep: How many of the newest stay whoever uses them, at least 1.

    Returns:
        Those that were removed.
    """
    removed = []
    for path in versions(folder)[: -max(1, keep)]:
        try:
            fd = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = folder / f".old-{path.name}"
            os.rename(path, gone)
            removed.append(path)
        except OSError:  # in use, or there are no locks: then it stays
            continue
        finally:
            os.close(fd)
    for rest in folder.glob(".old-*"):
        shutil.rmtree(rest, ignore_errors=True)
    if removed:
        sync_directory(folder)
    return removed


_held: weakref.WeakSet[Use] = weakref.WeakSet()


def _forget() -> None:
    """In a forked child: the use is the parent's alone."""
    for use in list(_held):
        use.end()


os.register_at_fork(after_in_child=_forget)
