"""Ranking by contribution: against rational arithmetic, and adding up to the output."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import FailedPreconditionError, InvalidArgumentError
from dualform.engine.memory.exact import ExactDots

ROWS, D_IN, D_OUT, STEP_ROWS = 300, 6, 4, 20


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    keys[100:200] = keys[:100]
    values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    values[100:200] = values[:100]
    values[::7] = 0
    queries = np.concatenate([keys[:3], np.zeros((1, D_IN), np.float32)])
    return {"keys": keys, "values": values, "queries": queries, "label": rng.integers(0, 3, ROWS)}


@pytest.fixture(scope="module", params=[64, 1000])
def index(
    arrays: dict[str, np.ndarray],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
):
    path = make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        arrays["values"],
        rows_per_step=STEP_ROWS,
        shard_rows=request.param,
        momentum=0.9,
        label=arrays["label"].tolist(),
    )
    with Index.open(path, device="cpu") as opened:
        yield opened


def rational_scores(arrays: dict[str, np.ndarray], c: np.ndarray, unit: int) -> np.ndarray:
    """float32 [n, rows]: the dot product rounded once to float64, two float64 products, once to
    float32."""
    scores = np.zeros((len(arrays["queries"]), ROWS), np.float32)
    for i, query in enumerate(arrays["queries"]):
        for t, key in enumerate(arrays["keys"]):
            terms = (
                Fraction(float(a)) * Fraction(float(b)) for a, b in zip(query, key, strict=True)
            )
            dot = float(sum(terms, Fraction(0)))
            scores[i, t] = np.float32(c[t] * dot * float(arrays["values"][t, unit])) + np.float32(0)
    return scores


@pytest.mark.parametrize("at_step", [None, 7])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_matches_rational_arithmetic(
    index: Index, arrays: dict[str, np.ndarray], order: str, at_step: int | None
) -> None:
    end = index.steps if at_step is None else at_step
    steps = np.arange(ROWS) // STEP_ROWS
    by_step = index.ledger_coefficients("fc", end).weight.c
    c = np.where(steps < end, by_step[np.minimum(steps, end - 1)], 0)
    unit = 2
    scores = rational_scores(arrays, c, unit)
    ask = {"order": order, "rank_by": "contribution", "unit": unit, "at_step": at_step}
    for k in (1, 8, 400):
        hits = index.top_k("fc", arrays["queries"], k, **ask)
        grouped = index.top_k("fc", arrays["queries"], k, group_by="label", **ask)
        assert hits.coverage.rows == end * STEP_ROWS
        for i, row in enumerate(scores):
            rows, best = reference.top_k(row, k, order, steps < end)
            np.testing.assert_array_equal(hits.rows[i], rows)
            np.testing.assert_array_equal(hits.scores[i], best)
            for g in range(3):
                rows, best = reference.top_k(row, k, order, (steps < end) & (arrays["label"] == g))
                np.testing.assert_array_equal(grouped.rows[i, g], rows)
                np.testing.assert_array_equal(grouped.scores[i, g], best)


def test_all_contributions_and_the_initial_part_are_the_output(
    index: Index, arrays: dict[str, np.ndarray]
) -> None:
    out = index.dual_output("fc", arrays["queries"])
    for unit in range(D_OUT):
        hits = index.top_k("fc", arrays["queries"], ROWS, rank_by="contribution", unit=unit)
        parts = hits.scores.astype(np.float64)
        total = parts.sum(1) + out.initial[:, unit]
        size = np.abs(parts).sum(1) + np.abs(out.initial[:, unit])
        assert (np.abs(total - out.values[:, unit]) <= 1e-6 * size).all()


def test_a_dot_product_beside_a_rounding_boundary() -> None:
    # The contribution's float32 rounding hangs on the dot product's last float64 bit.
    keys = np.array([[1, 2.0**-24, 2.0**-60], [1, 2.0**-24, -(2.0**-60)]], np.float32)
    dots = ExactDots(
        torch.from_numpy(keys),
        torch.ones(3),
        float(np.linalg.norm(keys.astype(float), axis=1).max()),
    )
    ones, zeros = np.ones(2), np.zeros(2)
    got = dots.rounded_contributions(ones, zeros, ones.astype(np.float32))
    # Rounded to float64 first, both dots are the middle 1 + 2^-24, which rounds to even: 1.
    np.testing.assert_array_equal(got, np.array([1, 1], np.float32))
    np.testing.assert_array_equal(dots.rounded(), np.array([1 + 2.0**-23, 1], np.float32))


def test_values_that_are_not_finite_are_never_ranked(tmp_path: Path) -> None:
    keys = np.ones((5, 2), np.float32)
    values = np.array([[1], [np.nan], [3], [np.inf], [2]], np.float32)
    with Index.open(make_index(tmp_path, keys, values), device="cpu") as index:
        hits = index.top_k("fc", keys[:1], 5, rank_by="contribution", unit=0)
        assert hits.rows.tolist() == [[2, 4, 0, -1, -1]]


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        ({"rank_by": "contribution"}, "unit"),
        ({"rank_by": "contribution", "unit": D_OUT}, "unit"),
        ({"rank_by": "contribution", "unit": -1}, "unit"),
        ({"rank_by": "contribution", "unit": 0, "at_step": 99}, "at_step"),
        ({"rank_by": "gradient", "unit": 0}, "rank_by"),
        ({"unit": 0}, "unit"),
        ({"at_step": 3}, "at_step"),
    ],
)
def test_refuses(
    index: Index, arrays: dict[str, np.ndarray], ask: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        index.top_k("fc", arrays["queries"], 1, **ask)
    assert caught.value.field == field


def test_needs_values(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    with (
        Index.open(make_index(tmp_path, arrays["keys"], None), device="cpu") as index,
        pytest.raises(FailedPreconditionError, match="without values"),
    ):
        index.top_k("fc", arrays["queries"], 1, rank_by="contribution", unit=0)
