"""What can be wrong with files on disk.

StoreError             a DualformError
├── NotFoundError      nothing of ours is there
├── VersionError       written by a newer dualform
├── DamagedError       truncated, altered or incomplete; names the file
│   └── UnreadableError  this process may not read it, or the disk fails
├── WriteError         what was to be written could not be
│   └── NoSpaceError   the disk is full
├── TooManyFilesError  the process may open no more files
├── RanksError         recordings that are not those of all ranks of one run
└── ExistsError        the target is already there
    └── BusyError      another process writes it now; names that process
"""

from __future__ import annotations

from pathlib import Path

from dualform._errors import DualformError


class StoreError(DualformError):
    """Base of everything this package raises; the message says what to do next."""


class NotFoundError(StoreError):
    """The path holds no recording or index."""


class VersionError(StoreError):
    """The format's version is newer than this program."""


class ExistsError(StoreError):
    """The target exists; nothing is ever overwritten silently."""


class BusyError(ExistsError):
    """Another process writes the target now.

    Args:
        path: The target.
        holder: Such as "process 4711 on node3".
    """

    def __init__(self, path: Path | str, holder: str) -> None:
        self.path = Path(path)
        self.holder = holder
        super().__init__(f"{path} is being written by {holder}; wait for it to end, or end it")


class WriteError(StoreError):
    """What was to be written could not be, as for want of permission; nothing of it is left."""


class NoSpaceError(WriteError):
    """The disk cannot hold what was to be written; nothing half-written is left."""


class TooManyFilesError(StoreError):
    """The process, or the machine, has as many files open as it may.

    Args:
        path: The file that could not be opened.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        super().__init__(
            f"{path} cannot be opened: this process has as many files open as it may; "
            "raise the limit (`ulimit -n 4096`) or close what is not needed"
        )


class RanksError(StoreError):
    """Recordings are not those of all processes of one data-parallel run, each once."""


class MissingRankError(RanksError):
    """Some process's recording is not there, or not yet."""


class DamagedError(StoreError):
    """A file does not hold what was written.

    Args:
        path: The damaged file.
        what: What was found, such as "4,096 bytes where 8,192 were written".
        remedy: What the reader can do.
    """

    def __init__(self, path: Path | str, what: str, remedy: str) -> None:
        self.path = Path(path)
        self.what = what
        super().__init__(f"{path}: {what}; {remedy}")


class UnreadableError(DamagedError):
    """A file is there and can't be read.

    Args:
        path: The file.
        why: The system's words, such as "Permission denied".
    """

    def __init__(self, path: Path | str, why: str | None) -> None:
        super().__init__(
            path, f"can't be read ({why})", "let this process read the file and its folder"
        )
