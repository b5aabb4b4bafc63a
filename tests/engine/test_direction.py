"""Contributions along a direction: against rational arithmetic, and a unit as a direction."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from synthetic import make_index
from torch import nn

from dualform.engine import Index
from dualform.engine.errors import InvalidArgumentError, ResourceExhaustedError
from dualform.engine.topk import followed_along
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.contribution_bounds import ContributionBounds
from dualform.engine.topk.ranking import merit
from dualform.index import build_index
from dualform.record import Recorder

ROWS, D_IN, D_OUT, STEP_ROWS = 300, 6, 4, 20


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    keys[100:150] = keys[:50]
    # Small integers: every e.g is exact in float64, so that rational arithmetic knows the score.
    values = rng.integers(-9, 10, (ROWS, D_OUT)).astype(np.float32)
    values[100:150] = values[:50]
    values[::7] = 0
    return {
        "keys": keys,
        "values": values,
        "queries": np.concatenate([keys[:4], np.zeros((1, D_IN), np.float32)]),
        "direction": rng.integers(-9, 10, (5, D_OUT)).astype(np.float32),
        "label": rng.integers(0, 3, ROWS),
    }


@pytest.fixture(scope="module", params=[64, 1000])
def index(arrays, request, tmp_path_factory):
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


def rational_scores(arrays: dict[str, np.ndarray], c: np.ndarray) -> np.ndarray:
    """float32 [n, rows]: the dot product rounded once to float64, two products, once to float32."""
    scores = np.zeros((len(arrays["queries"]), ROWS), np.float32)
    along = arrays["direction"].astype(np.float64) @ arrays["values"].astype(np.float64).T
    for i, query in enumerate(arrays["queries"]):
        for t, key in enumerate(arrays["keys"]):
            terms = (
                Fraction(float(a)) * Fraction(float(b)) for a, b in zip(query, key, strict=True)
            )
            dot = float(sum(terms, Fraction(0)))
            scores[i, t] = np.float32(c[t] * dot * along[i, t]) + np.float32(0)
    return scores


@pytest.mark.parametrize("at_step", [None, 7])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_matches_rational_arithmetic_by_every_strategy(index, arrays, order, at_step) -> None:
    end = index.steps if at_step is None else at_step
    steps = np.arange(ROWS) // STEP_ROWS
    by_step = index.ledger_coefficients("fc", end).weight.c
    scores = rational_scores(arrays, np.where(steps < end, by_step[np.minimum(steps, end - 1)], 0))
    ask = {"order": order, "rank_by": "contribution", "direction": arrays["direction"]}
    for k in (1, 8, 400):
        for strategy in ("scan", "certified"):
            if strategy == "certified" and index.layers["fc"].basis is None:
                continue
            more = {"at_step": at_step, "strategy": strategy}
            hits = index.top_k("fc", arrays["queries"], k, **ask, **more)
            grouped = index.top_k("fc", arrays["queries"], k, group_by="label", **ask, **more)
            for i, row in enumerate(scores):
                rows, best = reference.top_k(row, k, order, steps < end)
                np.testing.assert_array_equal(hits.rows[i], rows)
                np.testing.assert_array_equal(hits.scores[i], best)
                for g in range(3):
                    allowed = (steps < end) & (arrays["label"] == g)
                    rows, best = reference.top_k(row, k, order, allowed)
                    np.testing.assert_array_equal(grouped.rows[i, g], rows)
                    np.testing.assert_array_equal(grouped.scores[i, g], best)


def real_index(folder: Path, optimizer: str, steps: int = 40, d_in: int = 96) -> Path:
    """A network with biases, sketches, and weights that its rows explain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d_in, 24), nn.ReLU(), nn.Linear(24, 5))
    made = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    images = torch.randn(200, d_in) * torch.linspace(2, 0.05, d_in) ** 3
    with Recorder(model, made, folder / "recording") as recorder:
        for _ in range(steps):
            ids = torch.randint(0, 200, (32,))
            recorder.annotate(label=ids % 5, example=ids)
            made.zero_grad()
            nn.functional.cross_entropy(model(images[ids]), ids % 5).backward()
            made.step()
    build_index(folder / "recording", folder / "index", shard_rows=500)
    return folder / "index"


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def trained(request, tmp_path_factory):
    path = real_index(tmp_path_factory.mktemp(request.param), request.param)
    with Index.open(path, device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_a_unit_is_a_direction(trained: Index, order: str) -> None:
    queries = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    for unit in (0, 7):
        direction = np.zeros((3, 24), np.float32)
        direction[:, unit] = 1
        ask = {"rank_by": "contribution", "order": order}
        ours = trained.top_k("0", queries, 20, direction=direction, distinct="example", **ask)
        theirs = trained.top_k("0", queries, 20, unit=unit, distinct="example", **ask)
        np.testing.assert_array_equal(ours.rows, theirs.rows)
        np.testing.assert_array_equal(ours.scores, theirs.scores)
        np.testing.assert_array_equal(ours.counts, theirs.counts)


def test_directions_with_bias_add_up_to_the_output(trained: Index) -> None:
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((3, 96)).astype(np.float32)
    direction = rng.standard_normal((3, 24)).astype(np.float32)
    rows = trained.layers["0"].rows
    hits = trained.top_k("0", queries, rows, rank_by="contribution", direction=direction)
    parts = hits.scores.astype(np.float64).sum(1)
    out = trained.dual_output("0", queries)
    along = ((out.values - out.initial) * direction).sum(1)
    size = np.abs(hits.scores.astype(np.float64)).sum(1)
    assert (np.abs(parts - along) <= 2e-6 * size).all()


@pytest.fixture(scope="module")
def sketched(tmp_path_factory: pytest.TempPathFactory):
    path = real_index(tmp_path_factory.mktemp("sketched"), "sgd", 100, 300)
    with Index.open(path, device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("along", ["unit", "direction"])
@pytest.mark.parametrize("count", [1, 40])
def test_certified_and_scan_agree(sketched: Index, order: str, along: str, count: int) -> None:
    rng = np.random.default_rng(3)
    queries = sketched.layers["0"].keys_at(np.arange(count) * 7).numpy()
    direction = rng.standard_normal((count, 24)).astype(np.float32)
    about = {"unit": 3} if along == "unit" else {"direction": direction}
    found = [
        sketched.top_k("0", queries, 10, rank_by="contribution", order=order, strategy=way, **about)
        for way in ("scan", "certified")
    ]
    np.testing.assert_array_equal(found[0].rows, found[1].rows)
    np.testing.assert_array_equal(found[0].scores, found[1].scores)


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("along", ["unit", "direction"])
def test_bounds_hold_for_every_row_and_rule_most_out(
    sketched: Index, order: str, along: str
) -> None:
    layer, rng = sketched.layers["0"], np.random.default_rng(4)
    everywhere = np.arange(layer.rows)
    keys = layer.keys_at(everywhere).double()
    values = layer.value_rows(everywhere).double()
    queries = keys[:5].float() + 0.1 * torch.from_numpy(rng.standard_normal((5, 300))).float()
    g = torch.from_numpy(rng.standard_normal((5, 24)).astype(np.float32))
    if along == "unit":
        g = torch.zeros(5, 24)
        g[:, 3] = 1
    coefficients = sketched.ledger_coefficients("0", sketched.steps)
    directions = None if along == "unit" else g
    contribution = Contribution(coefficients, 3, directions)
    c, of_bias = contribution.factors(layer.space.steps)
    exact = (c[:, None] * (keys @ queries.double().T) + of_bias[:, None]) * (values @ g.double().T)
    merits = merit(exact, order)

    assert layer.basis is not None
    bounds = ContributionBounds(layer, contribution, queries, layer.basis, order)
    parts = [(shard.sketches(), slice(0, shard.rows)) for shard in layer.shards]
    counts = [shard.rows for shard in layer.shards]
    longest = max(shard.max_norm for shard in layer.shards)
    most = bounds.bounds(parts, counts, slice(0, layer.rows), longest)
    assert (most.double() >= merits).all()
    if bounds.narrows:
        narrower = bounds.narrowed(everywhere, everywhere)
        assert (narrower.double() >= merits).all()
        most = narrower
    kth = merits.topk(10, dim=0).values[-1]
    assert (most.double() >= kth).double().mean() < 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"direction": np.ones((5, D_OUT + 1), np.float32)}, "gives outputs"),
        ({"direction": np.ones((4, D_OUT), np.float32)}, "one direction for each query"),
        ({"direction": np.full((5, D_OUT), np.nan, np.float32)}, "NaN"),
        ({"direction": np.ones((5, D_OUT))}, "float64"),
        ({"unit": 1}, "give one of the two"),
        ({"rank_by": "weight"}, "direction goes with rank_by='contribution'"),
    ],
)
def test_refuses(index, arrays, change, words) -> None:
    ask = {"rank_by": "contribution", "direction": arrays["direction"], **change}
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        index.top_k("fc", arrays["queries"], 1, **ask)
    assert caught.value.field == "direction"


def test_what_would_take_too_long_is_refused_in_words(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(followed_along, "MOST_PRODUCTS", 1e5)
    with Index.open(real_index(tmp_path, "adamw"), device="cpu") as index:
        queries, direction = np.ones((1, 96), np.float32), np.ones((1, 24), np.float32)
        with pytest.raises(ResourceExhaustedError, match="metric of each output unit"):
            index.top_k("0", queries, 1, rank_by="contribution", direction=direction)
