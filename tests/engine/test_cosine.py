"""Rankings by cosine: against every row in float64, among keys of all lengths, and none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.errors import InvalidArgumentError
from dualform.questions import QuestionError, TopGroupsQuestion, TopKQuestion

ROWS, D = 3000, 12
ZERO, NAN, INFINITE = 5, 77, 2001


def keys() -> np.ndarray:
    rng = np.random.default_rng(3)
    found = rng.standard_normal((ROWS, D)) * 10.0 ** rng.integers(-30, 20, (ROWS, 1))
    found[100:140] = found[100] * 2.0 ** np.arange(40)[:, None]  # the same direction
    found[ZERO] = 0
    found[NAN, 3], found[INFINITE, 0] = np.nan, np.inf
    return found.astype(np.float32)


KEYS = keys()
LABELS, EXAMPLES = np.arange(ROWS) % 7, np.arange(ROWS) // 3
QUERIES = np.random.default_rng(4).standard_normal((5, D)).astype(np.float32)
QUERIES[1] *= 1e-20
QUERIES[2] = KEYS[120]
QUERIES[3] = 0
FINITE = np.isfinite(KEYS).all(axis=1)


def cosines() -> np.ndarray:
    """float64 [n, rows]; 0 where either is zero, NaN where a key is not finite."""
    x, q = KEYS.astype(np.float64), QUERIES.astype(np.float64)
    with np.errstate(all="ignore"):
        sizes = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(x, axis=1)
        found = np.where(sizes == 0, 0, q @ x.T / sizes)
    found[:, ~FINITE] = np.nan
    return found


@pytest.fixture(scope="module", params=[1 << 16, 700], ids=["one shard", "shards"])
def index(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Index]:
    path = make_index(
        tmp_path_factory.mktemp("cosine"),
        KEYS,
        np.ones((ROWS, 2), np.float32),
        rows_per_step=100,
        shard_rows=request.param,
        label=LABELS,
        example=EXAMPLES,
    )
    with Index.open(path) as opened:
        yield opened


def best(merits: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """By (merit rounded to float32, row id)."""
    rounded = merits[rows].astype(np.float32)
    return rows[np.lexsort((rows, -rounded))][:k]


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "filtered"])
def test_rows(index: Index, order: Any, some: bool) -> None:
    of = {"largest": lambda c: c, "smallest": lambda c: -c, "absolute": np.abs}[order]
    found = index.top_k("fc", QUERIES, 60, rank_by="cosine", order=order,
                        where=parse_filter("label < 3") if some else None)  # fmt: skip
    rows = np.flatnonzero(FINITE & ((LABELS < 3) | (not some)))
    for query, exact in enumerate(cosines()):
        expected = best(of(exact), rows, 60)
        got = found.rows[query]
        np.testing.assert_allclose(found.scores[query], exact[got], rtol=1e-7, atol=1e-45)
        # Cosines within a float64 rounding of one another may fall on either side of a float32's.
        np.testing.assert_allclose(of(exact)[got], of(exact)[expected], rtol=2e-7, atol=1e-45)
        assert (np.diff(of(found.scores[query])) <= 0).all()
    assert not np.isin([NAN, INFINITE], found.rows).any()


def test_what_is_zero_has_a_cosine_of_zero(index: Index) -> None:
    found = index.top_k("fc", QUERIES[3:4], 4, rank_by="cosine")
    assert found.rows.tolist() == [[0, 1, 2, 3]]
    assert found.scores.tolist() == [[0, 0, 0, 0]]
    everything = index.top_k("fc", QUERIES[:1], ROWS, rank_by="cosine")
    place = everything.rows[0].tolist().index(ZERO)
    assert everything.scores[0, place] == 0
    assert (everything.rows[0] >= 0).sum() == FINITE.sum()


def test_a_keys_own_direction_has_one_and_ties_go_by_row(index: Index) -> None:
    found = index.top_k("fc", QUERIES[2:3], 40, rank_by="cosine")
    assert found.rows.tolist() == [list(range(100, 140))]
    assert (found.scores == 1).all()
    against = index.top_k("fc", -QUERIES[2:3], 3, rank_by="cosine", order="smallest")
    assert against.rows.tolist() == [[100, 101, 102]]
    assert (against.scores == -1).all()


def test_in_groups_and_each_value_once(index: Index) -> None:
    found = index.top_k("fc", QUERIES[:1], 3, rank_by="cosine", group_by="label")
    once = index.top_k("fc", QUERIES[:1], 9, rank_by="cosine", distinct="example")
    exact = cosines()[0]
    for label in range(7):
        rows = np.flatnonzero(FINITE & (label == LABELS))
        assert found.rows[0, label].tolist() == best(exact, rows, 3).tolist()
    order = best(exact, np.flatnonzero(FINITE), ROWS)
    _, first = np.unique(EXAMPLES[order], return_index=True)
    assert once.rows[0].tolist() == order[np.sort(first)][:9].tolist()


@pytest.mark.parametrize("order", ["largest", "absolute"])
def test_groups_by_the_sum_of_their_rows(index: Index, order: Any) -> None:
    found = index.ask(
        TopGroupsQuestion("fc", QUERIES, "example", k=20, order=order, rank_by="cosine")
    )
    for query, exact in enumerate(cosines()):
        sums = np.bincount(EXAMPLES, np.nan_to_num(exact))
        sums[EXAMPLES[[NAN, INFINITE]]] = np.nan  # such a group is never ranked
        merits = np.abs(sums) if order == "absolute" else sums
        expected = np.argsort(-np.nan_to_num(merits, nan=-np.inf), kind="stable")[:20]
        np.testing.assert_allclose(found.scores[query], sums[expected], atol=3e-6)
        np.testing.assert_array_equal(found.counts[query], 3)


def test_what_does_not_apply(index: Index) -> None:
    for strategy in ("certified", "flat", "device"):
        with pytest.raises(InvalidArgumentError, match=strategy):
            index.top_k("fc", QUERIES, 3, rank_by="cosine", strategy=strategy)
    with pytest.raises(InvalidArgumentError, match="key's length"):
        index.ask(TopGroupsQuestion("fc", QUERIES, "label", rank_by="cosine", strategy="key_sums"))
    with pytest.raises(QuestionError, match="unit goes with rank_by='contribution'"):
        TopKQuestion("fc", QUERIES, rank_by="cosine", unit=1)
