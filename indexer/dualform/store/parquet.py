"""Parquet in memory: reading it in the thread that asks for it, and writing it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(
    data: bytes,
    schema: pa.Schema | None = None,
    *,
    rows: int | None = None,
    dictionaries: bool = False,
) -> pa.Table:
    """A whole Parquet file's table.

    Without Arrow's threads: the files are small, and a process that ends while threads
    start, as a command with an error to report does, may be aborted by them.

    Args:
        data: The file.
        schema: What the columns must be; None takes the file's own.
        rows: How many there must be; looked at before any of them is decoded. None takes any.
        dictionaries: Whether text comes as dictionaries: a long one that many rows have is there
            once, however often it would be written out.

    Raises:
        pyarrow.ArrowException, OSError: Not Parquet, not of that schema or number of rows, or with
            text that is no UTF-8.
    """
    # Not pq.read_table: it goes through a data set's scanner, which is made for larger things.
    # Nor buffered ahead, which is a thread too.
    file = _opened(pa.BufferReader(data))
    if dictionaries:
        text = [
            field.name
            for field in file.schema_arrow
            if field.type in (pa.string(), pa.large_string())
        ]
        file = _opened(pa.BufferReader(data), read_dictionary=text)
    if rows is not None and file.metadata.num_rows != rows:
        raise pa.ArrowInvalid(f"{file.metadata.num_rows:,} rows where {rows:,} belong")
    table = file.read(use_threads=False)
    table.validate(full=True)
    if schema is None:
        return table
    if table.column_names != schema.names:
        raise pa.ArrowInvalid(f"columns {table.column_names} where {schema.names} belong")
    try:
        return table.cast(schema)
    except ValueError as error:  # nulls where there may be none
        raise pa.ArrowInvalid(str(error)) from None


def check_columns(table: pa.Table | pa.RecordBatch, types: Mapping[str, Sequence[Any]]) -> None:
    """Hold columns against what they must be, before any value is taken out.

    Args:
        table: What was read.
        types: Of each column, in this order, the Arrow types that it may have.

    Raises:
        pyarrow.ArrowInvalid: Other columns, of another type, or with nulls.
    """
    if table.schema.names != list(types):
        raise pa.ArrowInvalid(f"columns {table.schema.names} where {list(types)} belong")
    for field in table.schema:
        if field.type not in types[field.name]:
            raise pa.ArrowInvalid(f"column {field.name!r} is {field.type}")
        if table.column(field.name).null_count:
            raise pa.ArrowInvalid(f"column {field.name!r} has nulls")


def batches(fd: int, rows: int = 16) -> Iterator[pa.RecordBatch]:
    """A Parquet file's rows, a few at a time, in memory bounded by them and a page.

    Args:
        fd: The open file; it stays open.
        rows: Of a batch, at most.

    Raises:
        pyarrow.ArrowException, OSError: Not Parquet, or with text that is no UTF-8.
    """
    with os.fdopen(os.dup(fd), "rb") as source:
        file = _opened(source, buffer_size=1 << 20)
        for batch in file.iter_batches(batch_size=rows, use_threads=False):
            batch.validate(full=True)
            yield batch


def _opened(source: Any, **options: Any) -> pq.ParquetFile:
    """Arrow takes text at its word, and fails where a value is taken out; names it reads here."""
    try:
        file = pq.ParquetFile(source, pre_buffer=False, **options)
        file.schema_arrow.names  # noqa: B018
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"a name that is no text: {error}") from None
    return file


def write_parquet(table: pa.Table, group_bytes: int | None = None) -> bytes:
    """A table as a Parquet file.

    Args:
        table: What is written.
        group_bytes: Of a row group, about; who reads large values a few at a time needs memory for
            a group. None: all in one.

    Integers are written as differences: half the time and two thirds of the size of dictionaries.
    """
    integers = [field.name for field in table.schema if field.type == pa.int64()]
    sink = io.BytesIO()
    rows = None
    if group_bytes is not None:
        rows = max(1, group_bytes * len(table) // max(1, table.nbytes))
    pq.write_table(
        table,
        sink,
        row_group_size=rows,
        compression="zstd",
        use_dictionary=[name for name in table.column_names if name not in integers],
        column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
    )
    return sink.getvalue()
