"""Rows by the values of a metadata column: the order that shards and answers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class Grouping:
    """Rows by the values of one column.

    Attributes:
        values: The column's distinct values, ascending, null last.
        codes: int32 [rows]: each row's place in `values`.
    """

    values: pa.Array
    codes: np.ndarray

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [groups]: rows per group."""
        return np.bincount(self.codes, minlength=len(self.values)).astype(np.int64)


def group(column: pa.Array) -> Grouping:
    """Group rows by a column of int64, float64, string (also as a dictionary) or bool.

    Equal numbers are one group (-0.0 is 0.0), and so are all NaNs.
    """
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), math.nan, pc.add(column, 0.0))
    if pa.types.is_dictionary(column.type):
        column = _compact(column)
    encoded = column.dictionary_encode()
    values = encoded.dictionary
    if pa.types.is_boolean(values.type):  # pyarrow does not sort them
        order = np.argsort(values.to_numpy(zero_copy_only=False), kind="stable")
    else:
        order = pc.array_sort_indices(values).to_numpy()
    rank = np.empty(len(order) + 1, np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    rank[-1] = len(order)  # null
    codes = encoded.indices.fill_null(len(order)).to_numpy(zero_copy_only=False)
    values = values.take(pa.array(order))
    if column.null_count:
        values = pa.concat_arrays([values, pa.nulls(1, values.type)])
    return Grouping(values, rank[codes])


def _compact(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """The same rows with a dictionary of what they have, each value once and none of them null."""
    distinct = column.dictionary.dictionary_encode()
    codes = distinct.indices.take(column.indices)
    used = pc.unique(codes).drop_null()
    table = np.zeros(len(distinct.dictionary), np.int32)
    table[used.to_numpy()] = np.arange(len(used), dtype=np.int32)
    return pa.DictionaryArray.from_arrays(
        pa.array(table).take(codes), distinct.dictionary.take(used)
    )
