"""Groups are the distinct values of a column, as Python tells values apart."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from dualform.store.grouping import group


def test_equal_numbers_and_all_nans_are_one_group_each() -> None:
    bits = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001], np.uint64)
    numbers = [0.0, -0.0, 1.0, None, math.inf, -math.inf, *bits.view(np.float64)]
    grouping = group(pa.array(numbers))
    values = grouping.values.to_pylist()
    assert values[:4] == [-math.inf, 0.0, 1.0, math.inf]
    assert math.isnan(values[4])
    assert values[5:] == [None]
    assert math.copysign(1, values[1]) == 1
    assert grouping.codes.tolist() == [1, 1, 2, 5, 3, 0, 4, 4, 4]


@pytest.mark.parametrize("values", [[], [None], [True, None, False, True], ["b", "", None, "b"]])
def test_values_ascend_and_null_is_last(values: list[object]) -> None:
    kind = pa.string() if "b" in values else pa.bool_()
    grouping = group(pa.array(values, kind))
    expected: list[object] = sorted({v for v in values if v is not None}, key=lambda v: (v,))
    expected += [None] * (None in values)
    assert grouping.values.to_pylist() == expected
    assert [expected[code] for code in grouping.codes] == values


def test_a_dictionary_is_what_its_rows_have() -> None:
    """Its own may have values that no row has, one twice, and null among them."""
    dictionary = pa.array(["unused", "b", "a", "b", None])
    codes = pa.array([1, 2, 3, None, 4, 1], pa.int32())
    grouping = group(pa.DictionaryArray.from_arrays(codes, dictionary))
    assert grouping.values.to_pylist() == ["a", "b", None]
    assert grouping.codes.tolist() == [1, 0, 1, 2, 2, 1]
    assert grouping.counts.tolist() == [1, 3, 2]
    assert group(pa.DictionaryArray.from_arrays(codes[:0], dictionary)).values.to_pylist() == []
