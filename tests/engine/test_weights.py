"""Attention weights where keys lie: unaligned, as in an index, or not, for few queries and many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.memory import weights
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
    for faiss in (True, False):
        found = weights.tile_weights(asked, held, wide=False, faiss=faiss)
        assert found.dtype == torch.float32
        assert (np.abs(found.double().numpy() - exact) <= bound[:, None].numpy()).all()
    wide = weights.tile_weights(asked, held, wide=True).numpy()
    np.testing.assert_allclose(wide, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", [1, 3])
def test_an_index_answers_by_how_it_was_opened(
    queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was opened without FAISS gives the same bits, and multiplies without it, whatever
    else is open; one with it gives the same rows and scores, and sums within the rule."""
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((700, 20), dtype=np.float32)
    asked = rng.standard_normal((queries, 20), dtype=np.float32)
    path = make_index(tmp_path, keys, None, shard_rows=301, example=np.arange(700) % 90)
    by_faiss = []
    plain = weights.inner_products

    def watched(query: np.ndarray, some: np.ndarray, out: np.ndarray) -> None:
        by_faiss.append(len(some))
        plain(query, some, out)

    monkeypatch.setattr(weights, "inner_products", watched)
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1)  # every shard is large

    def answers(index: Index) -> tuple[list[np.ndarray], int]:
        by_faiss.clear()
        hits = index.top_k("fc", asked, 9, strategy="scan")
        sums = index.sums("fc", asked, "example", absolute=True, strategy="scan")
        return [hits.rows, hits.scores, np.asarray(sums.values)], sum(by_faiss)

    with Index.open(path, device="cpu", use_faiss=False) as alone:
        before = answers(alone)
        with Index.open(path, device="cpu") as other:
            beside = answers(other)
        after = answers(alone)
    assert (before[1], beside[1], after[1]) == (0, 2 * 700 * queries, 0)
    for one, same, close in zip(before[0], after[0], beside[0], strict=True):
        np.testing.assert_array_equal(one, same)
        np.testing.assert_allclose(one, close, rtol=1e-6)
    for exact in (0, 1):
        np.testing.assert_array_equal(before[0][exact], beside[0][exact])
