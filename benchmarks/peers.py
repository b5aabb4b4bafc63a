"""Exact inner-product search by other means, each set up as favours it.

FAISS by default and tuned, a torch GEMM with topk; usearch, LanceDB and milvus-lite where they are
installed (`pip install usearch lancedb pymilvus milvus-lite`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch

Search = Callable[[np.ndarray, int], np.ndarray]
"""Queries float32 [n, d] and k: scores float32 [n, k]."""

FAISS_DEFAULT = faiss.cvar.distance_compute_blas_threshold
LARGEST_BATCH = {"usearch": 8, "lancedb": 1, "milvus-lite": 64}
"""These are asked for no larger batches: they take minutes."""

_INSERT = 4096


def peers(keys: torch.Tensor, scratch: Path, wanted: set[str] | None = None) -> dict[str, Search]:
    """Those that are installed, over keys float32 [rows, d].

    Args:
        keys: Shared where a peer allows it; LanceDB and milvus-lite copy them to `scratch`.
        scratch: An existing folder for their files.
        wanted: Names; None for all.
    """
    matrix = keys.numpy()
    flat = faiss.IndexFlatIP(keys.shape[1])
    flat.add(matrix)

    def with_threshold(threshold: int) -> Search:
        def search(queries: np.ndarray, k: int) -> np.ndarray:
            faiss.cvar.distance_compute_blas_threshold = threshold
            return np.asarray(flat.search(queries, k)[0])

        return search

    def gemm(queries: np.ndarray, k: int) -> np.ndarray:
        return (torch.from_numpy(queries) @ keys.T).topk(k, dim=1).values.numpy()

    found: dict[str, Search] = {
        "faiss default": with_threshold(FAISS_DEFAULT),
        "faiss tuned": with_threshold(1),
        "torch": gemm,
    }
    for name, make in {"usearch": _usearch, "lancedb": _lancedb, "milvus-lite": _milvus}.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            found[name] = make(matrix, scratch)
        except ImportError as error:
            logging.getLogger("benchmarks").warning("without %s: %s", name, error)
    return found


def _usearch(matrix: np.ndarray, scratch: Path) -> Search:
    from usearch.index import MetricKind, search  # type: ignore[attr-defined,unused-ignore]

    def run(queries: np.ndarray, k: int) -> np.ndarray:
        hits = search(matrix, queries, k, MetricKind.IP, exact=True)
        return 1 - np.asarray(hits.distances).reshape(len(queries), k)

    return run


def _lancedb(matrix: np.ndarray, scratch: Path) -> Search:
    import lancedb
    import pyarrow as pa

    vectors = pa.FixedSizeListArray.from_arrays(matrix.reshape(-1), matrix.shape[1])
    table = lancedb.connect(scratch / "lance").create_table("keys", pa.table({"vector": vectors}))

    def run(queries: np.ndarray, k: int) -> np.ndarray:
        scores = []
        for query in queries:
            answer = table.search(query).distance_type("dot").bypass_vector_index().limit(k)
            distances = answer.select(["_distance"]).to_arrow()["_distance"]
            scores.append(1 - distances.to_numpy())
        return np.stack(scores)

    return run


def _milvus(matrix: np.ndarray, scratch: Path) -> Search:
    from pymilvus import DataType, MilvusClient

    client = MilvusClient(str(scratch / "milvus.db"))
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("key", DataType.FLOAT_VECTOR, dim=matrix.shape[1])
    index = client.prepare_index_params()
    index.add_index("key", index_type="FLAT", metric_type="IP")
    client.create_collection("keys", schema=schema, index_params=index)
    for start in range(0, len(matrix), _INSERT):
        part = matrix[start : start + _INSERT]
        client.insert("keys", [{"id": start + i, "key": row} for i, row in enumerate(part)])
    client.load_collection("keys")

    def run(queries: np.ndarray, k: int) -> np.ndarray:
        hits = client.search("keys", list(queries), limit=k, search_params={"metric_type": "IP"})
        return np.array([[hit["distance"] for hit in each] for each in hits], np.float32)

    return run
