"""What can be wrong with files on disk.

StoreError
├── NotFoundError      nothing of ours is there
├── VersionError       written by a newer dualform
├── DamagedError       truncated, altered or incomplete; names the file
├── NoSpaceError       the disk is full
└── ExistsError        the target is already there
"""

from __future__ import annotations

from pathlib import Path


class StoreError(Exception):
    """Base of everything this package raises; the message says what to do next."""


class NotFoundError(StoreError):
    """The path holds no recording or index."""


class VersionError(StoreError):
    """The format's version is newer than this program."""


class ExistsError(StoreError):
    """The target exists; nothing is ever overwritten silently."""


class NoSpaceError(StoreError):
    """The disk cannot hold what was to be written; nothing half-written is left."""


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
