"""Every attention weight in row order, against rational arithmetic."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import CancelledError, FailedPreconditionError
from dualform.engine.memory import shards as engine_shards
from dualform.engine.totals import streams as engine_stream


@st.composite
def memories(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Sums near rounding boundaries, that cancel, underflow and overflow."""
    rows, d = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "near-ties", "scales", "cancelling"]))
    keys = rng.standard_normal((rows, d))
    if kind == "near-ties":
        keys = 1 + rng.integers(-2, 3, (rows, d)) * 2.0**-23
    elif kind == "scales":
        keys *= 10.0 ** rng.integers(-44, 38, (rows, 1))
    elif kind == "cancelling":
        keys[:, 0] *= 2.0**30
        keys[:, -1] = -keys[:, 0]
    queries = np.concatenate([keys[:2], np.ones((1, d)), np.zeros((1, d))])
    return {
        "keys": keys.astype(np.float32),
        "queries": queries.astype(np.float32),
        "label": rng.integers(0, 3, rows),
    }


@settings(max_examples=count(30, 3000), deadline=None)
@given(memories(), st.sampled_from([3, 1000]), st.sampled_from([1, 40, 1 << 20]))
def test_weights_are_the_nearest_float32(
    case: dict[str, np.ndarray], shard_rows: int, chunk_bytes: int
) -> None:
    keys, queries = case["keys"], case["queries"]
    expected = reference.exact_scores(keys, queries)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_stream, "TILE_BYTES", 40)
        label = case["label"].tolist()
        path = make_index(Path(directory), keys, None, shard_rows=shard_rows, label=label)
        with Index.open(path, device="cpu") as index:
            chunks = list(index.stream_weights("fc", queries, chunk_bytes=chunk_bytes))
            hits = index.top_k("fc", queries, len(keys))
    start = 0
    for chunk in chunks:
        assert chunk.start == start
        assert chunk.weights.nbytes <= max(chunk_bytes, 4 * len(queries))
        start += chunk.weights.shape[1]
    weights = np.concatenate([chunk.weights for chunk in chunks], axis=1)
    assert weights.dtype == np.float32
    assert weights.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(hits.scores, np.take_along_axis(weights, hits.rows, axis=1))


def test_weights_of_keys_that_are_not_finite(tmp_path: Path) -> None:
    keys = np.array([[1, 2], [np.nan, 1], [np.inf, 1], [3, 4]], np.float32)
    queries = np.array([[1, 1], [0, 1]], np.float32)
    with Index.open(make_index(tmp_path, keys, None), device="cpu") as index:
        (chunk,) = index.stream_weights("fc", queries)
    np.testing.assert_array_equal(chunk.weights[:, [0, 3]], [[3, 7], [2, 4]])
    assert not np.isfinite(chunk.weights[:, [1, 2]]).any()


def test_chunks_are_computed_as_they_are_taken(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((900, 8)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        asked: list[int] = []
        original = engine_shards.ShardFile.rows

        def counted(self: engine_shards.ShardFile) -> object:
            asked.append(1)
            return original(self)

        patch.setattr(engine_shards.ShardFile, "rows", counted)
        gone: list[bool] = []
        path = make_index(tmp_path, keys, None, shard_rows=300)
        index = Index.open(path, device="cpu")
        chunks = index.stream_weights("fc", keys[:1], chunk_bytes=4 * 100, stop=lambda: bool(gone))
        assert not asked
        for count in (1, 2, 3, 4):
            assert next(chunks).start == (count - 1) * 100
            assert len(asked) == count
        gone.append(True)
        with pytest.raises(CancelledError):
            next(chunks)
        assert len(asked) == 4
        chunks = index.stream_weights("fc", keys[:1], chunk_bytes=400)
        next(chunks)
        index.close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            next(chunks)
