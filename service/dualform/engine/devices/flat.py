"""FAISS flat search of one shard, as a proposer of rows.

`faiss.knn` runs IndexFlatIP's own search on the mapped keys. Its scores depend on batch size and
thread count in their last bits, and ties come back in any order: what it returns is proposals.
A single query `knn` would give to BLAS, which copies the keys before it multiplies them: FAISS's
loop over rows reads them where they lie, in less than half the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dualform.engine.memory.shards import Shard, Stop, check_stop

MAX_K = 2048
"""Above this FAISS's heaps cost more than the scan they save."""


def search(
    shard: Shard, queries: torch.Tensor, k: int, stop: Stop | None
) -> tuple[np.ndarray, np.ndarray]:
    """The shard's rows with the largest float32 inner products.

    Args:
        shard: All of its keys finite.
        queries: float32 [n, d].
        k: Rows per query; cut to the shard's rows.
        stop: Asked before the search.

    Returns:
        Scores, float32 [n, k], descending, and the rows' places in the shard, int64 [n, k].
    """
    check_stop(stop)
    import faiss

    keys = shard.keys.rows().numpy()
    if len(queries) == 1:
        return _of_one(faiss, keys, queries[0].numpy(), min(k, shard.rows))
    # Small batches leave BLAS by default, up to eight times slower. It is a setting of the whole
    # process, which somebody else may have changed since the last search.
    if hasattr(faiss.cvar, "distance_compute_blas_threshold"):
        faiss.cvar.distance_compute_blas_threshold = 1
    scores, places = faiss.knn(
        queries.numpy(), keys, min(k, shard.rows), metric=faiss.METRIC_INNER_PRODUCT
    )
    return np.asarray(scores), np.asarray(places)


def _of_one(
    faiss: Any, keys: np.ndarray, query: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """As `search`, for a query float32 [d]; keys may be unaligned."""
    scores = np.empty(len(keys), np.float32)
    pointers = (faiss.swig_ptr(np.ascontiguousarray(each)) for each in (scores, query, keys))
    faiss.fvec_inner_products_ny(*pointers, keys.shape[1], len(keys))
    best = np.argpartition(scores, len(scores) - k)[len(scores) - k :]
    best = best[np.argsort(-scores[best])]
    return scores[best][None], best[None]
