"""Rows without a value in a column that others have: null, and the others as they were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from dualform.record import AnnotationError, Recorder
from dualform.store.recording import Recording

BIG = 2**53 + 1
"""The first integer that float64 can't hold."""


def read(path: Path, values: list[Any], leading: tuple[int, ...] = (3,)) -> list[Any]:
    """Annotate one step per entry; what the recording has, row by row."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, path) as recorder:
        for value in values:
            recorder.annotate(column=value)
            optimizer.zero_grad()
            model(torch.randn(*leading, 2)).sum().backward()
            optimizer.step()
    recording = Recording.open(path)
    table = recording.read_rows([record.block for record in recording.passes("")])
    return table["column"].to_pylist()


CASES: list[tuple[str, Any, list[Any]]] = [
    ("pandas integers", pd.Series([BIG, pd.NA, -1], dtype="Int64"), [BIG, None, -1]),
    ("their array", pd.array([BIG, None, -1], dtype="Int64"), [BIG, None, -1]),
    ("without a null", pd.Series([BIG, 0, -1], dtype="Int64"), [BIG, 0, -1]),
    ("small ones", pd.Series([1, None, 3], dtype="UInt8"), [1, None, 3]),
    ("booleans", pd.Series([True, None, False], dtype="boolean"), [True, None, False]),
    ("floats", pd.Series([0.5, None, 2.0], dtype="Float64"), [0.5, None, 2.0]),
    ("text", pd.Series(["a", None, ""], dtype="string"), ["a", None, ""]),
    ("categories", pd.Series(["a", None, "b"], dtype="category"), ["a", None, "b"]),
    ("an odd index", pd.Series([1, None, 3], dtype="Int64", index=[7, 7, 9]), [1, None, 3]),
    ("arrow integers", pa.array([BIG, None, -1]), [BIG, None, -1]),
    ("arrow in chunks", pa.chunked_array([[BIG], [None, -1]]), [BIG, None, -1]),
    ("arrow text", pa.array(["a", None, "b"]).dictionary_encode(), ["a", None, "b"]),
    ("arrow without a null", pa.array([BIG, 0, -1]), [BIG, 0, -1]),
    ("arrow behind pandas", pd.Series([BIG, None, -1], dtype="int64[pyarrow]"), [BIG, None, -1]),
    ("masked", np.ma.array([BIG, 7, -1], mask=[False, True, False]), [BIG, None, -1]),
    ("masked nowhere", np.ma.array([BIG, 7, -1]), [BIG, 7, -1]),
]


@pytest.mark.parametrize(("value", "expected"), [case[1:] for case in CASES], ids=lambda _: "")
def test_nulls_stay_nulls(tmp_path: Path, value: Any, expected: list[Any]) -> None:
    assert read(tmp_path / "r", [value]) == expected


def test_nan_stays_nan(tmp_path: Path) -> None:
    """A float that is not a number is a value, and no null."""
    column = read(tmp_path / "r", [pd.Series([0.5, float("nan"), 2.0])])
    assert column[0] == 0.5
    assert np.isnan(column[1])


def test_steps_with_and_without(tmp_path: Path) -> None:
    """Nulls only, a constant, all values, some: one column of one type."""
    missing = pd.Series([None, None, None], dtype="Int64")
    values = [missing, 4, [1, 2, 3], pd.array([1, None, 3], dtype="Int64"), pa.nulls(3)]
    expected = [None] * 3 + [4] * 3 + [1, 2, 3] + [1, None, 3] + [None] * 3
    assert read(tmp_path / "r", values) == expected


def test_per_example_and_per_row(tmp_path: Path) -> None:
    """Spread over the positions of a sequence, or given for each."""
    by_example = pd.array([1, None], dtype="Int64")
    by_row = np.ma.array([[1, 2], [3, 4]], mask=[[False, True], [True, False]])
    column = read(tmp_path / "r", [by_example, by_row], leading=(2, 2))
    assert column == [1, 1, None, None, 1, None, None, 4]


@pytest.mark.parametrize(
    "value",
    [
        [1, None, 2],
        pd.Series([1, None, "a"], dtype=object),
        pa.array([{"a": 1}, None, None]),
        pd.Series([pd.Timestamp(0, tz="UTC"), pd.NaT, pd.NaT]),
    ],
)
def test_what_has_no_type_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(AnnotationError, match="nullable, Arrow or masked"):
        read(tmp_path / "r", [value])
