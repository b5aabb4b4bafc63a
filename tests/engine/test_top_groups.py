"""The best groups: against sums over every row in float64, which small integers make exact."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index, TopGroups
from dualform.engine.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from dualform.engine.groups import ranked
from dualform.engine.messages import needs, responses
from dualform.engine.topk import followed_along
from dualform.questions import TopGroupsQuestion

ROWS, D_IN, D_OUT, STEP_ROWS, LR = 1200, 6, 4, 20, 0.5
ORDERS = ("largest", "smallest", "absolute")


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    """Keys, values and queries of small integers: every sum is exact, and many are equal."""
    rng = np.random.default_rng(5)
    keys = rng.integers(-3, 4, (ROWS, D_IN)).astype(np.float32)
    keys[600:] = keys[:600]
    example = [None if i % 11 == 7 else int(i) for i in rng.integers(0, 300, ROWS)]
    return {
        "keys": keys,
        "values": rng.integers(-2, 3, (ROWS, D_OUT)).astype(np.float32),
        "queries": np.concatenate([keys[:6], np.zeros((1, D_IN), np.float32)]),
        "direction": rng.integers(-3, 4, (7, D_OUT)).astype(np.float32),
        "label": [None if i % 9 == 4 else i % 5 for i in range(ROWS)],
        "example": example,
        "word": [None if i is None else f"no. {i % 70}" for i in example],
    }


@pytest.fixture(scope="module", params=[64, 1 << 16])
def index(arrays: dict[str, Any], request, tmp_path_factory: pytest.TempPathFactory):
    path = make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        arrays["values"],
        rows_per_step=STEP_ROWS,
        shard_rows=request.param,
        lr=LR,
        **{name: arrays[name] for name in ("label", "example", "word")},
    )
    with Index.open(path, device="cpu") as opened:
        yield opened


def brute(
    terms: np.ndarray, column: list[Any], allowed: np.ndarray, k: int, order: str
) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Groups, sums and counts of one query, k long, by adding up every row and sorting all."""
    sums: dict[Any, list[float]] = {}
    for term, value, taken in zip(terms.tolist(), column, allowed, strict=True):
        if taken:
            sums.setdefault(value, []).append(term)
    sign = {"largest": 1, "smallest": -1, "absolute": 0}[order]

    def merit(total: float) -> float:
        return sign * total if sign else abs(total)

    totals = {value: math.fsum(each) for value, each in sums.items()}
    best = sorted(totals, key=lambda v: (-merit(totals[v]), v is None, v or type(v)()))[:k]
    missing = k - len(best)
    scores = [totals[value] for value in best] + [np.nan] * missing
    counts = [len(sums[value]) for value in best] + [0] * missing
    return best + [None] * missing, np.array(scores), np.array(counts)


def check(found: TopGroups, terms: np.ndarray, column: list[Any], allowed: np.ndarray, order: str):
    k = found.scores.shape[1]
    groups = found.groups.to_pylist()
    for i, row in enumerate(terms):
        names, scores, counts = brute(row, column, allowed, k, order)
        assert groups[i * k : (i + 1) * k] == names
        np.testing.assert_array_equal(found.scores[i], scores)
        np.testing.assert_array_equal(found.counts[i], counts)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by", ["label", "example", "word", "step"])
def test_weights_by_every_strategy(index: Index, arrays: dict[str, Any], by: str, order: str):
    column = (np.arange(ROWS) // STEP_ROWS).tolist() if by == "step" else arrays[by]
    terms = arrays["queries"].astype(np.float64) @ arrays["keys"].T.astype(np.float64)
    some = np.array([v is not None and v % 2 == 0 for v in arrays["label"]])
    for where, allowed in ((None, np.ones(ROWS, bool)), ("label in (0, 2, 4)", some)):
        ask = {"where": None if where is None else parse_filter(where), "order": order}
        for k in (1, 7, 400):
            found = index.top_groups("fc", arrays["queries"], by, k, **ask)
            check(found, terms, column, allowed, order)
            assert found.coverage.rows == allowed.sum()
        for strategy in ("scan", "distinct_keys"):
            found = index.top_groups("fc", arrays["queries"], by, 7, strategy=strategy, **ask)
            assert found.plan.strategy == strategy
            check(found, terms, column, allowed, order)


@pytest.mark.parametrize("at_step", [None, 0, 7])
@pytest.mark.parametrize("order", ORDERS)
def test_contributions_to_a_unit_and_along_directions(
    index: Index, arrays: dict[str, Any], order: str, at_step: int | None
) -> None:
    allowed = np.arange(ROWS) // STEP_ROWS < (index.steps if at_step is None else at_step)
    weights = arrays["queries"].astype(np.float64) @ arrays["keys"].T.astype(np.float64)
    values = arrays["values"].astype(np.float64)
    ask = {"rank_by": "contribution", "order": order, "at_step": at_step}
    for by in ("label", "example"):
        along = arrays["direction"].astype(np.float64) @ values.T
        direction = arrays["direction"]
        found = index.top_groups("fc", arrays["queries"], by, 9, direction=direction, **ask)
        check(found, LR * weights * along, arrays[by], allowed, order)
        found = index.top_groups("fc", arrays["queries"], by, 9, unit=2, **ask)
        check(found, LR * weights * values[:, 2], arrays[by], allowed, order)
        odd = {"where": parse_filter("label = 1 or label = 3"), **ask}
        found = index.top_groups("fc", arrays["queries"], by, 9, unit=2, **odd)
        some = allowed & np.array([v in (1, 3) for v in arrays["label"]])
        check(found, LR * weights * values[:, 2], arrays[by], some, order)


def test_key_sums_answer_by_label(index: Index, arrays: dict[str, Any]) -> None:
    found = index.top_groups("fc", arrays["queries"], "label", 3)
    assert found.plan.strategy == "key_sums"
    for strategy in ("key_sums", "distinct_keys"):
        with pytest.raises(InvalidArgumentError, match="depends on its value") as caught:
            index.top_groups("fc", arrays["queries"], "label", 3, strategy=strategy,
                             rank_by="contribution", unit=0)  # fmt: skip
        assert caught.value.field == "strategy"


def test_blocks_of_queries_are_answered_alike(
    index: Index, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"rank_by": "contribution", "direction": arrays["direction"]},
    ]
    whole = [index.top_groups("fc", arrays["queries"], "example", 5, **way) for way in ways]
    monkeypatch.setattr(ranked, "TOTAL_BYTES", 8 * 301 * 3)
    for way, expected in zip(ways, whole, strict=True):
        found = index.top_groups("fc", arrays["queries"], "example", 5, **way)
        assert found.groups.equals(expected.groups)
        np.testing.assert_array_equal(found.scores, expected.scores)


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def trained(request: pytest.FixtureRequest):
    """Digits: biases, several layers, shards; momentum, or each step's own metric."""
    path = request.getfixturevalue("digits_index" if request.param == "sgd" else "adamw_index")
    with Index.open(path, device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at_step", [None, 23])
def test_of_a_trained_network_they_are_the_rows_and_the_outputs_sums(
    trained: Index, order: str, at_step: int | None
) -> None:
    layer, rng = trained.layers["4"], np.random.default_rng(1)
    queries = np.abs(rng.standard_normal((3, layer.d_in))).astype(np.float32)
    direction = rng.standard_normal((3, layer.d_out)).astype(np.float32)
    ask = {"rank_by": "contribution", "direction": direction, "at_step": at_step}
    k = len(layer.space.grouping("example").values)
    found = trained.top_groups("4", queries, "example", k, order=order, **ask)
    out = trained.dual_output("4", queries, group_by="example", at_step=at_step)
    assert out.groups is not None
    place = {value: number for number, value in enumerate(out.groups.to_pylist())}
    rows = trained.top_k("4", queries, layer.rows, **ask)
    of_rows = rows.columns["example"].to_pylist()
    groups = found.groups.to_pylist()
    parts = np.einsum("ngd,nd->ng", out.values.astype(np.float64), direction.astype(np.float64))
    sizes = np.einsum("ngd,nd->ng", np.abs(out.values), np.abs(direction))
    for i in range(3):
        hits, added, size = rows.scores[i].astype(np.float64), {}, {}
        for value, score in zip(of_rows[i * layer.rows : (i + 1) * layer.rows], hits, strict=True):
            if value is not None and not np.isnan(score):
                added[value] = added.get(value, 0.0) + score
                size[value] = size.get(value, 0.0) + abs(score)
        names = [value for value in groups[i * k : (i + 1) * k] if value is not None]
        assert sorted(names) == sorted(added)
        scores, merits = found.scores[i, : len(names)], found.scores[i, : len(names)]
        merits = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
        assert (np.diff(merits) <= 0).all()
        for name, score in zip(names, scores.tolist(), strict=True):
            assert abs(score - added[name]) <= 1e-6 * size[name]
            whole = parts[i, place[name]]
            assert abs(score - whole) <= 2e-6 * (sizes[i, place[name]] + size[name])


def test_a_unit_is_a_direction(trained: Index) -> None:
    layer = trained.layers["4"]
    queries = np.ones((2, layer.d_in), np.float32)
    direction = np.zeros((2, layer.d_out), np.float32)
    direction[:, 3] = 1
    ask = {"rank_by": "contribution", "where": parse_filter("label < 6")}
    ours = trained.top_groups("4", queries, "example", 20, unit=3, **ask)
    theirs = trained.top_groups("4", queries, "example", 20, direction=direction, **ask)
    assert ours.groups.equals(theirs.groups)
    np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-12)


def test_a_group_with_a_key_that_is_not_finite_is_never_ranked(tmp_path: Path) -> None:
    keys, values = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)
    keys[2, 1], values[5, 0] = np.nan, np.inf
    path = make_index(tmp_path, keys, values, example=[0, 0, 1, 1, 2, 2, 3, 3], trained=False)
    with Index.open(path, device="cpu") as index:
        queries = np.ones((1, 3), np.float32)
        found = index.top_groups("fc", queries, "example", 4)
        assert found.groups.to_pylist() == [0, 2, 3, None]
        assert found.counts.tolist() == [[2, 2, 2, 0]]
        assert (found.coverage.rows, found.coverage.nonfinite) == (8, 1)
        ask = {"rank_by": "contribution", "max_residual": math.inf}
        found = index.top_groups("fc", queries, "example", 4, unit=0, **ask)
        assert found.groups.to_pylist() == [0, 3, None, None]
        found = index.top_groups("fc", queries, "example", 4, unit=1, **ask)
        assert found.groups.to_pylist() == [0, 2, 3, None]


def test_nothing_takes_part(index: Index, arrays: dict[str, Any]) -> None:
    where = parse_filter("label = 99")
    found = index.top_groups("fc", arrays["queries"], "example", 2, where=where)
    assert found.groups.to_pylist() == [None] * 14
    assert np.isnan(found.scores).all()
    assert not found.counts.any()


@pytest.mark.slow
def test_a_million_groups(tmp_path: Path) -> None:
    """The message holds k groups, and what is held meanwhile is bounded, whatever the batch."""
    rows = 1_000_000
    rng = np.random.default_rng(0)
    keys = rng.integers(-9, 10, (rows, 3)).astype(np.float32)
    values = rng.integers(-2, 3, (rows, 1)).astype(np.float32)
    example = rng.permutation(rows)
    path = make_index(tmp_path, keys, values, rows_per_step=250_000, example=example, lr=1)
    queries = rng.integers(-9, 10, (20, 3)).astype(np.float32)
    assert ranked.block_queries(rows) < 20  # in more than one part
    for rank_by in ("weight", "contribution"):
        with Index.open(path, device="cpu") as index:
            ask = {} if rank_by == "weight" else {"rank_by": rank_by, "unit": 0}
            question = TopGroupsQuestion("fc", queries, "example", k=10, **ask)
            assert needs.of_rows(index, question) < 2 << 30
            begin = time.process_time()
            found = index.ask(question)
            # 3 s on one core; one pass in Python over the groups of each query would be a minute.
            assert time.process_time() - begin < 30
        response = responses.top_groups(question, found)
        assert response.ByteSize() < 20 * 10 * (9 + 16) + 200
        terms = queries.astype(np.float64) @ keys.T.astype(np.float64)
        terms = terms if rank_by == "weight" else terms * values[:, 0]
        for i, row in enumerate(terms):
            near = np.flatnonzero(row >= np.partition(row, rows - 10)[rows - 10])
            best = near[np.lexsort((example[near], -row[near]))][:10]
            assert found.groups.to_pylist()[10 * i : 10 * i + 10] == example[best].tolist()
            np.testing.assert_array_equal(found.scores[i], row[best])


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"by": "nothing"}, "by", "unknown column 'nothing'"),
        ({"by": ""}, "by", "the name of a metadata column is needed"),
        ({"by": "position"}, "by", "no row has a value in column 'position'"),
        ({"k": 0}, "k", "at least 1"),
        ({"order": "best"}, "order", "none of"),
        ({"rank_by": "angle"}, "rank_by", "none of"),
        ({"unit": 1}, "unit", "goes with rank_by='contribution'"),
        ({"at_step": 1}, "at_step", "goes with rank_by='contribution'"),
        ({"rank_by": "contribution"}, "unit", "needs the unit="),
        ({"rank_by": "contribution", "unit": D_OUT}, "unit", "output units 0 to 3"),
        ({"rank_by": "contribution", "unit": 0, "at_step": 999}, "at_step", "one of 0 to"),
        ({"strategy": "flat"}, "strategy", "none of"),
        ({"queries": np.ones((7, D_IN + 1), np.float32)}, "queries", "takes"),
        ({"queries": np.full((7, D_IN), np.inf, np.float32)}, "queries", "NaN or Inf"),
        ({"direction": np.ones((7, D_OUT + 1), np.float32)}, "direction", "gives outputs"),
        ({"direction": np.ones((3, D_OUT), np.float32)}, "direction", "one direction for each"),
        ({"direction": np.full((7, D_OUT), np.nan, np.float32)}, "direction", "NaN"),
        ({"direction": np.ones((7, D_OUT), np.float32), "unit": 1}, "direction", "one of the two"),
    ],
)
def test_refuses(index: Index, arrays: dict[str, Any], change: dict[str, Any], field, words):
    ask = {"queries": arrays["queries"], "by": "example", "k": 3, **change}
    if "direction" in change:
        ask["rank_by"] = "contribution"
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        index.top_groups("fc", **ask)
    assert caught.value.field == field


def test_refuses_contributions_without_values(tmp_path: Path) -> None:
    path = make_index(tmp_path, np.ones((9, 3), np.float32), None, label=list(range(9)))
    with Index.open(path, device="cpu") as index:
        queries = np.ones((1, 3), np.float32)
        assert index.top_groups("fc", queries, "label", 1).groups.to_pylist() == [0]
        with pytest.raises(FailedPreconditionError, match="values") as caught:
            index.top_groups("fc", queries, "label", 1, rank_by="contribution", unit=0)
        assert caught.value.reason == "NO_VALUES"


def test_what_would_take_too_long_is_refused(adamw_index: Path, monkeypatch) -> None:
    monkeypatch.setattr(followed_along, "MOST_PRODUCTS", 1e5)
    with Index.open(adamw_index, device="cpu") as index:
        layer = index.layers["0"]
        queries = torch.ones(1, layer.d_in).numpy()
        direction = torch.ones(1, layer.d_out).numpy()
        ask = {"rank_by": "contribution", "direction": direction}
        with pytest.raises(ResourceExhaustedError, match="metric of each output unit"):
            index.top_groups("0", queries, "example", 1, **ask)
