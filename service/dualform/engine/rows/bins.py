"""Groups by ranges of a numeric column, as numpy.histogram makes bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from dualform.engine.errors import InvalidArgumentError
from dualform.store.grouping import Grouping


def binned(name: str, column: pa.Array, edges: Sequence[float]) -> Grouping:
    """Group rows by bins: edges[i] <= value < edges[i + 1], the last one with its upper edge.

    Args:
        name: The column's name.
        column: int64 or float64 [rows].
        edges: Strictly ascending, at least two; infinite ones are allowed.

    Returns:
        Groups called by their lower edges, float64; codes are -1 for rows outside, without a value,
        or with NaN.

    Raises:
        InvalidArgumentError: The column is not numeric, or the edges are not as said.
    """
    if pa.types.is_dictionary(column.type) or not (
        pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    ):
        raise InvalidArgumentError(
            f"column {name!r} is not numeric, so it has no bins; leave them out", field="bins"
        )
    if len(edges) < 2:
        raise InvalidArgumentError(
            f"bins have {len(edges)} edge; at least two are needed, such as 0, 1000, 3000",
            field="bins",
        )
    for low, high in pairwise(edges):
        if not low < high:
            raise InvalidArgumentError(
                f"bins go from {low:g} to {high:g}; edges must ascend", field="bins"
            )
    valid = np.asarray(column.is_valid())
    if pa.types.is_integer(column.type):
        values = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        codes = _integer_codes(values, edges)
    else:
        values = column.fill_null(math.nan).to_numpy(zero_copy_only=False)
        valid &= ~np.isnan(values)
        codes = np.searchsorted(np.asarray(edges, np.float64), values, side="right") - 1
        codes[values == edges[-1]] = len(edges) - 2
    codes[(codes >= len(edges) - 1) | ~valid] = -1
    return Grouping(pa.array(edges[:-1], pa.float64()), codes.astype(np.int32))


def _integer_codes(values: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """Which bin each integer is in, int64 [rows]; exact beyond 2^53 too."""
    least, most = -(2**63), 2**63 - 1
    # An integer reaches an edge if it reaches the next integer above.
    lows = [least if edge < least else math.ceil(edge) for edge in edges[:-1] if edge <= most]
    lows = [low for low in lows if low <= most]
    codes = np.searchsorted(np.array(lows, np.int64), values, side="right") - 1
    last = edges[-1]
    if last < least:
        codes[:] = -1
    elif last < most:
        codes[values > math.floor(last)] = -1
    return codes
