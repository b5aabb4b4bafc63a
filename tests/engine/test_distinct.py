"""Top-k of distinct values: the best row of each value, by exact arithmetic, however split."""

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

import dualform.index.plan as index_plan
import dualform.index.sketch as index_sketch
from dualform.engine import Index
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.memory import shards as engine_shards
from dualform.engine.topk import top_k as engine_top_k
from dualform.v1 import attribution_pb2 as pb


def best_of_each(
    scores: np.ndarray, k: int, order: str, allowed: np.ndarray, values: list[object]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, scores and counts [k] of one query: sort all rows, keep each value's first."""
    rows, ranked = reference.top_k(scores, len(scores), order, allowed)
    kept: list[int] = []
    seen = set()
    for place, row in enumerate(rows):
        value = values[row] if row >= 0 else None
        if row >= 0 and (value is None or value not in seen):
            seen.add(value)
            kept.append(place)
    kept = kept[:k]
    out_rows, out_scores = np.full(k, -1), np.full(k, np.nan, np.float32)
    counts = np.zeros(k, int)
    out_rows[: len(kept)], out_scores[: len(kept)] = rows[kept], ranked[kept]
    for place, row in enumerate(rows[kept]):
        same = [t for t in np.flatnonzero(allowed) if values[t] == values[row]]
        counts[place] = 1 if values[row] is None else len(same)
    return out_rows, out_scores, counts


@st.composite
def memories(draw: st.DrawFn) -> dict[str, object]:
    """Examples that come several times, with the same key or another, some without an id."""
    rows, d = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    examples = draw(st.sampled_from([1, 3, 20, 200]))
    example = rng.integers(0, examples, rows)
    keys = rng.integers(-2, 3, (rows, d)).astype(np.float32)
    if draw(st.booleans()):  # the same key each time, as the first layer sees it
        keys = rng.standard_normal((examples, d)).astype(np.float32)[example]
    ids: list[object] = example.tolist()
    if draw(st.booleans()):
        ids = [None if step % 3 == 1 else ids[t] for t in range(rows) for step in [t // 7]]
    return {
        "keys": keys,
        "queries": np.concatenate([keys[:2], np.zeros((1, d)), rng.standard_normal((1, d))]).astype(
            np.float32
        ),
        "example": ids,
        "label": rng.integers(0, 3, rows).tolist(),
        "k": draw(st.sampled_from([1, 2, 5, 100])),
        "order": draw(st.sampled_from(["largest", "smallest", "absolute"])),
        "shard_rows": draw(st.sampled_from([7, 1000])),
        "faiss": draw(st.booleans()),
        "directions": draw(st.sampled_from([0, 1, 2])),
    }


@settings(max_examples=count(30, 3000), deadline=None)
@given(memories())
def test_any_split_keeps_the_best_row_of_each_value(case: dict) -> None:
    keys, k, order = case["keys"], case["k"], case["order"]
    label, example = np.array(case["label"]), case["example"]
    where = pb.Filter(
        comparison=pb.Comparison(
            column="label", operator=pb.OPERATOR_LE, values=[pb.Value(int64_value=1)]
        )
    )
    scores = reference.exact_scores(keys, case["queries"])
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shards, "TILE_BYTES", 4)
        patch.setattr(index_plan, "MIN_D_IN", 1 if case["directions"] else 1 << 30)
        patch.setattr(index_sketch, "DIRECTIONS", case["directions"])
        patch.setattr(engine_top_k, "COMPRESS_AT", 16)
        patch.setattr(engine_top_k, "RESCORE_ROWS", 8)
        columns = {"label": case["label"], "example": example}
        if any(value is None for value in example):
            columns["example"] = [None if value is None else str(value) for value in example]
        path = make_index(Path(directory), keys, None, shard_rows=case["shard_rows"], **columns)
        with Index.open(path, device="cpu", use_faiss=case["faiss"]) as index:
            ask = {"order": order, "distinct": "example"}
            whole = index.top_k("fc", case["queries"], k, **ask)
            some = index.top_k("fc", case["queries"], k, where=where, **ask)
            grouped = index.top_k("fc", case["queries"], k, group_by="label", **ask)
    everything = np.ones(len(keys), bool)
    for i, row in enumerate(scores):
        for hits, allowed in ((whole, everything), (some, label <= 1)):
            expected = best_of_each(row, k, order, allowed, example)
            for got, each in zip(
                (hits.rows[i], hits.scores[i], hits.counts[i]), expected, strict=True
            ):
                np.testing.assert_array_equal(got, each)
        for g, value in enumerate(grouped.groups.to_pylist()):
            expected = best_of_each(row, k, order, label == value, example)
            got = (grouped.rows[i, g], grouped.scores[i, g], grouped.counts[i, g])
            for one, each in zip(got, expected, strict=True):
                np.testing.assert_array_equal(one, each)


def test_contributions_of_distinct_examples(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((3000, 6)).astype(np.float32)
    values = rng.standard_normal((3000, 2)).astype(np.float32)
    example = rng.integers(0, 90, 3000)
    path = make_index(
        tmp_path, keys, values, rows_per_step=50, shard_rows=700, example=example.tolist()
    )
    query = rng.standard_normal((2, 6)).astype(np.float32)
    with Index.open(path, device="cpu") as index:
        hits = index.top_k(
            "fc", query, 20, rank_by="contribution", unit=1, at_step=40, distinct="example"
        )
    parts = 0.1 * (query.astype(np.float64) @ keys[:2000].T.astype(np.float64)) * values[:2000, 1]
    for i in range(2):
        best = np.full(90, -np.inf)
        np.maximum.at(best, example[:2000], parts[i])
        order = np.argsort(-best)[:20]
        assert example[hits.rows[i]].tolist() == order.tolist()
        np.testing.assert_allclose(hits.scores[i], best[order], rtol=1e-6)
        assert hits.counts[i].tolist() == np.bincount(example[:2000], minlength=90)[order].tolist()


def test_rows_whose_keys_are_not_finite_are_counted_and_never_ranked(tmp_path: Path) -> None:
    keys = np.array([[1.0], [np.nan], [2.0], [3.0]], np.float32)
    path = make_index(tmp_path, keys, None, example=[5, 5, 5, 6])
    with Index.open(path, device="cpu") as index:
        hits = index.top_k("fc", np.ones((1, 1), np.float32), 3, distinct="example")
        assert hits.rows.tolist() == [[3, 2, -1]]
        assert hits.counts.tolist() == [[1, 3, 0]]
        with pytest.raises(InvalidArgumentError, match="unknown column 'exampel'") as caught:
            index.top_k("fc", np.ones((1, 1), np.float32), 3, distinct="exampel")
    assert caught.value.field == "distinct"
