"""What each way to answer costs: a model in seconds, with measured constants.

Costs are seconds on the two cores that docs/benchmarks.md describes.
docs/decisions/0010-planner.md has the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualform.engine.memory.layer import Layer, resident
from dualform.engine.plan.offer import Offer
from dualform.store.packed_rows import block_rows

# Seconds per byte of keys: read once, for each of the first eight queries, for each further one.
_SCAN = (0.072e-9, 0.012e-9, 0.006e-9)
_FLAT = (0.062e-9, 0.009e-9, 0.004e-9)
# The same for a single query, for which keys are read where they lie.
_SCAN_ONE = 0.036e-9
_FLAT_ONE = 0.033e-9
# The same where keys are copied first, as those are that lie apart or are narrower.
_COPIED = (0.086e-9, 0.014e-9, 0.006e-9)
# Rows that sketches leave lie apart: each costs more than in a scan.
_SCATTERED = 1.6
# Seconds per row that sketches leave and query: its score is compared with what is known so far.
_PAIR = 2e-8
# Seconds per row for its sketch, and for each query.
_SKETCH = (1.3e-8, 1.2e-9)
# Seconds per row more where those whose sketches are read lie apart.
_SCATTERED_SKETCH = 1e-7
# Seconds per row to return: kept as a candidate and scored exactly; by FAISS's heaps, per shard.
_CANDIDATE = 4e-6
_FLAT_HIT = 9e-7
# Seconds per row to be counted with the rows of the same key; to be returned with them.
_COUNTED = 2e-8
_BROUGHT = 2e-7
# Outputs add float64 products of the values too.
_OUTPUT = 2.0
# Seconds per byte of a key sum or of a product with a weight.
_PRODUCT = 0.3e-9
_CALL = 1e-4
# Seconds per byte that the page cache does not hold; rows that lie apart bring whole pages.
_DISK = 1 / 0.3e9
_PAGE = 4096
# Seconds per byte that packed keys and values become: 17 times _SCAN, as measured in one run of
# `python -m benchmarks packed-index`.
_UNPACKED = 1.7e-9

PRUNED_QUERIES = 32
"""So many queries are pruned together: of more, too many rows matter to one or another, and their
bounds take memory."""


def scan_seconds(size: float, queries: int) -> float:
    """To multiply `size` bytes of keys with so many queries."""
    return _SCAN_ONE * size if queries == 1 else _seconds(_SCAN, size, queries)


def apart_seconds(size: float, queries: int) -> float:
    """The same where the keys lie apart."""
    return _SCATTERED * _seconds(_COPIED, size, queries)


def flat_seconds(size: float, queries: int) -> float:
    """For FAISS to search `size` bytes of keys."""
    return _FLAT_ONE * size if queries == 1 else _seconds(_FLAT, size, queries)


def left_seconds(rows: float, width: int, queries: int) -> float:
    """To score so many rows that sketches left, of so many bytes each."""
    return apart_seconds(rows * width, queries) + _PAIR * rows * queries


def unpack_seconds(layer: Layer, read: float, rows: int, *, values: bool = False) -> float:
    """To unpack some of the rows that take part, evenly spread over them; 0 where none are packed.

    Args:
        layer: Whose.
        read: How many are read.
        rows: How many take part.
        values: Whether their values are read too.
    """
    of_keys, of_values = layer.packed
    widths = [layer.key_bytes] if of_keys else []
    if values and of_values:
        widths.append(layer.value_bytes)
    return _UNPACKED * sum(width * min(rows, read * block_rows(width)) for width in widths)


def pruning_pays(
    kept: int,
    rows: int,
    width: int,
    queries: int,
    faiss: bool,
    unpacking: tuple[float, float] = (0.0, 0.0),
) -> bool:
    """Whether reading what sketches left of a shard is cheaper than searching all of it.

    Args:
        kept, rows: How many rows are left, and how many take part.
        width: Bytes of a key.
        queries: How many.
        faiss: Whether FAISS would search the shard.
        unpacking: Seconds for what is left, and for all.
    """
    whole = flat_seconds if faiss else scan_seconds
    of_left, of_all = unpacking
    return left_seconds(kept, width, queries) + of_left < whole(rows * width, queries) + of_all


@dataclass(frozen=True)
class ByKeys:
    """What a top-k by distinct keys comes to.

    Attributes:
        keys: How many distinct keys the rows that take part have.
        hits: How many are looked for per query.
        counted: How many rows are looked through for those of each key.
    """

    keys: int
    hits: int
    counted: int


def distinct_keys_of(rows: int, distinct: int) -> int:
    """How many of a layer's distinct keys some of its rows are expected to have."""
    return round(distinct * -math.expm1(-rows / max(1, distinct)))


def top_k_by_keys_seconds(
    layer: Layer, hits: int, queries: int, by: ByKeys, kept: float | None, there: float
) -> float:
    """For a top-k that finds distinct keys first.

    Args:
        layer: Whose memory.
        hits: Rows to return per query.
        queries: How many.
        by: What there is to find.
        kept: Share of the keys that sketches are expected to leave; None without sketches.
        there: Share of the keys that the page cache holds.
    """
    found = top_k_seconds(layer, by.hits, queries, by.keys, kept or 0.0, there)
    if kept is None:
        size = by.keys * layer.scanned_bytes
        find = found["scan"] + apart_seconds(size, queries) - scan_seconds(size, queries)
    else:
        find = found["certified"] + _SCATTERED_SKETCH * by.keys * -(-queries // PRUNED_QUERIES)
    find += unpack_seconds(layer, by.keys, layer.rows)
    return find + _COUNTED * by.counted + _BROUGHT * queries * hits


def top_k_seconds(
    layer: Layer, hits: int, queries: int, rows: int, kept: float, there: float
) -> dict[str, float]:
    """For a top-k that looks at every row that takes part, by strategy.

    Args:
        layer: Whose memory.
        hits: Rows to return per query.
        queries: How many.
        rows: How many rows take part.
        kept: Share of the rows that sketches are expected to leave.
        there: Share of the keys that the page cache holds.
    """
    size, returned = rows * layer.scanned_bytes, queries * hits
    cold = (1 - there) * rows * layer.key_bytes * _DISK
    unpacked = unpack_seconds(layer, rows, rows)
    blocks = -(-queries // PRUNED_QUERIES)
    seconds = {
        "scan": scan_seconds(size, queries) + unpacked + cold + _CANDIDATE * returned,
        "flat": flat_seconds(size, queries) + cold + _FLAT_HIT * returned * len(layer.shards),
        "certified": rows * (_SKETCH[0] * blocks + _SKETCH[1] * queries)
        + blocks * left_seconds(kept * rows, layer.scanned_bytes, queries // blocks)
        + blocks * unpack_seconds(layer, kept * rows, rows)
        + min(1.0, kept * max(1.0, _PAGE / layer.key_bytes)) * cold
        + _CANDIDATE * returned,
    }
    return {name: spent + _CALL for name, spent in seconds.items()}


def disk_seconds(layer: Layer, size: float) -> float:
    """To read what the page cache does not hold of so many bytes of a layer."""
    return (1 - resident(layer)) * size * _DISK


def device_seconds(offer: Offer, of_rest: float) -> float:
    """For devices to add up what lies on them, where the CPU takes so long for the rest."""
    return _CALL + offer.whole(of_rest)


def device_top_k_seconds(offer: Offer, hits: int, queries: int, of_rest: float) -> float:
    """For a top-k by devices, whose proposals the CPU scores.

    Args:
        offer: What devices would do.
        hits: Rows to return per query.
        queries: How many.
        of_rest: Seconds that the CPU takes for what lies on none.
    """
    return device_seconds(offer, of_rest) + _CANDIDATE * queries * hits


def key_sums_seconds(layer: Layer, queries: int, runs: int) -> float:
    """For sums from so many runs' key sums."""
    return _CALL + _PRODUCT * runs * 8 * layer.d_in * queries


def sums_seconds(layer: Layer, queries: int, rows: int) -> float:
    """For sums by a scan of so many rows."""
    cold = (1 - resident(layer)) * rows * layer.key_bytes * _DISK
    scan = scan_seconds(rows * layer.scanned_bytes, queries)
    return _CALL + scan + unpack_seconds(layer, rows, rows) + cold


def distinct_keys_seconds(layer: Layer, queries: int, rows: int, keys: int) -> float:
    """For sums over so many rows, which have so many distinct keys."""
    cold = (1 - resident(layer)) * keys * max(layer.key_bytes, _PAGE) * _DISK
    apart = apart_seconds(keys * layer.scanned_bytes, queries)
    unpacked = unpack_seconds(layer, keys, layer.rows)
    return _CALL + _COUNTED * rows + apart + unpacked + cold


def output_costs(layer: Layer, queries: int, rows: int, parts: int) -> dict[str, float]:
    """Estimated seconds for outputs: from the rebuilt weight, from so many stored parts, or by a
    scan of so many rows."""
    size = rows * (layer.scanned_bytes + layer.value_bytes)
    cold = (1 - resident(layer)) * rows * (layer.key_bytes + layer.value_bytes) * _DISK
    return {
        "rebuilt": _CALL + _PRODUCT * 8 * layer.d_in * layer.d_out * queries,
        "parts": _CALL + _PRODUCT * 4 * layer.d_in * layer.d_out * queries * parts,
        "scan": _CALL
        + _OUTPUT * _seconds(_COPIED, size, queries)
        + unpack_seconds(layer, rows, rows, values=True)
        + cold,
    }


def _seconds(pace: tuple[float, float, float], size: float, queries: int) -> float:
    once, few, more = pace
    return size * (once + few * min(queries, 8) + more * max(queries - 8, 0))
