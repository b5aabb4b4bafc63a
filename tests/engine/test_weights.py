"""Attention weights where keys lie: unaligned, as in an index, or not, for few queries and many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.memory import shards, weights
from dualform.engine.memory.exact import error_bound


def unaligned(keys: np.ndarray) -> torch.Tensor:
    """The same rows behind a header of 45 bytes, as a FAISS file has them."""
    memory = bytearray(45) + bytearray(keys.tobytes())
    rows = torch.frombuffer(memory, dtype=torch.float32, count=keys.size, offset=45)
    assert rows.data_ptr() % 4
    return rows.view(keys.shape)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 17])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_weight_is_within_its_bound(
    queries: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1 << 10)  # by row, and several threads take part
    rng = np.random.default_rng(queries)
    asked = torch.from_numpy(rng.standard_normal((queries, 33), dtype=np.float32))
    keys = rng.standard_normal((501, 33), dtype=np.float32)
    exact = asked.double().numpy() @ keys.astype(np.float64).T
    bound = error_bound(33, asked.double().norm(dim=1), float(np.linalg.norm(keys, axis=1).max()))
    held = torch.from_numpy(keys) if aligned else unaligned(keys)
    found = weights.tile_weights(asked, held, wide=False)
    assert found.dtype == torch.float32
    assert (np.abs(found.double().numpy() - exact) <= bound[:, None].numpy()).all()
    wide = weights.tile_weights(asked, held, wide=True).numpy()
    np.testing.assert_allclose(wide, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", [1, 3])
def test_answers_are_the_same_without_faiss(
    queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((700, 20), dtype=np.float32)
    asked = rng.standard_normal((queries, 20), dtype=np.float32)
    path = make_index(tmp_path, keys, None, shard_rows=301, example=np.arange(700) % 90)
    found = []
    for in_place in (True, False):
        for module in (weights, shards):
            monkeypatch.setattr(module, "reads_in_place", lambda there=in_place: there)
        with Index.open(path, device="cpu", use_faiss=False) as index:
            hits = index.top_k("fc", asked, 9, strategy="scan")
            sums = index.sums("fc", asked, "example", absolute=True, strategy="scan")
            found.append((hits.rows, hits.scores, sums.values))
    for one, other in zip(found[0][:2], found[1][:2], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-6)
