"""Rules 2 and 3: the same rows, order and scores, however the memory and the work are split."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from synthetic import make_index

import dualform.index.plan as index_plan
import dualform.index.sketch as index_sketch
from dualform.engine import Index
from dualform.engine.devices import flat as engine_flat
from dualform.engine.errors import CancelledError
from dualform.engine.memory import shards as engine_shards
from dualform.engine.topk import scoring as engine_scoring
from dualform.engine.topk import top_k as engine_top_k
from dualform.questions.questions import TopKQuestion

ORDERS = ("largest", "smallest", "absolute")


@st.composite
def memories(draw: st.DrawFn) -> dict[str, object]:
    """A small memory full of ties, near-ties, zeros, and norms from tiny to huge."""
    rows, d = draw(st.integers(1, 60)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["integers", "normal", "near-ties", "scales", "low rank"]))
    if kind == "integers":
        keys = rng.integers(-2, 3, (rows, d)).astype(np.float32)
    elif kind == "normal":
        keys = rng.standard_normal((rows, d)).astype(np.float32)
    elif kind == "low rank":
        keys = np.outer(rng.integers(-3, 4, rows), rng.standard_normal(d)).astype(np.float32)
    elif kind == "near-ties":
        keys = (1 + rng.integers(-2, 3, (rows, d)) * 2.0**-23).astype(np.float32)
    else:
        scale = 10.0 ** rng.integers(-44, 38, (rows, 1))
        keys = (rng.standard_normal((rows, d)) * scale).astype(np.float32)
    keys[rng.random(rows) < 0.1] = 0
    if draw(st.booleans()):
        keys[rng.random(rows) < 0.1, 0] = rng.choice([np.nan, np.inf, -np.inf])
    queries = np.concatenate(
        [keys[rng.integers(0, rows, 2)], np.zeros((1, d)), rng.standard_normal((1, d))]
    ).astype(np.float32)
    return {
        "keys": keys,
        "queries": queries[np.isfinite(queries).all(axis=1)],
        "label": rng.integers(0, 3, rows).tolist(),
        "k": draw(st.sampled_from([1, 2, 5, 100])),
        "order": draw(st.sampled_from(ORDERS)),
        "many": draw(st.sampled_from([1, 3, 1000])),
        "shard_rows": draw(st.sampled_from([1, 7, 1000])),
        "tile": draw(st.sampled_from([4, 1 << 22])),
        "faiss": draw(st.booleans()),
        "products": draw(st.sampled_from([30, 1 << 31])),
        "directions": draw(st.sampled_from([0, 1, 2])),
        "threads": draw(st.sampled_from([1, 2])),
    }


@settings(max_examples=count(20, 3000), deadline=None)
@given(memories())
def test_any_split_equals_rational_arithmetic(case: dict) -> None:
    keys, queries, k, order = case["keys"], case["queries"], case["k"], case["order"]
    finite = np.isfinite(keys).all(axis=1)
    scores = reference.exact_scores(np.where(finite[:, None], keys, 0), queries)
    label = np.array(case["label"])
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shards, "TILE_BYTES", case["tile"])
        patch.setattr(index_plan, "MIN_D_IN", 1 if case["directions"] else 1 << 30)
        patch.setattr(index_sketch, "DIRECTIONS", case["directions"])
        patch.setattr(engine_top_k, "COMPRESS_AT", 16)
        patch.setattr(engine_top_k, "RESCORE_ROWS", 8)
        patch.setattr(engine_scoring, "MANY_KEYS", case["many"])
        patch.setattr(engine_scoring, "KEYS_TOGETHER", 5)
        patch.setattr(engine_flat, "PRODUCTS", case["products"])
        patch.setattr(engine_flat, "_ROWS_PER_HIT", 0)
        patch.setattr(torch, "get_num_threads", lambda: case["threads"])
        path = make_index(
            Path(directory), keys, None, shard_rows=case["shard_rows"], label=case["label"]
        )
        with Index.open(path, device="cpu", use_faiss=case["faiss"]) as index:
            whole = index.top_k("fc", queries, k, order=order, stop=lambda: False)
            alone = [index.top_k("fc", q[None], k, order=order) for q in queries]
            grouped = index.top_k("fc", queries, k, order=order, group_by="label")
    for i, row in enumerate(scores):
        rows, best = reference.top_k(row, k, order, finite)
        np.testing.assert_array_equal(whole.rows[i], rows)
        np.testing.assert_array_equal(whole.scores[i], best)
        np.testing.assert_array_equal(alone[i].rows[0], rows)
        np.testing.assert_array_equal(alone[i].scores[0], best)
        for g, value in enumerate(grouped.groups.to_pylist()):
            rows, best = reference.top_k(row, k, order, finite & (label == value))
            np.testing.assert_array_equal(grouped.rows[i, g], rows)
            np.testing.assert_array_equal(grouped.scores[i, g], best)
    assert whole.coverage.nonfinite == np.count_nonzero(~finite)
    assert whole.coverage.rows == whole.coverage.total == len(keys)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """20,000 rows of recorded kind: many exact repeats, as epochs bring."""
    rng = np.random.default_rng(3)
    distinct = np.maximum(rng.standard_normal((2500, 48)), 0).astype(np.float32)
    keys = distinct[rng.integers(0, len(distinct), 20_000)]
    path = make_index(
        tmp_path_factory.mktemp("memory"),
        keys,
        None,
        rows_per_step=128,
        shard_rows=6000,
        label=rng.integers(0, 10, len(keys)).tolist(),
    )
    return path, keys


@pytest.mark.parametrize("order", ORDERS)
def test_strategies_threads_and_batches_agree(memory: tuple[Path, np.ndarray], order: str) -> None:
    path, keys = memory
    queries = np.concatenate([keys[:70], np.zeros((2, 48), np.float32), -keys[:3]])
    threads = torch.get_num_threads()
    answers = []
    try:
        for use_faiss in (True, False):
            for count in (1, 2):
                torch.set_num_threads(count)
                with Index.open(path, device="cpu", use_faiss=use_faiss) as index:
                    answers.append(index.top_k("fc", queries, 50, order=order))
                    parts = [
                        index.top_k("fc", queries[i : i + 5], 50, order=order)
                        for i in range(0, len(queries), 5)
                    ]
                    joined = np.concatenate([part.rows for part in parts])
                    np.testing.assert_array_equal(joined, answers[0].rows)
                    # A single query goes over shards in threads.
                    apply = ["scan"]  # keys this short have no sketches
                    if use_faiss and order != "absolute":
                        apply.append("flat")
                    for strategy in apply:
                        for i in (0, 71, 74):
                            alone = index.top_k(
                                "fc", queries[i : i + 1], 50, order=order, strategy=strategy
                            )
                            np.testing.assert_array_equal(alone.rows[0], answers[0].rows[i])
                            np.testing.assert_array_equal(alone.scores[0], answers[0].scores[i])
    finally:
        torch.set_num_threads(threads)
    for answer in answers:
        np.testing.assert_array_equal(answer.rows, answers[0].rows)
        np.testing.assert_array_equal(answer.scores, answers[0].scores)
    # Against float64, which resolves all but ties: those it orders by row id, stably.
    scores = (queries.astype(np.float64) @ keys.T.astype(np.float64)).astype(np.float32) + 0
    merit = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
    expected = np.argsort(-merit, axis=1, kind="stable")[:, :50]
    np.testing.assert_array_equal(answers[0].rows, expected)


def test_k_does_not_change_the_order_of_ties(memory: tuple[Path, np.ndarray]) -> None:
    path, keys = memory
    with Index.open(path, device="cpu") as index:
        long = index.top_k("fc", keys[:4], 300).rows
        for k in (1, 3, 17, 128):
            np.testing.assert_array_equal(index.top_k("fc", keys[:4], k).rows, long[:, :k])


def test_reduced_precision_set_by_the_process_changes_nothing(
    memory: tuple[Path, np.ndarray],
) -> None:
    path, keys = memory
    with Index.open(path, device="cpu", use_faiss=False) as index:
        before = index.top_k("fc", keys[:8], 20)
        torch.set_float32_matmul_precision("medium")
        try:
            after = index.top_k("fc", keys[:8], 20)
        finally:
            torch.set_float32_matmul_precision("highest")
    np.testing.assert_array_equal(before.rows, after.rows)
    np.testing.assert_array_equal(before.scores, after.scores)


def test_columns_come_with_the_rows(memory: tuple[Path, np.ndarray]) -> None:
    path, keys = memory
    with Index.open(path, device="cpu") as index:
        hits = index.top_k("fc", keys[:2], 5, group_by="label")
        assert hits.rows.shape == (2, 10, 5)
        labels = np.array(hits.columns["label"].to_pylist()).reshape(hits.rows.shape)
        steps = np.array(hits.columns["step"].to_pylist()).reshape(hits.rows.shape)
    np.testing.assert_array_equal(
        labels, np.broadcast_to(np.arange(10)[None, :, None], labels.shape)
    )
    np.testing.assert_array_equal(steps, hits.rows // 128)


@pytest.mark.parametrize("distinct", [None, "example"])
def test_candidates_are_sorted_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distinct: str | None
) -> None:
    """At first every row of a tile is one, and who gives up waits for the sorting of all."""
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((n, 8)).astype(np.float32) for n in (20_000, 64))
    path = make_index(tmp_path, keys, None, example=[*range(20_000)])
    sorted_at_once: list[int] = []
    by_cell = engine_top_k._by_cell

    def counted(cells: np.ndarray, merits: np.ndarray) -> np.ndarray:
        sorted_at_once.append(len(cells))
        return by_cell(cells, merits)

    monkeypatch.setattr(engine_top_k, "_by_cell", counted)
    with Index.open(path, device="cpu") as index:
        found = index.top_k("fc", queries, 100, distinct=distinct, strategy="scan")
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T
    np.testing.assert_array_equal(found.rows, np.argsort(-scores, axis=1)[:, :100])
    assert sum(sorted_at_once) > 64 * 20_000 / 2
    assert max(sorted_at_once) <= 2 * engine_top_k.COMPRESS_AT


def test_giving_up_stops_faiss_and_exact_scores_midway(memory: tuple[Path, np.ndarray]) -> None:
    """However long they take in all, a caller who gives up waits for a piece of them."""
    path, keys = memory
    queries = keys[:64]
    for k, strategy in ((5, "flat"), (2000, "scan")):
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > most  # noqa: B023

        with Index.open(path, device="cpu") as index, pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_flat, "PRODUCTS", 1 << 20)
            most = 10**9
            question = TopKQuestion("fc", queries, k, strategy=strategy)
            index.ask(question, stop)
            whole, most = asked, asked - 2
            assert whole > 20
            asked = 0
            with pytest.raises(CancelledError):
                index.ask(question, stop)


@pytest.mark.parametrize("k", [1, 42, 532, 2080])
@pytest.mark.parametrize("queries", [1, 8, 64, 256])
def test_a_call_of_faiss_is_short_and_pieces_are_not_all_hits(queries: int, k: int) -> None:
    rows, together = engine_flat.piece(1 << 16, queries, 800, k)
    assert 1 <= together <= queries
    assert rows * together * 800 <= 2 * engine_flat.PRODUCTS
    assert rows >= min(1 << 16, 15 * k)
