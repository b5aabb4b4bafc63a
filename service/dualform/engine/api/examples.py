"""Payloads by example id: PNG bytes or text, as `recorder.add_examples` kept them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from dualform.store.files import FileEntry, read_checked
from dualform.store.index import REBUILD
from dualform.store.parquet import read_parquet


class Examples:
    """The payloads of an index, read on first use; the last payload given to an id counts."""

    def __init__(self, directory: Path, entry: FileEntry | None) -> None:
        self._directory = directory
        self._entry = entry
        self._lock = threading.Lock()
        self._payloads: dict[int | str, bytes | str] | None = None

    def get(self, ids: Sequence[int | str]) -> list[bytes | str | None]:
        """Payloads in the order of ids, None where there is none.

        Raises:
            DamagedError: The file does not hold what was written.
        """
        with self._lock:
            if self._payloads is None:
                self._payloads = self._read()
            return [self._payloads.get(own) for own in ids]

    def _read(self) -> dict[int | str, bytes | str]:
        if self._entry is None:
            return {}
        table = read_parquet(read_checked(self._directory, self._entry, REBUILD))
        payloads: dict[int | str, bytes | str] = {}
        columns = (table[name].to_pylist() for name in ("id", "kind", "data"))
        for own, kind, data in zip(*columns, strict=True):
            payloads[own] = data.decode() if kind == "text" else data
        return payloads
