"""Top-k by contribution under per-step metrics, against every row scored in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.engine import Index
from dualform.engine.topk import followed
from dualform.engine.totals import steps
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.recording import Recording

STEPS, BATCH, D_IN, D_OUT = 60, 8, 12, 5


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One training with AdamW, indexed in one shard and in several."""
    folder = tmp_path_factory.mktemp("adamw")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D_IN, D_OUT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    images = torch.randn(40, D_IN)
    images[7] = images[3]
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for _ in range(STEPS):
            ids = torch.randint(0, 40, (BATCH,))
            recorder.annotate(label=ids % 3, example=ids)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[ids]), ids % D_OUT).backward()
            optimizer.step()
    for name, rows in (("one", 1 << 16), ("several", 100)):
        build_index(folder / "recording", folder / name, shard_rows=rows)
    return [folder / "one", folder / "several", folder / "recording"]


def contributions(recording: Path, queries: np.ndarray, unit: int, end: int) -> np.ndarray:
    """What every row did to one unit, by AdamW's own recursion run for each row alone, float64."""
    with Recording.open(recording) as opened:
        ledger, steps = opened.ledger(), opened.steps
        keys, values = [], []
        for record in opened.passes("0"):
            key = np.empty((record.rows, D_IN), np.float32)
            value = np.empty((record.rows, D_OUT), np.float32)
            opened.read_keys(record, key)
            opened.read_values(record, value)
            keys.append(key.astype(np.float64))
            values.append(value.astype(np.float64))
    assert len(keys) == steps
    found = np.zeros((len(queries), steps * BATCH))
    second: dict[str, Any] = {"w": np.zeros(D_IN), "b": np.zeros(())}
    states: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for s in range(end):
        for name in ("w", "b"):
            row = ledger.parameters["0.weight" if name == "w" else "0.bias"][s]
            lr, beta1, beta2, eps, decay = row.settings[:5]
            terms = -row.scale * values[s][:, unit, None] * (keys[s] if name == "w" else 1.0)
            total = np.asarray(terms.sum(0) if name == "w" else terms.sum())
            second[name] = beta2 * second[name] + (1 - beta2) * total**2
            state_m = states.setdefault(name, np.zeros((steps * BATCH, *np.shape(total))))
            state_w = weights.setdefault(name, np.zeros_like(state_m))
            state_m *= beta1
            state_m[s * BATCH : (s + 1) * BATCH] += (1 - beta1) * terms.reshape(
                BATCH, *np.shape(total)
            )
            root = np.sqrt(second[name] / (1 - beta2 ** (s + 1))) + eps
            state_w *= 1 - lr * decay
            state_w -= lr / (1 - beta1 ** (s + 1)) * state_m / root
    found += queries.astype(np.float64) @ weights["w"].T + weights["b"]
    return found


@pytest.fixture(params=[1, 1 << 10], ids=["pruned", "at once"])
def first_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few rows are scored exactly before bounds and float32 choose among the others, or all."""
    monkeypatch.setattr(followed, "FIRST_ROWS", request.param)


@pytest.mark.usefixtures("first_rows")
@pytest.mark.parametrize("end", [None, 1, 33])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_best_rows_are_those_of_every_rows_own_recursion(
    paths: list[Path], order: str, end: int | None
) -> None:
    queries = np.random.default_rng(0).standard_normal((4, D_IN)).astype(np.float32)
    expected = contributions(paths[2], queries, 2, STEPS if end is None else end)
    rows = np.arange(STEPS * BATCH)
    with Index.open(paths[0], device="cpu") as index:
        labels = np.empty(len(rows), np.int64)
        space = index.layers["0"].space
        labels[space.ids] = space.columns["label"].to_numpy()
        for group_by in (None, "label"):
            found = index.top_k(
                "0", queries, 9, rank_by="contribution", unit=2, order=order,  # type: ignore[arg-type]
                at_step=end, group_by=group_by,
            )  # fmt: skip
            for query in range(len(queries)):
                for group in range(1 if group_by is None else 3):
                    where = (query,) if group_by is None else (query, group)
                    ids, scores = found.rows[where], found.scores[where]
                    allowed = rows < BATCH * (STEPS if end is None else end)
                    allowed &= True if group_by is None else labels == group
                    ranked = np.where(allowed, expected[query], np.nan)
                    merits = {"largest": ranked, "smallest": -ranked, "absolute": np.abs(ranked)}[
                        order
                    ]
                    best = np.argsort(-merits, kind="stable")[: min(9, allowed.sum())]
                    kept = ids[ids >= 0]
                    assert len(kept) == len(best)
                    np.testing.assert_allclose(
                        scores[: len(kept)], ranked[kept], rtol=2e-4, atol=1e-8
                    )
                    np.testing.assert_allclose(merits[kept], merits[best], rtol=2e-4, atol=1e-8)


@pytest.mark.usefixtures("first_rows")
def test_shards_and_batches_change_nothing(paths: list[Path]) -> None:
    queries = np.random.default_rng(1).standard_normal((5, D_IN)).astype(np.float32)
    answers = []
    for path in paths[:2]:
        with Index.open(path, device="cpu") as index:
            for distinct in (None, "example"):
                whole = index.top_k(
                    "0", queries, 20, rank_by="contribution", unit=1, distinct=distinct
                )
                alone = [
                    index.top_k(
                        "0",
                        queries[i : i + 1],
                        20,
                        rank_by="contribution",
                        unit=1,
                        distinct=distinct,
                    )
                    for i in range(5)
                ]
                for number, one in enumerate(alone):
                    np.testing.assert_array_equal(whole.rows[number], one.rows[0])
                    np.testing.assert_array_equal(whole.scores[number], one.scores[0])
                answers.append((whole.rows, whole.scores))
                if distinct is not None:
                    examples = np.asarray(whole.columns["example"].to_pylist()).reshape(5, 20)
                    assert all(len(set(row)) == 20 for row in examples.tolist())
    for one, several in ((0, 2), (1, 3)):
        np.testing.assert_array_equal(answers[one][0], answers[several][0])
        np.testing.assert_array_equal(answers[one][1], answers[several][1])


def test_bounds_leave_most_keys_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values differ by orders of magnitude, and what is small can't be among the best."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D_IN, D_OUT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    images, weights = torch.randn(40, D_IN), 10.0 ** -(torch.arange(40) % 5)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(STEPS):
            ids = torch.randint(0, 40, (BATCH,))
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(images[ids]), ids % 3, reduction="none")
            (losses * weights[ids]).mean().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    queries = np.random.default_rng(3).standard_normal((1, D_IN)).astype(np.float32)
    read: list[int] = []
    monkeypatch.setattr(followed, "FIRST_ROWS", 1)
    with Index.open(tmp_path / "index", device="cpu") as index:
        index.top_k("0", queries, 3, rank_by="contribution", unit=2)  # makes the metric
        keys_at = type(index.layers["0"]).keys_at

        def counted(self: Any, positions: np.ndarray) -> torch.Tensor:
            read.append(len(positions))
            return keys_at(self, positions)

        monkeypatch.setattr(type(index.layers["0"]), "keys_at", counted)
        index.top_k("0", queries, 3, rank_by="contribution", unit=2)
    assert 0 < sum(read) < STEPS * BATCH / 2


@pytest.mark.parametrize("most", [2, 5, 2048])
@pytest.mark.parametrize("number", [0, 1], ids=["one shard", "several"])
def test_key_sums_are_each_steps(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, number: int, most: int
) -> None:
    """However many rows are added in float32; against float64."""
    monkeypatch.setattr(steps, "PRODUCT_ROWS", most)
    with Index.open(paths[number], device="cpu") as index:
        layer = index.layers["0"]
        values = layer.values_at(np.arange(layer.rows), 1)
        found = steps.key_sums(layer, values, 0, 41, None).numpy()
        keys = layer.keys_at(np.arange(layer.rows)).double().numpy()
    expected = np.zeros((STEPS, D_IN))
    np.add.at(expected, layer.space.steps, values[:, None].astype(np.float64) * keys)
    np.testing.assert_allclose(found, expected[:41], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("end", [None, 33])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_best_groups_are_those_of_every_rows_own_recursion(
    paths: list[Path], order: str, end: int | None
) -> None:
    queries = np.random.default_rng(2).standard_normal((3, D_IN)).astype(np.float32)
    last = STEPS if end is None else end
    direction = np.array([[0, 1, 0, -2, 0]] * 3, np.float32)
    unit_1, unit_3 = (contributions(paths[2], queries, unit, last) for unit in (1, 3))
    taken = BATCH * last
    for path in paths[:2]:
        with Index.open(path, device="cpu") as index:
            space = index.layers["0"].space
            example = np.empty(STEPS * BATCH, np.int64)
            example[space.ids] = space.columns["example"].to_numpy()
            ways: list[tuple[dict[str, Any], np.ndarray]] = [
                ({"unit": 1}, unit_1),
                ({"direction": direction}, unit_1 - 2 * unit_3),
            ]
            for ask, terms in ways:
                found = index.top_groups(
                    "0", queries, "example", 7, rank_by="contribution", order=order,  # type: ignore[arg-type]
                    at_step=end, **ask,
                )  # fmt: skip
                groups = np.array(found.groups.to_pylist()).reshape(3, 7)
                for query, row in enumerate(terms[:, :taken]):
                    sums = np.bincount(example[:taken], row)
                    size = np.bincount(example[:taken], np.abs(row)).max()
                    merits = {"largest": sums, "smallest": -sums, "absolute": np.abs(sums)}[order]
                    best = np.argsort(-merits, kind="stable")[:7]
                    close = {"rtol": 0, "atol": 2e-4 * size}
                    np.testing.assert_allclose(found.scores[query], sums[groups[query]], **close)
                    np.testing.assert_allclose(merits[groups[query]], merits[best], **close)
                    times = np.bincount(example[:taken])[groups[query]]
                    assert found.counts[query].tolist() == times.tolist()
