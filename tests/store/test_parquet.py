"""Reading Parquet from memory: the whole table, of the schema that was asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm

from dualform.store.parquet import batches, read_parquet


def test_a_schema_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"a": pa.array([1, 2]), "b": pa.array(["x", None])})
    pq.write_table(table, path)
    assert read_parquet(path.read_bytes()).equals(table)
    with pytest.raises(pa.ArrowException):
        read_parquet(path.read_bytes(), pa.schema([pa.field("a", pa.struct([]))]))


def test_rows_are_counted_before_they_are_made(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    assert len(read_parquet(data, rows=2)) == 2
    with pytest.raises(pa.ArrowInvalid, match="2 rows where 3 belong"):
        read_parquet(data, rows=3)


PROGRAM = """
import os, sys
from pathlib import Path
from dualform.store.parquet import batches, read_parquet
before = len(os.listdir("/proc/self/task"))
table = read_parquet(Path(sys.argv[1]).read_bytes())
print(table.num_rows, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux counts threads there")
def test_no_thread_is_started(tmp_path: Path) -> None:
    """One that starts while its process ends aborts it, with a message of C++'s and status 134."""
    path = tmp_path / "a.parquet"
    columns = {f"c{i}": pa.array(range(100_000)) for i in range(8)}
    pq.write_table(pa.table(columns), path, row_group_size=10_000)
    result = warm.run(PROGRAM, path)
    assert result.stdout.split() == ["100000", "0"], result.stderr


@pytest.mark.parametrize("data", [b"", b"PAR1", b"x" * 100])
def test_what_is_no_parquet(data: bytes) -> None:
    with pytest.raises(pa.ArrowException):
        read_parquet(data)


def text(*values: bytes) -> pa.Array:
    """Text of any bytes, which Arrow takes at its word."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


@pytest.mark.parametrize("dictionaries", [False, True])
def test_text_that_is_no_utf8(tmp_path: Path, dictionaries: bool) -> None:
    """Arrow hands it on, and fails where somebody takes a value out."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"ab": text(b"good", b"b\xe1d", b"good")}), path)
    with pytest.raises(UnicodeDecodeError):
        pq.read_table(path)["ab"].to_pylist()
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        read_parquet(path.read_bytes(), dictionaries=dictionaries)
    with path.open("rb") as file, pytest.raises(pa.ArrowInvalid, match="UTF8"):
        list(batches(file.fileno()))


@pytest.mark.parametrize("dictionaries", [False, True])
def test_a_name_that_is_no_utf8(tmp_path: Path, dictionaries: bool) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"column": text(b"good")}), path, store_schema=False)
    named = path.read_bytes().replace(b"column", b"col\xe1mn")
    with pytest.raises(pa.ArrowInvalid, match="name that is no text"):
        read_parquet(named, dictionaries=dictionaries)
    path.write_bytes(named)
    with path.open("rb") as file, pytest.raises(pa.ArrowInvalid, match="name that is no text"):
        list(batches(file.fileno()))
