"""Which rows of a layer have the same key (docs/decisions/0014): found while keys pass.

Every key is hashed, and the file that comes of it says of each row which is the first with its key.
"""

from __future__ import annotations

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
        self._most = min(most, rows // 2)
        self._done = 0
        self._known = np.empty(0, _DIGEST)  # ascending
        self._first = np.empty(0, first_dtype(rows))  # where each was seen first
        self._hasher = xxhash.xxh3_64()

    def add(self, hashes: np.ndarray) -> None:
        """Take the next shard's digests, S16 [n], by position."""
        keys, places, which = np.unique(hashes, return_index=True, return_inverse=True)
        first = (self._done + places).astype(self._first.dtype)
        where = np.searchsorted(self._known, keys)
        seen = np.zeros(len(keys), bool)
        inside = where < len(self._known)
        seen[inside] = self._known[where[inside]] == keys[inside]
        first[seen] = self._first[where[seen]]
        self._known = np.insert(self._known, where[~seen], keys[~seen])
        self._first = np.insert(self._first, where[~seen], first[~seen])
        self.pays = len(self._known) <= self._most
        if not self.pays:
            self._known, self._first = self._known[:0].copy(), self._first[:0].copy()
            self._path.unlink(missing_ok=True)
            return
        data = first_header(self._rows) if self._done == 0 else b""
        data += first[which].tobytes()
        self._hasher.update(data)
        with open(self._path, "ab") as file:
            file.write(data)
        self._done += len(hashes)

    def result(self) -> EqualKeys | None:
        """Make the file last; None where there is none."""
        if not self.pays:
            return None
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        return EqualKeys(len(self._known), FileEntry(self._name, size, self._hasher.hexdigest()))
