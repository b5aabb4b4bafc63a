"""Top-k by distinct keys: the rows, order and scores of rational arithmetic, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_read import rows_read
from soak.counts import count
from synthetic import make_index

import dualform.index.plan as index_plan
import dualform.index.sketch as index_sketch
from dualform.engine import Index
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.topk import distinct_keys
from dualform.store.files import write_atomic
from dualform.v1 import attribution_pb2 as pb

ORDERS = ("largest", "smallest", "absolute")


def at_least(column: str, number: int) -> pb.Filter:
    value = pb.Value(int64_value=number)
    return pb.Filter(
        comparison=pb.Comparison(column=column, operator=pb.OPERATOR_GE, values=[value])
    )


@st.composite
def memories(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of few keys, which come again or not, tie, nearly tie, and are sometimes not finite."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    distinct, d = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    rows = 2 * distinct + draw(st.integers(0, 40))
    if draw(st.booleans()):
        keys = rng.integers(-2, 3, (distinct, d)).astype(np.float32)
    else:
        keys = (1 + rng.integers(-2, 3, (distinct, d)) * 2.0**-23).astype(np.float32)
    if draw(st.booleans()):
        keys[rng.random(distinct) < 0.2, 0] = rng.choice([np.nan, np.inf])
    named = {key.tobytes(): int(rng.integers(0, 3)) for key in keys}
    # A few keys have most of the rows: then the first guess of how many keys are needed is wrong.
    share = rng.random(distinct) ** draw(st.sampled_from([0, 4]))
    which = rng.choice(distinct, rows, p=share / share.sum())
    queries = np.concatenate(
        [np.nan_to_num(keys[:2]), np.zeros((1, d)), rng.standard_normal((1, d))]
    )
    queries[~np.isfinite(queries) | (np.abs(queries) > 1e3)] = 1
    return {
        "keys": keys[which],
        "queries": queries.astype(np.float32),
        "label": np.array([named[key.tobytes()] for key in keys[which]]),
        "user": rng.integers(0, 3, rows),
        "k": draw(st.sampled_from([1, 2, 5, 30, 100])),
        "order": draw(st.sampled_from(ORDERS)),
        "shard_rows": draw(st.sampled_from([1, 7, 1000])),
        "directions": draw(st.sampled_from([0, 1])),
        "more": draw(st.sampled_from([0.1, 1.5])),
        "from_user": draw(st.sampled_from([None, 1, 2, 3])),
    }


@settings(max_examples=count(25, 2000), deadline=None)
@given(memories())
def test_equals_rational_arithmetic(case: dict[str, Any]) -> None:
    keys, queries, k, order = case["keys"], case["queries"], case["k"], case["order"]
    finite = np.isfinite(keys).all(axis=1)
    scores = reference.exact_scores(np.where(finite[:, None], keys, 0), queries)
    label, user, start = case["label"], case["user"], case["from_user"]
    where = None if start is None else at_least("user", start)
    allowed = finite if start is None else finite & (user >= start)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_plan, "MIN_D_IN", 1 if case["directions"] else 1 << 30)
        patch.setattr(index_sketch, "DIRECTIONS", case["directions"])
        patch.setattr(distinct_keys, "_MORE_KEYS", case["more"])
        path = make_index(
            Path(directory),
            keys,
            None,
            shard_rows=case["shard_rows"],
            label=label.tolist(),
            user=user.tolist(),
        )
        with Index.open(path, device="cpu") as index:
            ask: dict[str, Any] = {"order": order, "where": where, "strategy": "distinct_keys"}
            whole = index.top_k("fc", queries, k, **ask)
            grouped = index.top_k("fc", queries, k, group_by="label", **ask)
            distinct = index.top_k("fc", queries, k, distinct="label", **ask)
            other = index.top_k("fc", queries, k, distinct="label", order=order, where=where)
    for i, row in enumerate(scores):
        rows, best = reference.top_k(row, k, order, allowed)
        np.testing.assert_array_equal(whole.rows[i], rows)
        np.testing.assert_array_equal(whole.scores[i], best)
        for g, value in enumerate(grouped.groups.to_pylist()):
            rows, best = reference.top_k(row, k, order, allowed & (label == value))
            np.testing.assert_array_equal(grouped.rows[i, g], rows)
            np.testing.assert_array_equal(grouped.scores[i, g], best)
        rows, best = reference.top_k(row, len(keys), order, allowed)
        rows = rows[rows >= 0]
        first = np.sort(np.unique(label[rows], return_index=True)[1])[:k]
        np.testing.assert_array_equal(distinct.rows[i, : len(first)], rows[first])
        assert (distinct.rows[i, len(first) :] == -1).all()
    np.testing.assert_array_equal(distinct.rows, other.rows)
    np.testing.assert_array_equal(distinct.scores, other.scores)
    np.testing.assert_array_equal(distinct.counts, other.counts)


EPOCHS, DISTINCT, D = 12, 400, 256


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    which = np.concatenate([rng.permutation(DISTINCT) for _ in range(EPOCHS)])
    return {
        "which": which,
        "keys": rng.standard_normal((DISTINCT, D)).astype(np.float32)[which],
        "queries": rng.standard_normal((40, D)).astype(np.float32),
        "label": rng.integers(0, 4, DISTINCT)[which],
        "user": rng.integers(0, 50, len(which)),
    }


@pytest.fixture
def index(arrays: dict[str, np.ndarray], tmp_path: Path) -> Any:
    columns = {name: arrays[name].tolist() for name in ("label", "user")}
    path = make_index(tmp_path, arrays["keys"], None, rows_per_step=50, shard_rows=1000, **columns)
    with Index.open(path, device="cpu") as opened:
        yield opened


def test_one_row_of_each_key_is_read(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = arrays["queries"]
    plan = index.top_k("fc", queries, 20).plan
    assert plan.strategy == "distinct_keys"
    assert plan.reason == "400 distinct keys stand for 4,800 rows"
    scan = lambda: index.top_k("fc", queries, 20, strategy="distinct_keys")  # noqa: E731
    assert rows_read(monkeypatch, scan) <= 3 * DISTINCT


def test_all_strategies_agree(index: Index, arrays: dict[str, np.ndarray]) -> None:
    for where in (None, at_least("step", 20), at_least("user", 49)):
        hits = [
            index.top_k("fc", arrays["queries"], 30, where=where, strategy=strategy)
            for strategy in ("distinct_keys", "certified", "scan", "auto")
        ]
        for other in hits[1:]:
            np.testing.assert_array_equal(other.rows, hits[0].rows)
            np.testing.assert_array_equal(other.scores, hits[0].scores)
            assert other.columns == hits[0].columns
            assert other.coverage == hits[0].coverage


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"group_by": "user"}, "rows with the same key differ in the column of group_by"),
        ({"distinct": "user"}, "rows with the same key differ in the column of distinct"),
    ],
)
def test_refuses_what_differs_among_equal_keys(
    index: Index, arrays: dict[str, np.ndarray], asked: dict[str, str], words: str
) -> None:
    assert index.top_k("fc", arrays["queries"], 3, **asked).plan.strategy != "distinct_keys"
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        index.top_k("fc", arrays["queries"], 3, strategy="distinct_keys", **asked)
    assert caught.value.field == "strategy"


def test_keys_that_never_come_again(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)
    with Index.open(make_index(tmp_path, keys, None), device="cpu") as index:
        assert index.top_k("fc", keys[:1], 3).plan.strategy != "distinct_keys"
        with pytest.raises(InvalidArgumentError, match="does not know which keys"):
            index.top_k("fc", keys[:1], 3, strategy="distinct_keys")


def test_a_damaged_file_costs_the_strategy_alone(
    index: Index, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "index/layers/fc/equal.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    write_atomic(path, bytes(data))
    with Index.open(tmp_path / "index", device="cpu") as opened:
        assert opened.top_k("fc", arrays["queries"], 3).plan.strategy != "distinct_keys"
        with pytest.raises(InvalidArgumentError, match="digest"):
            opened.top_k("fc", arrays["queries"], 3, strategy="distinct_keys")
