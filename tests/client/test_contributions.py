"""Ranking by contribution through the real client: float64 references, and adding up to outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digits
import grpc
import numpy as np
import pytest
import torch
from synthetic import make_index
from torch import nn

from dualform.client import Client, Coverage, FailedPreconditionError, capture_queries
from dualform.index import build_index
from dualform.record import Recorder
from dualform.v1 import attribution_pb2 as pb
from dualform.v1.attribution_pb2_grpc import AttributionServiceStub

from .memory import D_IN, D_OUT, LR, ROWS, Memory
from .serving import serving


@pytest.fixture(scope="module", params=["remote", "local"])
def trained(request: pytest.FixtureRequest, digits_index: Path) -> Iterator[Client]:
    """The digits network's memory: momentum, biases, ReLU, several shards."""
    if request.param == "local":
        with Client.local(digits_index) as client:
            yield client
    else:
        with serving({"digits": digits_index}) as address, Client(address) as client:
            yield client


@pytest.fixture(scope="module")
def digits_queries() -> dict[str, np.ndarray]:
    return capture_queries(digits.network(), digits.load().images[:4])


@pytest.mark.parametrize(
    ("layer", "units", "at_step", "where"),
    [
        ("0", [0, 47], None, None),
        ("2", [5], 17, None),
        ("4", range(10), None, None),
        ("4", range(10), 17, "label < 5 and task = 'even'"),
        ("4", [3], 0, None),
        ("4", [3], None, "label > 99"),
    ],
)
def test_contributions_and_the_initial_part_add_up_to_the_logit(
    trained: Client,
    digits_queries: dict[str, np.ndarray],
    layer: str,
    units: Any,
    at_step: int | None,
    where: str | None,
) -> None:
    queries, rows = digits_queries[layer], digits.STEPS * digits.BATCH
    out = trained.dual_output(layer, queries, at_step=at_step, where=where)
    for unit in units:
        hits = trained.top_k(
            layer,
            queries,
            k=rows,
            rank_by="contribution",
            unit=unit,
            at_step=at_step,
            where=where,
        )
        assert hits.coverage == out.coverage
        assert ((hits.rows >= 0).sum(axis=1) == out.coverage.rows).all()
        parts = np.nan_to_num(hits.scores.astype(np.float64))
        size = np.abs(parts).sum(axis=1) + np.abs(out.initial[:, unit])
        total = parts.sum(axis=1) + out.initial[:, unit]
        assert (np.abs(total - out.values[:, unit]) <= 1e-6 * size).all()


@pytest.mark.parametrize("at_step", [None, 20])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_order_is_the_references(
    remote: Client, memory: Memory, queries: np.ndarray, order: str, at_step: int | None
) -> None:
    unit = 3
    parts = LR * memory.weights(queries) * memory.values[:, unit].astype(np.float64)
    count = ROWS if at_step is None else at_step * 7
    merit = {"largest": parts, "smallest": -parts, "absolute": np.abs(parts)}[order]
    ask = {"order": order, "rank_by": "contribution", "unit": unit, "at_step": at_step}
    hits = remote.top_k("fc", queries, k=6, **ask)
    expected = np.argsort(-merit[:, :count], axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(hits.rows, expected)
    np.testing.assert_allclose(
        hits.scores, np.take_along_axis(parts, expected, axis=1), rtol=1e-6, atol=0
    )
    assert hits.coverage == Coverage(count, ROWS, 0)
    grouped = remote.top_k("fc", queries, k=2, group_by="task", where="seen = true", **ask)
    assert grouped.groups == ["fashion", "mnist", None]
    for place, group in enumerate(grouped.groups):
        members = np.array([t for t in range(0, count, 3) if memory.task[t] == group])
        best = members[np.argsort(-merit[:, members], axis=1, kind="stable")[:, :2]]
        np.testing.assert_array_equal(grouped.rows[:, place], best)


def test_nothing_left_is_padding(remote: Client, queries: np.ndarray) -> None:
    ask = {"k": 3, "rank_by": "contribution", "unit": 0}
    for more in ({"at_step": 0}, {"where": "label = 99"}, {"where": "step >= 4", "at_step": 4}):
        hits = remote.top_k("fc", queries, **ask, **more)
        assert hits.coverage == Coverage(0, ROWS, 0)
        assert (hits.rows == -1).all()
        assert np.isnan(hits.scores).all()


def test_without_values(tmp_path: Path) -> None:
    path = make_index(tmp_path, np.ones((9, D_IN), np.float32), None)
    with serving({"keys": path}) as address, Client(address) as remote:
        for client in (remote, Client.local(path)):
            with pytest.raises(FailedPreconditionError, match="values") as caught:
                ask_unit_0(client)
            assert (caught.value.reason, caught.value.field) == ("NO_VALUES", "layer")


class Foreign(torch.optim.SGD):
    """Steps by the sign of the gradient: of no family that is known."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


def test_of_an_inexact_layer(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(D_IN, D_OUT))
    optimizer = Foreign(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, D_IN)).square().sum().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    with serving({"foreign": tmp_path / "index"}) as address, Client(address) as remote:
        (mark,) = remote.index().layers["fc"].inexact
        for client in (remote, Client.local(tmp_path / "index")):
            with pytest.raises(FailedPreconditionError) as caught:
                ask_unit_0(client)
            assert (caught.value.reason, caught.value.field) == ("INEXACT", "rank_by")
            assert mark.reason in str(caught.value)
            assert "Foreign" in str(caught.value)


def test_a_ranking_that_the_server_does_not_know(server: str) -> None:
    request = pb.TopKRequest(layer="fc", k=1, rank_by=7)  # type: ignore[arg-type]
    with grpc.insecure_channel(server) as channel, pytest.raises(grpc.RpcError) as caught:
        AttributionServiceStub(channel).TopK(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "rank_by 7 is unknown" in caught.value.details()


def ask_unit_0(client: Client) -> None:
    client.top_k("fc", np.ones((1, D_IN), np.float32), rank_by="contribution", unit=0)


def test_directions_travel_and_are_split_with_their_queries(
    trained: Client, digits_queries: dict[str, np.ndarray]
) -> None:
    """Many queries, each with its own direction, in as many parts as the limits need."""
    queries = np.tile(digits_queries["4"], (1100, 1))
    direction = np.zeros((len(queries), 10), np.float32)
    units = np.arange(len(queries)) % 3
    direction[np.arange(len(queries)), units] = 2
    found = trained.top_k("4", queries, k=2, rank_by="contribution", direction=direction)
    for unit in range(3):
        of_unit = np.flatnonzero(units == unit)
        each = trained.top_k("4", queries[of_unit[:4]], k=2, rank_by="contribution", unit=unit)
        for place, query in enumerate(of_unit[:4]):
            again = np.flatnonzero((units == unit) & (np.arange(len(queries)) % 4 == query % 4))
            assert (found.rows[again] == each.rows[place]).all()
            assert (found.scores[again] == 2 * each.scores[place]).all()  # a power of two: exact
