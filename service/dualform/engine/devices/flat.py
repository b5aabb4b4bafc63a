"""FAISS flat search of one shard, as a proposer of rows.

`faiss.knn` runs IndexFlatIP's own search on the mapped keys. Its scores depend on batch size and
thread count in their last bits, and ties come back in any order: what it returns is proposals.
A single query `knn` would give to BLAS, which copies the keys before it multiplies them: FAISS's
loop over rows reads them where they lie, in less than half the time.
"""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.memory.shards import Shard, Stop, check_stop
from dualform.engine.memory.weights import inner_products

MAX_K = 2048
"""Above this FAISS's heaps cost more than the scan they save."""

PRODUCTS = 1 << 29
"""Of two numbers, in one call of FAISS, which cannot be interrupted: 15 to 50 ms of a core."""

_MANY = 128
_FEW = 64
_ROWS_PER_HIT = 16


def search(
    shard: Shard, queries: torch.Tensor, k: int, stop: Stop | None
) -> tuple[np.ndarray, np.ndarray]:
    """The shard's rows with the largest float32 inner products.

    Args:
        shard: All of its keys finite.
        queries: float32 [n, d].
        k: Rows per query; cut to the shard's rows.
        stop: Asked before each call of FAISS; without one there is a single call.

    Returns:
        Scores, float32 [n, k], the least last, and the rows' places in the shard, int64 [n, k].
    """
    check_stop(stop)
    import faiss

    keys = shard.mapped_keys().numpy()
    if len(queries) == 1:
        return _of_one(keys, queries[0].numpy(), min(k, shard.rows))
    # Small batches leave BLAS by default, up to eight times slower. It is a setting of the whole
    # process, which somebody else may have changed since the last search.
    if hasattr(faiss.cvar, "distance_compute_blas_threshold"):
        faiss.cvar.distance_compute_blas_threshold = 1
    k = min(k, shard.rows)
    rows, together = shard.rows, len(queries)
    if stop is not None:
        rows, together = piece(rows, together, keys.shape[1], k)
    scores = np.empty((len(queries), k), np.float32)
    places = np.empty((len(queries), k), np.int64)
    for start in range(0, len(queries), together):
        block = slice(start, start + together)
        found = []
        for first in range(0, shard.rows, rows):
            check_stop(stop)
            some = keys[first : first + rows]
            best, inside = faiss.knn(
                queries[block].numpy(), some, min(k, len(some)), metric=faiss.METRIC_INNER_PRODUCT
            )
            found.append((np.asarray(best), np.asarray(inside) + first))
        check_stop(stop)
        scores[block], places[block] = found[0] if len(found) == 1 else _best(found, k)
    return scores, places


def piece(rows: int, queries: int, width: int, k: int) -> tuple[int, int]:
    """How many rows and queries of these go into one call: pieces of rows as equal as can be, and
    none so small that most of its rows are hits; then of queries. Many hits, which are found once
    more in each piece of rows, make it few queries by many rows, and twice as many products."""
    products = PRODUCTS
    if k > _MANY:
        products *= 2
        queries = -(-queries // -(-queries // _FEW))
    most = max(products // (queries * width), _ROWS_PER_HIT * k, 1)
    each = -(-rows // -(-rows // most))
    return each, max(1, min(queries, products // (each * width)))


def _best(found: list[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of each query's scores in several pieces, the least last, and their places."""
    scores, places = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    least = scores.shape[1] - k
    kept = np.argpartition(scores, least, axis=1)[:, least:][:, ::-1]
    return np.take_along_axis(scores, kept, axis=1), np.take_along_axis(places, kept, axis=1)


def _of_one(keys: np.ndarray, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """As `search`, for a query float32 [d]; keys may be unaligned."""
    scores = np.empty(len(keys), np.float32)
    inner_products(query, keys, scores)
    best = np.argpartition(scores, len(scores) - k)[len(scores) - k :]
    best = best[np.argsort(-scores[best])]
    return scores[best][None], best[None]
