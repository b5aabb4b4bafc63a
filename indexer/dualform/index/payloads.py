"""An index's payloads: their bytes one after the other, and a table of where each id's lie.

Memory is bounded by a few payloads and the table: the recording's are read in small batches.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from dualform.store.files import FileEntry, digest, write_atomic
from dualform.store.index_parts import EXAMPLES, PAYLOADS
from dualform.store.parquet import write_parquet
from dualform.store.recording import Recording


def write_payloads(source: Recording, directory: Path) -> tuple[FileEntry, FileEntry] | None:
    """Write the payloads of a recording below an index under construction.

    Returns:
        The entries of the table and of the bytes; None where there are no payloads. Of an id that
        was given several payloads the last counts, and is alone in the table.
    """
    places: dict[int | str, tuple[str, int, int, int]] = {}
    hasher, size = xxhash.xxh3_64(), 0
    with open(directory / PAYLOADS, "xb") as file:
        for batch in source.example_tables():
            columns = (batch.column(name).to_pylist() for name in ("id", "kind", "data"))
            for example, kind, data in zip(*columns, strict=True):
                file.write(data)
                hasher.update(data)
                places[example] = (kind, size, len(data), int(digest(data), 16))
                size += len(data)
        file.flush()
        os.fsync(file.fileno())
    if not places:
        (directory / PAYLOADS).unlink()
        return None
    ids = list(places)
    kinds, offsets, sizes, digests = zip(*places.values(), strict=True)
    table = pa.table(
        {
            "id": pa.array(ids, pa.string() if isinstance(ids[0], str) else pa.int64()),
            "kind": pa.array(kinds, pa.string()),
            "offset": pa.array(offsets, pa.int64()),
            "bytes": pa.array(sizes, pa.int64()),
            "xxh3": pa.array(np.array(digests, np.uint64)),
        }
    )
    entry = write_atomic(directory / EXAMPLES, write_parquet(table))
    return entry, FileEntry(PAYLOADS, size, hasher.hexdigest())
