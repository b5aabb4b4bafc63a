"""An index of an embedding, whose keys are stored as places, asked every kind of question; against
float64 sums over one-hot keys and the gradients that autograd gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, InvalidArgumentError
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder

IDS, PADDING, D, BATCH, TIME, STEPS = 90, 3, 6, 4, 5, 30
LR, MOMENTUM, BETAS, EPS, DECAY = 0.05, 0.9, (0.9, 0.999), 1e-8, 0.1


@dataclass(frozen=True)
class Asked:
    """An index, and what training saw.

    Attributes:
        keys: float64 [rows, IDS], a single 1 each, none in rows of padding.
        values: float64 [rows, D].
        labels, steps: int64 [rows].
        initial, trained: The table transposed, float64 [D, IDS].
    """

    optimizer: str
    client: Client
    path: Path
    keys: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    steps: np.ndarray
    initial: np.ndarray
    trained: np.ndarray

    def parts(self, groups: np.ndarray, end: int = STEPS) -> np.ndarray:
        """What each group's rows add to W by the end of so many steps, float64 [groups, D, IDS]."""
        of_step = np.zeros((groups.max() + 1, end, D, IDS))  # minus the gradients
        for step in range(end):
            here = self.steps == step
            for group in range(len(of_step)):
                which = here & (groups == group)
                of_step[group, step] = self.values[which].T @ self.keys[which]
        added, moment = np.zeros((2, len(of_step), D, IDS))
        second = np.zeros((D, IDS))
        for step in range(end):
            if self.optimizer == "SGD":
                moment = MOMENTUM * moment + of_step[:, step]
                added = added + LR * moment
                continue
            moment = BETAS[0] * moment + (1 - BETAS[0]) * of_step[:, step]
            second = BETAS[1] * second + (1 - BETAS[1]) * of_step[:, step].sum(0) ** 2
            scale = np.sqrt(second / (1 - BETAS[1] ** (step + 1))) + EPS
            added = (1 - LR * DECAY) * added + LR * moment / (1 - BETAS[0] ** (step + 1)) / scale
        return np.asarray(added)

    def start(self, end: int = STEPS) -> np.ndarray:
        """What is left of the initial table after so many steps."""
        return self.initial * (1.0 if self.optimizer == "SGD" else (1 - LR * DECAY) ** end)


@pytest.fixture(scope="module", params=["SGD", "AdamW"])
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    table, head = nn.Embedding(IDS, D, padding_idx=PADDING), nn.Linear(D, 7)
    model = nn.Sequential(table, nn.Tanh(), head)
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        if request.param == "SGD"
        else torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    )
    initial = table.weight.detach().double().numpy().T.copy()
    ids, values = [], []

    def keep(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda g: values.append(-g.flatten(0, 1).numpy()))

    table.register_forward_hook(keep)
    with Recorder(model, optimizer, path / "recording") as recorder:
        for _ in range(STEPS):
            x = (torch.rand(BATCH, TIME) ** 3 * IDS).long()  # some ids often, some never
            ids.append(x.flatten().numpy())
            recorder.annotate(label=x[:, 0] % 3)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten() % 7).backward()
            optimizer.step()
    build_index(path / "recording", path / "index", shard_rows=170)
    which = np.concatenate(ids)
    with Client.local(path / "index") as client:
        yield Asked(
            request.param,
            client,
            path / "index",
            (which[:, None] == np.arange(IDS)) * (which != PADDING)[:, None] * 1.0,
            np.concatenate(values).astype(np.float64),
            np.concatenate([np.repeat(x[::TIME] % 3, TIME) for x in ids]),
            np.repeat(np.arange(STEPS), BATCH * TIME),
            initial,
            table.weight.detach().double().numpy().T,
        )


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    """Two that no id gives, and one that an id does."""
    free = np.random.default_rng(0).standard_normal((2, IDS))
    return np.concatenate([free, np.eye(IDS)[5:6]]).astype(np.float32)


def first_of(scores: np.ndarray, k: int, rows: np.ndarray) -> np.ndarray:
    """The k largest, and of equal ones those with the smallest row ids: int64 [queries, k]."""
    return np.asarray(rows[np.argsort(-scores[:, rows], axis=1, kind="stable")[:, :k]])


@pytest.mark.parametrize("strategy", ["auto", "scan", "distinct_keys"])
def test_top_k(asked: Asked, queries: np.ndarray, strategy: str) -> None:
    weights = queries.astype(np.float64) @ asked.keys.T
    every = np.arange(len(asked.keys))
    ends = {"largest": weights, "smallest": -weights, "absolute": abs(weights)}
    for order, scores in ends.items():
        found = asked.client.top_k("0", queries, k=40, order=order, strategy=strategy)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.rows, first_of(scores, 40, every))
        np.testing.assert_array_equal(
            found.scores, np.take_along_axis(weights, found.rows, 1).astype(np.float32)
        )
    some = np.flatnonzero((asked.labels == 1) & (asked.steps < 20))
    found = asked.client.top_k(
        "0",
        queries,
        k=9,
        where="label = 1 and step < 20",
        strategy=strategy,  # type: ignore[arg-type]
    )
    np.testing.assert_array_equal(found.rows, first_of(weights, 9, some))


@pytest.mark.parametrize("strategy", ["flat", "certified"])
def test_what_needs_other_files_is_refused(
    asked: Asked, queries: np.ndarray, strategy: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=strategy):
        asked.client.top_k("0", queries, strategy=strategy)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [STEPS, 17])
def test_top_k_by_contribution(asked: Asked, queries: np.ndarray, end: int) -> None:
    rows = int(np.count_nonzero(asked.steps < end))
    alone = asked.parts(np.where(asked.steps < end, np.arange(len(asked.keys)), rows), end)[:rows]
    outputs = np.einsum("rud,qd->qru", alone, queries.astype(np.float64))
    directions = np.random.default_rng(1).standard_normal((3, D)).astype(np.float32)
    ways = [
        ({"unit": 2}, outputs[..., 2]),
        ({"direction": directions}, np.einsum("qru,qu->qr", outputs, directions)),
    ]
    for given, scores in ways:
        found = asked.client.top_k(
            "0", queries, k=12, rank_by="contribution", at_step=end, max_residual=1e-3, **given
        )
        right = -np.sort(-scores, axis=1)[:, :12]
        np.testing.assert_allclose(found.scores, right, rtol=1e-4, atol=1e-9)
        there = np.take_along_axis(scores, found.rows, 1)
        np.testing.assert_allclose(there, right, rtol=1e-4, atol=1e-9)


def test_sums_and_weights(asked: Asked, queries: np.ndarray) -> None:
    weights = queries.astype(np.float64) @ asked.keys.T
    for absolute in (False, True):
        each = abs(weights) if absolute else weights
        right = np.stack([each[:, asked.labels == label].sum(1) for label in range(3)], axis=1)
        for strategy in ("auto", "scan", "distinct_keys"):
            found = asked.client.sums(
                "0", queries, group_by="label", absolute=absolute, strategy=strategy
            )
            assert list(found.groups) == [0, 1, 2]
            np.testing.assert_allclose(found.values, right, rtol=1e-6)
    chunks = [chunk.weights for chunk in asked.client.stream_weights("0", queries)]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), weights.astype(np.float32))


def test_outputs(asked: Asked, queries: np.ndarray) -> None:
    x = queries.astype(np.float64)
    ask = asked.client.dual_output
    whole = ask("0", queries).values
    np.testing.assert_allclose(whole, x @ asked.trained.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(whole[2], asked.trained[:, 5], rtol=1e-5, atol=1e-6)
    parts = np.einsum("gud,qd->qgu", asked.parts(asked.labels), x)
    grouped = ask("0", queries, group_by="label")
    np.testing.assert_allclose(grouped.values, parts, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grouped.initial, x @ asked.start().T, rtol=1e-5, atol=1e-5)
    masked = ask("0", queries, where="label = 1")
    right = x @ asked.start().T + parts[:, 1]
    np.testing.assert_allclose(masked.values, right, rtol=1e-4, atol=1e-5)
    early = ask("0", queries, at_step=17)
    before = np.where(asked.steps < 17, 0, 1)
    right = x @ (asked.start(17) + asked.parts(before, 17)[0]).T
    np.testing.assert_allclose(early.values, right, rtol=1e-5, atol=1e-5)


def test_explained_at_once_and_verified(asked: Asked, queries: np.ndarray) -> None:
    found = asked.client.explain({"0": queries}, k=5, group_by="label", output=True)["0"]
    assert found.top_k is not None
    assert found.sums is not None
    assert found.output is not None
    np.testing.assert_array_equal(found.top_k.rows, asked.client.top_k("0", queries, k=5).rows)
    sums = asked.client.sums("0", queries, group_by="label")
    np.testing.assert_allclose(found.sums.values, sums.values, rtol=1e-6)
    parts = asked.client.dual_output("0", queries, group_by="label")
    np.testing.assert_allclose(found.output.values, parts.values, rtol=1e-5, atol=1e-6)
    report = verify_index(asked.path)
    assert report.ok, report
