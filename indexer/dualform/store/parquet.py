"""Reading Parquet from memory, in the thread that asks for it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """A whole Parquet file's table.

    Without Arrow's threads: the files are small, and a process that ends while threads
    start, as a command with an error to report does, may be aborted by them.

    Args:
        data: The file.
        schema: What the columns must be; None takes the file's own.

    Raises:
        pyarrow.ArrowException: Not Parquet, or not of that schema.
    """
    # Not pq.read_table: it goes through a data set's scanner, which is made for larger things.
    # Nor buffered ahead, which is a thread too.
    file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
    table = file.read(use_threads=False)
    if schema is None:
        return table
    if table.column_names != schema.names:
        raise pa.ArrowInvalid(f"columns {table.column_names} where {schema.names} belong")
    return table.cast(schema)
