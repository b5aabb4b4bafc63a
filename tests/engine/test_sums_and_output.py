"""Rules 4 and 5 on chosen memories: totals against float64, parts against the whole, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rows_read import rows_read
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import (
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from dualform.v1 import attribution_pb2 as pb

ROWS, D_IN, D_OUT, STEP_ROWS, LR = 5000, 33, 9, 50, 0.1


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "keys": rng.standard_normal((ROWS, D_IN)).astype(np.float32),
        "values": rng.standard_normal((ROWS, D_OUT)).astype(np.float32),
        "queries": rng.standard_normal((12, D_IN)).astype(np.float32),
        "label": rng.integers(0, 4, ROWS),
        "user": rng.integers(0, 900, ROWS),
    }


@pytest.fixture(scope="module", params=[600, 1 << 16])
def index(
    arrays: dict[str, np.ndarray],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
):
    columns = {name: arrays[name].tolist() for name in ("label", "user")}
    path = make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        arrays["values"],
        rows_per_step=STEP_ROWS,
        shard_rows=request.param,
        lr=LR,
        momentum=0.9,
        **columns,
    )
    with Index.open(path, device="cpu") as opened:
        yield opened


def float64_weights(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return arrays["queries"].astype(np.float64) @ arrays["keys"].T.astype(np.float64)


def momentum_coefficients(at_step: int) -> np.ndarray:
    """Closed form for constant settings: lr (1 - mu^(s - t)) / (1 - mu), per row."""
    steps = np.arange(ROWS) // STEP_ROWS
    c = LR * (1 - 0.9 ** (at_step - steps)) / (1 - 0.9)
    return np.where(steps < at_step, c, 0)


def comparison(column: str, operator: int, number: int) -> pb.Filter:
    compared = pb.Comparison(
        column=column, operator=operator, values=[pb.Value(int64_value=number)]
    )
    return pb.Filter(comparison=compared)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("column", ["label", "user", "step"])
def test_sums_match_float64(
    index: Index, arrays: dict[str, np.ndarray], column: str, absolute: bool
) -> None:
    groups = arrays[column] if column != "step" else np.arange(ROWS) // STEP_ROWS
    sums = index.sums("fc", arrays["queries"], column, absolute=absolute)
    weights = float64_weights(arrays)
    terms = np.abs(arrays["queries"]).astype(np.float64) @ np.abs(arrays["keys"]).T
    assert sums.groups.to_pylist() == np.unique(groups).tolist()
    for g, value in enumerate(np.unique(groups)):
        members = groups == value
        expected = (np.abs(weights) if absolute else weights)[:, members].sum(1)
        assert (np.abs(sums.values[:, g] - expected) <= 1e-6 * terms[:, members].sum(1)).all()
        assert sums.counts[g] == members.sum()


def test_sums_of_whole_runs_need_no_scan(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> bool:
        raise AssertionError("a tile was read")

    label = comparison("label", pb.OPERATOR_GE, 2)
    whole = index.sums("fc", arrays["queries"], "label", stop=stop)
    # Filters ask it too, so that a filter's sums show it by the rows that they read.
    filtered = lambda: index.sums("fc", arrays["queries"], "label", where=label)  # noqa: E731
    assert rows_read(monkeypatch, filtered) == 0
    kept = filtered()
    np.testing.assert_array_equal(kept.values[:, 2:], whole.values[:, 2:])
    assert not kept.values[:, :2].any()
    # Queries and keys without a sign to drop: the absolute sum is the signed one.
    assert not index.layers["fc"].nonnegative
    with pytest.raises(AssertionError, match="a tile was read"):
        index.sums("fc", arrays["queries"], "label", absolute=True, stop=stop)


def test_absolute_sums_of_keys_without_sign(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    keys, label = np.abs(arrays["keys"]), arrays["label"]
    path = make_index(tmp_path, keys, None, shard_rows=900, label=label.tolist())
    with Index.open(path, device="cpu") as index:
        assert index.layers["fc"].nonnegative
        for queries in (np.abs(arrays["queries"]), arrays["queries"]):
            sums = index.sums("fc", queries, "label", absolute=True)
            weights = np.abs(queries.astype(np.float64) @ keys.T.astype(np.float64))
            for g in range(4):
                expected = weights[:, label == g].sum(1)
                np.testing.assert_allclose(sums.values[:, g], expected, rtol=1e-6)


def test_filtered_sums(index: Index, arrays: dict[str, np.ndarray]) -> None:
    sums = index.sums(
        "fc", arrays["queries"], "label", where=comparison("step", pb.OPERATOR_LT, 30)
    )
    members = np.arange(ROWS) // STEP_ROWS < 30
    expected = [
        float64_weights(arrays)[:, members & (arrays["label"] == g)].sum(1) for g in range(4)
    ]
    np.testing.assert_allclose(sums.values, np.stack(expected, 1), rtol=0, atol=1e-3)
    assert sums.coverage.rows == members.sum() == sums.counts.sum()
    assert sums.coverage.total == ROWS


@pytest.mark.parametrize("at_step", [0, 1, 17, 99, 100])
def test_output_at_a_step(index: Index, arrays: dict[str, np.ndarray], at_step: int) -> None:
    out = index.dual_output("fc", arrays["queries"], at_step=at_step)
    state = index.state("fc", "initial")
    assert state is not None
    initial = arrays["queries"].astype(np.float64) @ state["fc.weight"].T.astype(np.float64)
    factors = float64_weights(arrays) * momentum_coefficients(at_step)
    expected = initial + factors @ arrays["values"].astype(np.float64)
    error = np.linalg.norm(out.values - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < 2e-6
    np.testing.assert_allclose(out.initial, initial, rtol=1e-6)
    assert out.coverage.rows == at_step * STEP_ROWS
    assert out.trained is None


@pytest.mark.parametrize("column", ["label", "user", "step"])
def test_parts_add_up_to_the_whole(
    index: Index, arrays: dict[str, np.ndarray], column: str
) -> None:
    whole = index.dual_output("fc", arrays["queries"]).values.astype(np.float64)
    parts = index.dual_output("fc", arrays["queries"], group_by=column)
    total = parts.values.astype(np.float64).sum(1) + parts.initial
    size = np.abs(parts.values.astype(np.float64)).sum(1)
    assert (np.abs(total - whole) <= 1e-6 * size).all()
    assert parts.counts is not None
    assert parts.counts.sum() == ROWS


def test_a_mask_that_removes_everything_leaves_the_initial_part(
    index: Index, arrays: dict[str, np.ndarray]
) -> None:
    nothing = comparison("step", pb.OPERATOR_LT, 0)
    out = index.dual_output("fc", arrays["queries"], where=nothing)
    np.testing.assert_array_equal(out.values, out.initial)
    assert out.coverage.rows == 0
    assert not index.sums("fc", arrays["queries"], "label", where=nothing).values.any()
    hits = index.top_k("fc", arrays["queries"], 3, where=nothing)
    assert (hits.rows == -1).all()
    assert np.isnan(hits.scores).all()


def test_nonfinite_keys_are_counted_and_poison_only_their_group(tmp_path: Path) -> None:
    keys = np.ones((6, 2), np.float32)
    keys[3] = [np.nan, 1]
    path = make_index(tmp_path, keys, None, label=[0, 0, 1, 1, 2, 2])
    with Index.open(path, device="cpu") as index:
        sums = index.sums("fc", np.ones((1, 2), np.float32), "label")
        np.testing.assert_array_equal(sums.values, [[4.0, np.nan, 4.0]])
        assert sums.coverage.nonfinite == 1


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        (np.zeros((1, D_IN + 1), np.float32), rf"takes \[n, {D_IN}\]"),
        (np.zeros(D_IN, np.float32), r"send \[n, d_in\]"),
        (np.zeros((1, D_IN)), "must be float32"),
        (np.zeros((0, D_IN), np.float32), "at least one"),
        (np.full((1, D_IN), np.nan, np.float32), "must be finite"),
        (np.full((1, D_IN), np.inf, np.float32), "must be finite"),
    ],
)
def test_refuses_bad_queries(index: Index, queries: np.ndarray, words: str) -> None:
    for ask in (
        lambda: index.top_k("fc", queries, 1),
        lambda: index.sums("fc", queries, "label"),
        lambda: index.dual_output("fc", queries),
    ):
        with pytest.raises(InvalidArgumentError, match=words) as caught:
            ask()
        assert caught.value.field == "queries"


def test_refuses_what_is_not_there(index: Index, arrays: dict[str, np.ndarray]) -> None:
    queries = arrays["queries"]
    with pytest.raises(NotFoundError, match="the layers are 'fc'"):
        index.top_k("nope", queries, 1)
    with pytest.raises(InvalidArgumentError, match="the columns are step") as caught:
        index.sums("fc", queries, "colour")
    assert caught.value.field == "group_by"
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        index.top_k("fc", queries, 0)
    for at_step in (-1, 101):
        with pytest.raises(InvalidArgumentError, match="0 to 100"):
            index.dual_output("fc", queries, at_step=at_step)


def test_an_index_without_values_has_no_output(tmp_path: Path) -> None:
    keys = np.ones((4, 2), np.float32)
    with Index.open(make_index(tmp_path, keys, None), device="cpu") as index:
        with pytest.raises(FailedPreconditionError, match="without values"):
            index.dual_output("fc", keys)
        assert index.top_k("fc", keys, 2).rows.tolist() == [[0, 1]] * 4


def test_a_caller_who_gave_up_stops_the_scan(index: Index, arrays: dict[str, np.ndarray]) -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    for ask in (
        lambda: index.sums("fc", arrays["queries"], "user", stop=stop),
        lambda: index.dual_output("fc", arrays["queries"], strategy="scan", stop=lambda: True),
        lambda: index.top_k("fc", arrays["queries"], 5, order="absolute", stop=lambda: True),
        lambda: index.top_k("fc", arrays["queries"], 5, stop=lambda: True),
    ):
        if len(index.layers["fc"].shards) > 1:
            with pytest.raises(CancelledError):
                ask()


def test_thread_settings_are_left_alone(index: Index, arrays: dict[str, np.ndarray]) -> None:
    before = torch.get_num_threads(), torch.random.get_rng_state()
    index.dual_output("fc", arrays["queries"])
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
