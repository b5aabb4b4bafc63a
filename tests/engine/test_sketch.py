"""Certified pruning: the bound holds for any directions, and pruned answers are the flat scan's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.devices import flat as engine_flat
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.memory.sketch import Basis, SketchedQueries
from dualform.engine.memory.tiles import Tile
from dualform.engine.topk import scan as engine_topk
from dualform.engine.topk import scoring as engine_scoring
from dualform.engine.topk.scoring import Scores
from dualform.engine.topk.top_k import TopK
from dualform.index.sketch import leading_directions, sketch


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, queries and directions, the last orthonormal or anything."""
    d, m, rows = draw(st.integers(2, 300)), draw(st.integers(1, 8)), 40
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    keys = rng.standard_normal((rows, d)) * 10.0 ** draw(st.integers(-20, 14))
    kind = draw(st.sampled_from(["leading", "random", "in span", "scales"]))
    directions = rng.standard_normal((m, d)).astype(np.float32)
    if kind == "in span":
        keys = rng.standard_normal((rows, m)) @ directions
    if kind == "scales":
        keys *= 10.0 ** rng.integers(-25, 2, (rows, 1))
    keys = keys.astype(np.float32)
    if kind in ("leading", "in span"):
        found = leading_directions([keys])
        directions = directions if found is None else found[:m]
    queries = np.concatenate([keys[:5], rng.standard_normal((4, d)), np.zeros((1, d))])
    return keys, queries.astype(np.float32), directions


def test_the_directions_of_wide_keys_are_the_leading_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found among the rows, where the width's cube would take minutes."""
    rng = np.random.default_rng(0)
    few, d = 100, 600
    spread = 2.0 ** -np.arange(few)[:, None] * rng.standard_normal((few, d))
    keys = (rng.standard_normal((400, few)) @ spread).astype(np.float32)
    monkeypatch.setattr("dualform.index.sketch.WIDE", 512)
    for sample in ([keys], [keys[:1], keys[1:]], [keys[:7]], [np.zeros((2, d), np.float32), keys]):
        found = leading_directions(sample)
        assert found is not None
        assert found.shape == (63, d)
        np.testing.assert_allclose(found @ found.T, np.eye(63), atol=1e-5)
        whole = np.concatenate(sample).astype(np.float64)
        rest = whole - whole @ found.T.astype(np.float64) @ found
        left = np.linalg.svd(whole, compute_uv=False)[63:]
        # What the best 63 directions leave out, but for rounding to float32.
        least = np.sqrt(np.square(left).sum())
        assert np.linalg.norm(rest) <= least + 1e-6 * np.linalg.norm(whole)
    assert leading_directions([np.zeros((3, d), np.float32)]) is None


@settings(max_examples=count(100, 10_000), deadline=None)
@given(cases(), st.sampled_from(["largest", "smallest", "absolute"]))
def test_the_bound_holds(case: tuple[np.ndarray, np.ndarray, np.ndarray], order: str) -> None:
    keys, queries, directions = case
    basis = Basis(torch.from_numpy(directions))
    sketched = SketchedQueries(torch.from_numpy(queries), basis, order)
    sketches = torch.from_numpy(sketch(keys, directions))
    longest = np.linalg.norm(keys.astype(np.float64), axis=1).max()
    cut = len(keys) // 2
    parts = [(sketches, slice(cut)), (sketches, np.arange(cut, len(sketches)))]
    bounds = sketched.bounds(parts, [cut, len(sketches) - cut]) + sketched.allowance(longest)
    bounds = bounds.T.numpy()
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T
    merits = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
    # Float64 itself is off by d roundings of the absolute terms.
    size = np.abs(queries).astype(np.float64) @ np.abs(keys).astype(np.float64).T
    assert (bounds >= merits - size * 1e-13).all()


@settings(max_examples=count(40, 3000), deadline=None)
@given(cases())
def test_rho_is_at_least_the_rest(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, _, directions = case
    sketches = sketch(keys, directions).astype(np.float64)
    rest = keys - sketches[:, :-1] @ directions.astype(np.float64)
    assert (sketches[:, -1] >= np.linalg.norm(rest, axis=1) * (1 - 1e-12)).all()


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Keys of the kind that training sees: nearly low-dimensional, with repeats."""
    rng = np.random.default_rng(0)
    distinct = rng.standard_normal((2000, 20)) @ rng.standard_normal((20, 300))
    distinct = np.maximum(distinct + 0.3 * rng.standard_normal(distinct.shape), 0)
    keys = distinct[rng.integers(0, 2000, 12_000)].astype(np.float32)
    queries = np.concatenate([distinct[:6], distinct[7:10] * 0.5, np.zeros((1, 300))])
    return {
        "keys": keys,
        "queries": queries.astype(np.float32),
        "label": rng.integers(0, 5, 12_000),
    }


@pytest.fixture(scope="module")
def index(arrays: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory):
    path = make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        None,
        rows_per_step=100,
        shard_rows=2500,
        label=arrays["label"].tolist(),
    )
    with Index.open(path, device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("group_by", [None, "label", "step"])
@pytest.mark.parametrize("span", [1, 1 << 22])
def test_pruned_answers_are_the_flat_scans(
    index: Index,
    arrays: dict[str, np.ndarray],
    order: str,
    group_by: str | None,
    span: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_topk, "SPAN", span)
    layer = index.layers["fc"]
    assert layer.basis is not None
    for k in (1, 10, 200):
        for queries in (arrays["queries"], arrays["queries"][:1]):
            pruned = index.top_k("fc", queries, k, order=order, group_by=group_by)
            for strategy in ("flat", "scan", "certified"):
                if strategy == "flat" and (order == "absolute" or group_by is not None):
                    continue
                other = index.top_k(
                    "fc", queries, k, order=order, group_by=group_by, strategy=strategy
                )
                np.testing.assert_array_equal(pruned.rows, other.rows)
                np.testing.assert_array_equal(pruned.scores, other.scores)


def test_groups_are_pruned_too(index: Index, arrays: dict[str, np.ndarray]) -> None:
    queries, groups = arrays["queries"][:1], len(np.unique(arrays["label"]))
    with counted_rows() as scanned:
        index.top_k("fc", queries, 5, group_by="label", strategy="certified")
    assert groups * 5 <= sum(scanned) < 0.2 * len(arrays["keys"])


def test_a_strategy_that_does_not_apply_is_refused(
    index: Index, arrays: dict[str, np.ndarray]
) -> None:
    queries = arrays["queries"][:1]
    for ask in (
        {"order": "absolute"},
        {"group_by": "label"},
        {"distinct": "step"},
        {"k": engine_flat.MAX_K},
    ):
        with pytest.raises(InvalidArgumentError, match="'flat' does not apply") as caught:
            index.top_k("fc", queries, **{"k": 3, "strategy": "flat", **ask})
        assert caught.value.field == "strategy"
    with pytest.raises(InvalidArgumentError, match="'device', 'distinct_keys', 'flat', 'scan'"):
        index.top_k("fc", queries, 3, strategy="fast")  # type: ignore[arg-type]
    with (
        Index.open(index.path, device="cpu", use_faiss=False) as torch_alone,
        pytest.raises(InvalidArgumentError, match="torch alone"),
    ):
        torch_alone.top_k("fc", queries, 3, strategy="flat")


def test_most_rows_are_never_read(index: Index, arrays: dict[str, np.ndarray]) -> None:
    with counted_rows() as scanned:
        index.top_k("fc", arrays["queries"][:1], 10)
    assert sum(scanned) < 0.1 * len(arrays["keys"])


@pytest.mark.parametrize("where", ["step = 7", "label = 3", "step < 30 and label != 2"])
@pytest.mark.parametrize("group_by", [None, "label"])
def test_a_filter_leaves_only_its_rows_to_sketches(
    index: Index,
    arrays: dict[str, np.ndarray],
    where: str,
    group_by: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    original = SketchedQueries.bounds

    def counting(self: SketchedQueries, parts: Any, rows: list[int]) -> torch.Tensor:
        bounds = original(self, parts, rows)
        asked.append(len(bounds))
        return bounds

    monkeypatch.setattr(SketchedQueries, "bounds", counting)
    chosen = parse_filter(where)
    for queries in (arrays["queries"], arrays["queries"][:1]):
        asked.clear()
        pruned, scanned = (
            index.top_k("fc", queries, 7, where=chosen, group_by=group_by, strategy=strategy)
            for strategy in ("certified", "scan")
        )
        np.testing.assert_array_equal(pruned.rows, scanned.rows)
        np.testing.assert_array_equal(pruned.scores, scanned.scores)
        assert sum(asked) == pruned.coverage.rows < len(arrays["keys"]) / 2


@pytest.mark.parametrize(("queries", "k"), [(10, 300), (10, 1500), (1, 5000)])
def test_few_keys_are_held_while_rows_are_scored(
    index: Index,
    arrays: dict[str, np.ndarray],
    queries: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored: list[int] = []
    original = Scores._score

    def counting(self: Scores, part: Any, which: np.ndarray, *rest: Any) -> None:
        scored.append(len(which))
        original(self, part, which, *rest)

    monkeypatch.setattr(Scores, "_score", counting)
    index.top_k("fc", arrays["queries"][:queries], k, strategy="scan")
    assert sum(scored) >= queries * k
    assert max(scored) <= engine_scoring.KEYS_TOGETHER


def test_queries_too_long_for_float32_projections(tmp_path: Path) -> None:
    # |q| is beyond float32's range, though no product with a key comes near its end.
    rng, d = np.random.default_rng(0), 256
    plane = np.stack([np.ones(d), np.tile([1.0, -1.0], d // 2)])
    keys = 1e-5 * rng.standard_normal((3000, 2)) @ plane + 1e-8 * rng.standard_normal((3000, d))
    long = np.where(np.arange(d) % 2 == 0, 3.4e38, 0.0)
    queries = np.stack([long, rng.standard_normal(d)]).astype(np.float32)
    path = make_index(tmp_path, keys.astype(np.float32), None, shard_rows=1000)
    with Index.open(path, device="cpu") as index:
        for order in ("largest", "smallest", "absolute"):
            scanned = index.top_k("fc", queries, 10, order=order, strategy="scan")
            for strategy in ("certified", "auto"):
                other = index.top_k("fc", queries, 10, order=order, strategy=strategy)
                np.testing.assert_array_equal(other.rows, scanned.rows)
                np.testing.assert_array_equal(other.scores, scanned.scores)
    exact = queries.astype(np.float64) @ keys.astype(np.float32).astype(np.float64).T
    best = np.argsort(-np.abs(exact), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(other.rows, best)


@contextmanager
def counted_rows() -> Iterator[list[int]]:
    """How many rows each tile has that is multiplied with the queries."""
    scanned: list[int] = []
    original = TopK.update

    def counting(self: TopK, tile: Tile, *rest: Any) -> None:
        scanned.append(len(tile.positions))
        original(self, tile, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopK, "update", counting)
        yield scanned


def test_isotropic_keys_fall_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((6000, 256)).astype(np.float32)
    path = make_index(tmp_path, keys, None, shard_rows=1000)
    with Index.open(path, device="cpu") as index, pytest.MonkeyPatch.context() as patch:
        asked = []
        original = engine_topk.Scan._scan_pruned

        def counting(self: engine_topk.Scan, *given: object) -> int:
            asked.append(1)
            return original(self, *given)  # type: ignore[arg-type]

        patch.setattr(engine_topk.Scan, "_scan_pruned", counting)
        patch.setattr(engine_topk, "SPAN", 4 * 1000)  # a shard by itself
        queries = rng.standard_normal((4, 256)).astype(np.float32)
        hits = index.top_k("fc", queries, 10)
        assert len(asked) == 1
    expected = np.argsort(-(queries.astype(np.float64) @ keys.T), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(hits.rows, expected)
