"""Payloads by example id: PNG bytes or text, as `recorder.add_examples` kept them.

Only the table of where they lie is in memory, from the first question on; a question reads, and
checks, the bytes of its own payloads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dualform.store.errors import DamagedError
from dualform.store.files import (
    FileEntry,
    check_digest_of,
    digest,
    identity,
    opened,
    read_checked,
    status,
)
from dualform.store.index import REBUILD
from dualform.store.parquet import batches, check_columns, read_parquet
from dualform.store.recording_format import PAYLOAD_KINDS, PAYLOADS

_PLACES = {
    "id": PAYLOADS["id"],
    "kind": (pa.string(),),
    "offset": (pa.int64(),),
    "bytes": (pa.int64(),),
    "xxh3": (pa.uint64(),),
}


class Place(NamedTuple):
    """Where a payload lies.

    Attributes:
        kind: "png", "bytes" or "text".
        offset: Byte at which it starts.
        size: Its bytes.
        xxh3: Their digest, as a number.
    """

    kind: str
    offset: int
    size: int
    xxh3: int


class Examples:
    """The payloads of an index; thread-safe.

    Args:
        directory: The index.
        table: The file that says where each payload lies; None where there are none.
        payloads: The file of their bytes. None in an older index, whose table has the bytes itself:
            it is read from end to end for every question, a few payloads at a time.
    """

    def __init__(
        self, directory: Path, table: FileEntry | None, payloads: FileEntry | None
    ) -> None:
        self._directory = directory
        self._table = table
        self._payloads = payloads
        self._lock = threading.Lock()
        self._places: Mapping[int | str, Place] | None = None
        self._checked: tuple[int, ...] | None = None

    def get(self, ids: Sequence[int | str]) -> list[bytes | str | None]:
        """Payloads in the order of ids, None where there is none.

        Raises:
            DamagedError: A file does not hold what was written.
        """
        if self._table is None:
            return [None] * len(ids)
        if self._payloads is None:
            return self._get_older(ids, self._table)
        places = self._known()
        with opened(self._directory, self._payloads, REBUILD) as fd:
            return [
                None if (place := places.get(example)) is None else self._read(fd, place)
                for example in ids
            ]

    def sizes(self, ids: Sequence[int | str]) -> int:
        """Bytes of these payloads together, known without reading them; 0 in an older index."""
        if self._payloads is None:
            return 0
        places = self._known()
        return sum(places[example].size for example in ids if example in places)

    def _known(self) -> Mapping[int | str, Place]:
        with self._lock:
            if self._places is None:
                assert self._table is not None
                assert self._payloads is not None
                self._places = self._read_table(self._table, self._payloads.bytes)
            return self._places

    def _read_table(self, table: FileEntry, most: int) -> Mapping[int | str, Place]:
        with self._damage(table):
            data = read_checked(self._directory, table, REBUILD)
            try:
                found = read_parquet(data)
            except OSError as error:  # Arrow's, of bytes in memory: no device is at fault
                raise ValueError(error) from None
            check_columns(found, _PLACES)
            columns = [column.to_pylist() for column in found.columns]
            places = {example: Place(*place) for example, *place in zip(*columns, strict=True)}
            if len(places) < len(found):
                raise ValueError("an id is there twice")
            for example, place in places.items():
                inside = 0 <= place.offset <= most - place.size <= most
                if place.kind not in PAYLOAD_KINDS or not inside:
                    raise ValueError(f"the payload of {example!r} lies nowhere")
            return places

    def _read(self, fd: int, place: Place) -> bytes | str:
        assert self._payloads is not None
        data = os.pread(fd, place.size, place.offset)
        while len(data) < place.size and (
            more := os.pread(fd, place.size - len(data), place.offset + len(data))
        ):
            data += more
        with self._damage(self._payloads):
            if int(digest(data), 16) != place.xxh3:
                raise ValueError(f"the payload at byte {place.offset:,} is not the one written")
            return data.decode() if place.kind == "text" else data

    def _get_older(self, ids: Sequence[int | str], table: FileEntry) -> list[bytes | str | None]:
        wanted, found = set(ids), {}
        with self._damage(table), opened(self._directory, table, REBUILD) as fd:
            with self._lock:
                if self._checked is None:
                    check_digest_of(fd, self._directory, table, REBUILD)
                    self._checked = identity(os.fstat(fd))
            if identity(status(self._directory, table, REBUILD)) != self._checked:
                raise ValueError("it was changed after it had been checked")
            for batch in _read(fd):
                for i, example in enumerate(batch.column("id").to_pylist()):
                    if example in wanted:
                        kind, data = (batch.column(name)[i].as_py() for name in ("kind", "data"))
                        if kind not in PAYLOAD_KINDS:
                            raise ValueError(f"the payload of {example!r} is of no kind")
                        found[example] = data.decode() if kind == "text" else data
        return [found.get(example) for example in ids]

    @contextmanager
    def _damage(self, entry: FileEntry) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
            path = self._directory / entry.name
            raise DamagedError(path, f"not payloads ({error})", REBUILD) from None


def _read(fd: int) -> Iterator[pa.RecordBatch]:
    """An older index's table."""
    try:
        for batch in batches(fd):
            check_columns(batch, PAYLOADS)
            yield batch
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(error) from None  # Arrow's, of what is no table
