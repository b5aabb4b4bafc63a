"""Reading Parquet from memory: the whole table, of the schema that was asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualform.store.parquet import read_parquet


def test_a_schema_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"a": pa.array([1, 2]), "b": pa.array(["x", None])})
    pq.write_table(table, path)
    assert read_parquet(path.read_bytes()).equals(table)
    with pytest.raises(pa.ArrowException):
        read_parquet(path.read_bytes(), pa.schema([pa.field("a", pa.struct([]))]))
