"""Values that say themselves where they are missing: pandas' nullable types, Arrow, masked arrays.

Told apart before NumPy sees them: it would make NaN of a null, and 9007199254740992.0 of 2^53 + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def without_nulls(value: Any) -> tuple[Any, np.ndarray | None]:
    """Take the nulls out.

    Returns:
        Without nulls: the values as NumPy can take them, and None. With: those that are there, flat
        in row-major order, and a bool array of the whole shape: where none is.
    """
    if isinstance(value, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(value)
        if missing.shape and missing.any():
            return value.compressed(), missing
        return value if missing.any() else value.data, None
    if hasattr(value, "null_count") and hasattr(value, "to_pylist"):  # Arrow's arrays
        items = value.to_pylist()
    elif hasattr(value, "isna") and not isinstance(getattr(value, "dtype", None), _NUMPY):
        items = value.tolist()  # pandas' nullable types; a DataFrame has no dtype, and no tolist
        return _taken(items, np.asarray(value.isna(), np.bool_))
    else:
        return value, None
    return _taken(items, np.array([item is None for item in items], np.bool_))


def filled(present: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """A flat column of all values: text with None where it is missing, others as a masked array."""
    flat = missing.reshape(-1)
    whole = np.zeros(flat.size, present.dtype)
    whole[~flat] = present
    if present.dtype == object:
        whole[flat] = None
        return whole
    return np.ma.MaskedArray(whole, flat)


_NUMPY = (np.dtype, type(None))


def _taken(items: list[Any], missing: np.ndarray) -> tuple[Any, np.ndarray | None]:
    if not missing.any():
        return items, None
    return [item for item, gone in zip(items, missing, strict=True) if not gone], missing
