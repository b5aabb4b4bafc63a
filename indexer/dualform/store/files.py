"""Files written so that a reader sees all of one or nothing, and read without being believed.

Writing: atomic replace, fsync, digests. A digest is XXH3-64 in hexadecimal
(docs/decisions/0001-checksums.md says why not CRC).

Reading: a name that a manifest gives leads to a regular file below the manifest's folder or to
DamagedError. No link is followed on the way, and no pipe, socket or device is opened.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dualform.store.errors import DamagedError, TooManyFilesError, UnreadableError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What writing to a full disk fails with."""
_WHY_FULL = {
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not become so large (`ulimit -f`)",
}
FAILING = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE})
"""What writing to an open file fails with where its disk is broken, gone, or read-only by now."""

_CHUNK = 8 << 20
_MOST_JSON = 1 << 30
"""Bytes of a JSON file at most."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_MOST_BYTES = 2**62
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)
# Not to wait for a pipe's other end, should one take the file's place at the last moment.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def why_full(error: OSError) -> str:
    """In words, what an error of `FULL` says."""
    return _WHY_FULL.get(error.errno or 0, "there is no space left")


@contextmanager
def named_in_utf8(path: str | os.PathLike[str]) -> Iterator[str]:
    """A file's path for a library that takes no other names than UTF-8: where it has another, one
    that the system gives (Linux) and that holds until the end."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        yield name


@dataclass(frozen=True)
class FileEntry:
    """What a manifest knows of a file: its name, its bytes and their digest."""

    name: str
    bytes: int
    xxh3: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "xxh3": self.xxh3}

    @classmethod
    def from_json(cls, data: Any) -> FileEntry:
        """Read what `to_json` gave.

        Raises:
            ValueError: It is something else, or the name leads out of the manifest's folder.
        """
        if not isinstance(data, dict):
            raise ValueError("a file entry must be an object with name, bytes and xxh3")
        name, size, xxh3 = data.get("name"), data.get("bytes"), data.get("xxh3")
        if not isinstance(name, str) or not _is_inside(name):
            raise ValueError(f"name is {_short(name)}; it must be a path below the folder")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _MOST_BYTES:
            raise ValueError(f"bytes is {_short(size)}; it must be a size")
        if not isinstance(xxh3, str) or not _DIGEST.fullmatch(xxh3):
            raise ValueError(f"xxh3 is {_short(xxh3)}; it must be 16 hexadecimal digits")
        return cls(name, size, xxh3)


def digest(data: Any) -> str:
    """XXH3-64 of a bytes-like object, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> FileEntry:
    """Write a small file: temporary name, fsync, rename, fsync of the directory.

    Returns:
        The entry for a manifest in the same directory.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # such as a full disk, or Ctrl-C: nothing half written stays
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return FileEntry(path.name, len(data), digest(data))


def write_sealed(path: Path, data: Mapping[str, Any]) -> FileEntry:
    """Write a JSON object atomically, with the digest of its own content under "xxh3".

    NaN and Infinity are refused: they are not JSON.
    """
    sealed = {**data, "xxh3": digest(_canonical(data))}
    return write_atomic(path, json.dumps(sealed, allow_nan=False).encode() + b"\n")


def check_seal(path: Path, data: Mapping[str, Any], remedy: str) -> None:
    """Raise DamagedError unless an object read from `path` is what `write_sealed` wrote."""
    content = {key: value for key, value in data.items() if key != "xxh3"}
    if data.get("xxh3") != digest(_canonical(content)):
        raise DamagedError(path, "its digest is not the one that was written", remedy)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; anything else is DamagedError with this remedy."""
    with _opened(path.parent, path.name, remedy) as fd:
        size = os.fstat(fd).st_size
        if size > _MOST_JSON:
            raise DamagedError(path, f"{size:,} bytes are no JSON of ours", remedy)
        content = _read_all(fd)
    try:
        data = json.loads(content.decode(), parse_constant=_refuse_constant, parse_float=_finite)
        if _HALF.search(content):
            # Half a character, which no file's name and no message can have.
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"not valid JSON ({error})", remedy) from None
    if not isinstance(data, dict):
        raise DamagedError(path, "not a JSON object", remedy)
    return data


def check_size(directory: Path, entry: FileEntry, remedy: str) -> Path:
    """The file's path, once it is a regular file below the directory of the size written."""
    status(directory, entry, remedy)
    return directory / entry.name


def status(directory: Path, entry: FileEntry, remedy: str) -> os.stat_result:
    """What the system says of a file, once it is a regular one of the size that was written.

    Raises:
        DamagedError: It is missing, something else, or has another size.
        UnreadableError: A folder can't be looked into.
    """
    # Text, not paths: every question that needs a weight looks at a file or two.
    place, *folders = os.fspath(directory), *entry.name.split("/")[:-1]
    try:
        for folder in folders:
            place = f"{place}/{folder}"
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                raise DamagedError(directory / entry.name, f"{folder} is not a folder", remedy)
        found = os.lstat(f"{os.fspath(directory)}/{entry.name}")
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(directory / entry.name, "missing", remedy) from None
    except OSError as error:
        raise _unreadable(directory / entry.name, error) from None
    _check_status(directory, found, entry, remedy)
    return found


def identity(found: os.stat_result) -> tuple[int, ...]:
    """What a file that was written again, or replaced by another, has not in common with itself."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system says of a file that is there and can't be read is told as such.

    Args:
        path: What is read, where the system names none.

    Raises:
        UnreadableError: It may not be read, or the disk fails.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        at = path if error.filename is None else os.fsdecode(error.filename)
        raise _unreadable(Path(at), error) from None


def is_there(path: Path) -> bool:
    """Whether a name leads to anything, be it a link that leads nowhere.

    Raises:
        UnreadableError: Its folder can't be looked into.
    """
    with reading(path):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


@contextmanager
def opened(directory: Path, entry: FileEntry, remedy: str) -> Iterator[int]:
    """A file open for reading: its descriptor, once it is a regular file of the size written.

    Raises:
        DamagedError: It is missing, something else, reached through a link, or has another size.
        TooManyFilesError: The process may open no more files.
        UnreadableError: It may not be read, or the disk fails.
    """
    with _opened(directory, entry.name, remedy) as fd:
        _check_status(directory, os.fstat(fd), entry, remedy)
        yield fd


def check_digest(directory: Path, entry: FileEntry, remedy: str) -> Path:
    """The file's path, once its size and its digest are what was written. Reads the whole file."""
    with opened(directory, entry, remedy) as fd:
        check_digest_of(fd, directory, entry, remedy)
    return directory / entry.name


def check_digest_of(fd: int, directory: Path, entry: FileEntry, remedy: str) -> None:
    """The same for a file that is open."""
    hasher = xxhash.xxh3_64()
    left, place = entry.bytes, 0
    while left and (chunk := os.pread(fd, min(left, _CHUNK), place)):
        hasher.update(chunk)
        left -= len(chunk)
        place += len(chunk)
    if left or hasher.hexdigest() != entry.xxh3:
        raise _altered(directory, entry, remedy)


def read_checked(directory: Path, entry: FileEntry, remedy: str) -> bytes:
    """A small file's bytes, once they are what was written."""
    with opened(directory, entry, remedy) as fd:
        data = _read_all(fd)
    if len(data) != entry.bytes or digest(data) != entry.xxh3:
        raise _altered(directory, entry, remedy)
    return data


def read_some(directory: Path, entry: FileEntry, size: int, remedy: str) -> bytes:
    """A file's first bytes, at most so many; under no digest."""
    with opened(directory, entry, remedy) as fd:
        return os.pread(fd, size, 0)


def _altered(directory: Path, entry: FileEntry, remedy: str) -> DamagedError:
    what = "its digest is not the one that was written"
    return DamagedError(directory / entry.name, what, remedy)


@contextmanager
def _opened(directory: Path, name: str, remedy: str) -> Iterator[int]:
    path = directory / name
    try:
        fd = _open_below(directory, name)
    except FileNotFoundError:
        raise DamagedError(path, "missing", remedy) from None
    except NotADirectoryError:
        raise DamagedError(path, "a link or a file where a folder belongs", remedy) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise DamagedError(path, "not a regular file", remedy) from None
        raise _unreadable(path, error) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedError(path, "not a regular file", remedy)
        yield fd
    finally:
        os.close(fd)


def _unreadable(path: Path, error: OSError) -> Exception:
    """What keeps a file from being read, by its own name; for want of memory as it came."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TooManyFilesError(path)
    return error if error.errno == errno.ENOMEM else UnreadableError(path, error.strerror)


def _open_below(directory: Path, name: str) -> int:
    *folders, last = name.split("/")
    place = os.open(directory, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        if not stat.S_ISREG(os.stat(last, dir_fd=place, follow_symlinks=False).st_mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))  # opening a device may do things
        return os.open(last, _FILE, dir_fd=place)
    finally:
        os.close(place)


def _check_status(directory: Path, found: os.stat_result, entry: FileEntry, remedy: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(directory / entry.name, "not a regular file", remedy)
    if found.st_size != entry.bytes:
        what = f"{found.st_size:,} bytes where {entry.bytes:,} were written"
        raise DamagedError(directory / entry.name, what, remedy)


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, _CHUNK):
        parts.append(part)
    return b"".join(parts)


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """A number with a point or an exponent; 1e999 is JSON, and infinite as a float."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{_short(text)} is beyond a float's range")
    return number


def _canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
