"""Which rows of a layer have the same key (docs/decisions/0014): found while keys pass.

Every key is hashed, and the file that comes of it says of each row which is the first with its key.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import xxhash

from dualform.store.files import FileEntry
from dualform.store.index import EqualKeys, first_dtype, first_header

MOST_KEYS = 4 << 20
"""Distinct keys that a build remembers, of all layers together: 24 bytes each."""

_DIGEST = np.dtype("S16")


def digests(keys: np.ndarray) -> np.ndarray:
    """XXH3-128 of the bytes of each key, [n, d] as stored: S16 [n]."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, keys)), _DIGEST)


class KnownKeys:
    """The distinct keys of a layer's shards so far, and the first position of each.

    Args:
        most: So many may be remembered.

    Attributes:
        distinct: How many there are, while they are remembered.
        forgotten: There were more than may be remembered.
    """

    def __init__(self, most: int) -> None:
        self.forgotten = False
        self._most = most
        self._done = 0
        self._known = np.empty(0, _DIGEST)  # ascending
        self._first = np.empty(0, np.int64)  # where each was seen first

    @property
    def distinct(self) -> int:
        return len(self._known)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Take the next shard's digests, S16 [n], by position.

        Returns:
            For each position the first with its key: int64 [n]; nothing once keys are forgotten.
        """
        if self.forgotten:
            return self._first
        keys, places, which = np.unique(hashes, return_index=True, return_inverse=True)
        first = self._done + places
        where = np.searchsorted(self._known, keys)
        seen = np.zeros(len(keys), bool)
        inside = where < len(self._known)
        seen[inside] = self._known[where[inside]] == keys[inside]
        first[seen] = self._first[where[seen]]
        self._known = np.insert(self._known, where[~seen], keys[~seen])
        self._first = np.insert(self._first, where[~seen], first[~seen])
        self._done += len(hashes)
        if len(self._known) > self._most:
            self.forgotten = True
            self._known, self._first = self._known[:0].copy(), self._first[:0].copy()
            return self._first
        found: np.ndarray = first[which]
        return found

    def copied(self) -> KnownKeys:
        """Another that goes its own way from here."""
        return copy.copy(self)  # arrays are replaced, never changed


class EqualKeysWriter:
    """Writes a layer's file, shard by shard, as long as its keys come again often enough.

    Args:
        directory: The index under construction.
        name: The file's, below it.
        rows: Of the layer.
        most: So many distinct keys may be remembered; a layer with more has no file, nor one that
            has more distinct keys than half its rows.

    Attributes:
        pays: False once it is known that there will be no file; keys need not be hashed any more.
    """

    def __init__(self, directory: Path, name: str, rows: int, most: int) -> None:
        self.pays = rows > 0
        self._name = name
        self._path = directory / name
        self._rows = rows
        self._known = KnownKeys(min(most, rows // 2))
        self._began = False
        self._hasher = xxhash.xxh3_64()

    def add(self, hashes: np.ndarray) -> None:
        """Take the next shard's digests, S16 [n], by position."""
        first = self._known.add(hashes)
        self.pays = not self._known.forgotten
        if self.pays:
            self.write(first)
        else:
            self._path.unlink(missing_ok=True)

    def write(self, first: np.ndarray) -> None:
        """Write the next shard's positions, int [n]."""
        data = b"" if self._began else first_header(self._rows)
        self._began = True
        data += first.astype(first_dtype(self._rows)).tobytes()
        self._hasher.update(data)
        with open(self._path, "ab") as file:
            file.write(data)

    def result(self, distinct: int | None = None) -> EqualKeys | None:
        """Make the file last; None where there is none.

        Args:
            distinct: How many keys there are, where `add` was not told.
        """
        if not self.pays:
            return None
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        entry = FileEntry(self._name, size, self._hasher.hexdigest())
        return EqualKeys(self._known.distinct if distinct is None else distinct, entry)
