"""A folder of an index's versions: which is the newest, who uses which, and which may go.

Whoever serves a version holds a lock of the operating system's on its manifest, shared with others;
whoever removes versions takes it alone, and leaves those that are held. The lock ends with the
process that holds it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from dualform.store.errors import ExistsError, StoreError
from dualform.store.files import digest, read_json, sync_directory, write_atomic
from dualform.store.index import FORMAT as INDEX
from dualform.store.recording_format import FORMAT as RECORDING

MANIFEST = "manifest.json"
_PARTIAL = ".partial"
FOLLOWED = ".made"
"""In a folder that versions are published into as they come, what they share."""
NEXT = ".next"
"""And the version that is being made."""
_MARKS = "versions"
"""Therein a file for each version that was published so: named as it, with its manifest's digest.
Other indexes that somebody puts beside them are not of this training, and stay untouched."""
_PUBLISHED = re.compile(r"([0-9]{6,})-step-[0-9]+")
# The coarsest times that file systems keep.
_COARSE_NS = 2_000_000_000


def versions(folder: Path) -> list[Path]:
    """The complete versions below a folder, the newest last: the one whose manifest was written
    last, which is what is written last; of two written at the same time the later name. Where they
    are published as they come they are numbered: no clock is asked, and what else lies there is
    none of them."""
    if is_followed(folder):
        return published(folder)
    complete = [
        ((path / MANIFEST).stat().st_mtime_ns, path.name, path) for path in _complete(folder)
    ]
    return [path for _, _, path in sorted(complete)]


def published(folder: Path) -> list[Path]:
    """Those of them that were published as they came, the newest last."""
    found = [(_number(path.name), path) for path in _complete(folder) if _marked(path)]
    return [path for _, path in sorted(found)]


def _complete(folder: Path) -> list[Path]:
    """What has a manifest below a folder and is not being made."""
    return [
        child.parent
        for child in folder.glob(f"*/{MANIFEST}")
        if child.is_file()
        and not child.parent.name.startswith(".")
        and not child.parent.name.endswith(_PARTIAL)
    ]


def _number(name: str) -> int:
    found = _PUBLISHED.fullmatch(name)
    return 0 if found is None else int(found[1])


def _mark(path: Path) -> Path:
    return path.parent / FOLLOWED / _MARKS / path.name


def _marked(path: Path) -> bool:
    return _number(path.name) > 0 and _mark(path).is_file()


def next_name(folder: Path, steps: int) -> str:
    """What a version of so many steps is called that is published after those of a folder."""
    number = max((_number(path.name) for path in published(folder)), default=0) + 1
    while os.path.lexists(folder / f"{number:06}-step-{steps}"):  # somebody else's
        number += 1
    return f"{number:06}-step-{steps}"


def publish_version(work: Path, path: Path) -> None:
    """Move a whole index to where it is a version of those that are published as they come.

    It is marked before it is there: killed in between, a mark stays that nothing is named as.
    """
    marks = _mark(path).parent
    marks.mkdir(parents=True, exist_ok=True)
    write_atomic(_mark(path), digest((work / MANIFEST).read_bytes()).encode())
    make_newest(work, path.parent)
    work.rename(path)
    sync_directory(path.parent)


def check_target(target: Path) -> None:
    """Whether versions can be published into a folder, without touching what is anybody else's.

    Raises:
        ExistsError: It is a file, an index or a recording, or inside of one; or it has indexes that
            were not published so, and none that was.
    """
    folder = "versions are published into a folder of their own: choose another path"
    if os.path.lexists(target) and not target.is_dir():
        raise ExistsError(f"{target} is a file; {folder}")
    if (target / MANIFEST).exists():
        what = kind_of(target) or f"something else that has a {MANIFEST}"
        raise ExistsError(f"{target} is {what}; {folder}")
    for place in Path(os.path.realpath(target)).parents:
        if kind_of(place):
            raise ExistsError(f"{target} lies in {place}, which is {kind_of(place)}; {folder}")
    others = sorted(path.name for path in _complete(target) if not _marked(path))
    if (target / NEXT).exists() and not (target / FOLLOWED).exists():
        others.append(NEXT)
    if others and not published(target):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ExistsError(
            f"{target} has {', '.join(others[:3])}{more} in it, which --follow did not publish; "
            f"{folder}, best one that is not there yet"
        )


def kind_of(path: Path) -> str:
    """What a path is: "an index", "a recording", "a folder of an index's versions", "a file";
    empty where it is none of these."""
    if path.is_file():
        return "a file"
    if (path / MANIFEST).is_file():
        with suppress(StoreError, OSError):
            said = read_json(path / MANIFEST, "").get("format")
            return {INDEX: "an index", RECORDING: "a recording"}.get(str(said), "")
    return "a folder of an index's versions" if is_followed(path) else ""


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
    or none can be read, the path itself."""
    with suppress(PermissionError):
        if (path / MANIFEST).is_file() or not path.is_dir():
            return path
        found = versions(path)
        return found[-1] if found else path
    return path


def is_followed(path: Path) -> bool:
    """Whether versions are published into a folder as they come; not where it can't be read."""
    with suppress(PermissionError):
        return (path / FOLLOWED / _MARKS).is_dir()
    return False


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
    """Remove all versions but the newest of those that were published as they came, leaving those
    that somebody uses. Nothing else is removed, whatever it is called.

    Args:
        folder: Of the versions.
        keep: How many of the newest stay whoever uses them, at least 1.

    Returns:
        Those that were removed.
    """
    removed = []
    for path in published(folder)[: -max(1, keep)]:
        try:
            fd = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _mark(path).read_bytes() != digest((path / MANIFEST).read_bytes()).encode():
                continue  # something else that was put under its name
            gone = folder / f".old-{path.name}"
            os.rename(path, gone)
            removed.append(path)
            _mark(path).unlink(missing_ok=True)
        except OSError:  # in use, or there are no locks: then it stays
            continue
        finally:
            os.close(fd)
    for rest in folder.glob(".old-*"):
        if _number(rest.name.removeprefix(".old-")):
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
