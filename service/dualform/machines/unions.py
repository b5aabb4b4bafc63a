"""Values of a column that several machines know some of, made one list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dualform.store.grouping import group


def union(parts: Sequence[pa.Array]) -> tuple[pa.Array, list[np.ndarray]]:
    """The values of all, each once, ascending, null last; and where each part's are among them.

    Args:
        parts: Of one column; text may be long in one and not in another.

    Returns:
        [groups], and int32 [values] for each part.
    """
    joined = group(concatenated(parts))
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return joined.values, np.split(joined.codes, ends)


def concatenated(parts: Sequence[pa.Array]) -> pa.Array:
    """Arrays of one column, one after the other."""
    kinds = {part.type for part in parts}
    if len(kinds) > 1:
        wide = pa.large_string() if pa.large_string() in kinds else next(iter(kinds))
        parts = [part.cast(wide) for part in parts]
    return pa.concat_arrays(list(parts))
