"""Files written so that a reader sees all of one or nothing: atomic replace, fsync, digests.

A digest is XXH3-64 in hexadecimal (docs/decisions/0001-checksums.md says why not CRC).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dualform.store.errors import DamagedError

_CHUNK = 8 << 20


@dataclass(frozen=True)
class FileEntry:
    """What a manifest knows of a file: its name, its bytes and their digest."""

    name: str
    bytes: int
    xxh3: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "xxh3": self.xxh3}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FileEntry:
        return cls(name=str(data["name"]), bytes=int(data["bytes"]), xxh3=str(data["xxh3"]))


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
    except OSError:  # such as a full disk: what was half written must not take its place
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
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"not valid JSON ({error})", remedy) from None
    if not isinstance(data, dict):
        raise DamagedError(path, "not a JSON object", remedy)
    return data


def check_size(directory: Path, entry: FileEntry, remedy: str) -> Path:
    """The file's path, once its size is what was written."""
    path = directory / entry.name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DamagedError(path, "missing", remedy) from None
    if size != entry.bytes:
        raise DamagedError(path, f"{size:,} bytes where {entry.bytes:,} were written", remedy)
    return path


def check_digest(directory: Path, entry: FileEntry, remedy: str) -> Path:
    """The file's path, once its size and its digest are what was written. Reads the whole file."""
    path = check_size(directory, entry, remedy)
    hasher = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    if hasher.hexdigest() != entry.xxh3:
        raise DamagedError(path, "its digest is not the one that was written", remedy)
    return path


def read_checked(directory: Path, entry: FileEntry, remedy: str) -> bytes:
    """A small file's bytes, once they are what was written."""
    path = check_size(directory, entry, remedy)
    data = path.read_bytes()
    if digest(data) != entry.xxh3:
        raise DamagedError(path, "its digest is not the one that was written", remedy)
    return data


def _canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
