"""What dual_form refuses, before the forward wherever it can be known by then."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import make_index
from torch import nn

from dualform.client import (
    AsyncClient,
    Client,
    DualformError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    dual_form,
    parse_filter,
)
from dualform.index import build_index
from dualform.record import Recorder

from .memory import D_IN, D_OUT, Memory


def network(d_in: int = D_IN, d_out: int = D_OUT, bias: bool = False) -> nn.Sequential:
    """With the layer that tests/client/memory.py records."""
    return nn.Sequential(OrderedDict(fc=nn.Linear(d_in, d_out, bias=bias), act=nn.ReLU()))


REFUSALS: list[tuple[Any, dict[str, Any], type[DualformError], str, str]] = [
    (network(), {"layers": "nope"}, InvalidArgumentError, "layers", "there are: 'fc'"),
    (network(), {"layers": ["fc", "head*"]}, InvalidArgumentError, "layers", "'head*' matches"),
    (network(), {"layers": [0]}, InvalidArgumentError, "layers", "such as '0'"),
    (network(), {"layers": []}, InvalidArgumentError, "layers", "None takes all"),
    (network()[:1].fc, {"layers": "fc"}, InvalidArgumentError, "layers", "no layer 'fc'"),
    (nn.ReLU(), {}, InvalidArgumentError, "model", "none of the index's layers ('fc')"),
    (
        nn.Sequential(OrderedDict(fc=nn.Bilinear(2, 2, 2))),
        {},
        InvalidArgumentError,
        "layers",
        "Bilinear in the model",
    ),
    (
        network(d_in=7),
        {},
        InvalidArgumentError,
        "layers",
        "12 -> 5 without bias in the index and 7 -> 5 without bias in the model",
    ),
    (network(d_out=3), {}, InvalidArgumentError, "layers", "12 -> 3"),
    (network(bias=True), {}, InvalidArgumentError, "layers", "with bias in the model"),
    (lambda x: x, {}, InvalidArgumentError, "model", "torch.nn.Module is needed"),
    (torch.compile(network()), {}, InvalidArgumentError, "model", "the model is compiled"),
    (network(), {"at_step": -1}, InvalidArgumentError, "at_step", "one of 0 to 86"),
    (network(), {"at_step": 87}, InvalidArgumentError, "at_step", "one of 0 to 86"),
    (network(), {"at_step": 1.5}, InvalidArgumentError, "at_step", "an int is needed"),
    (network(), {"where": "lable = 2"}, InvalidArgumentError, "where", "position 1"),
    (network(), {"where": "label = "}, InvalidArgumentError, "where", "position"),
    (network(), {"where": parse_filter("label = 'x'")}, InvalidArgumentError, "where", "label"),
    (network(), {"max_residual": -1.0}, InvalidArgumentError, "max_residual", "0 or more"),
    (network(), {"max_residual": math.nan}, InvalidArgumentError, "max_residual", "a number is"),
    (network(), {"index": "other"}, NotFoundError, "index", "other"),
    (network(), {"timeout": -1}, InvalidArgumentError, "timeout", "above 0"),
]


@pytest.mark.parametrize(("model", "named", "kind", "field", "says"), REFUSALS)
def test_refused_before_the_forward(
    remote: Client,
    local: Client,
    model: Any,
    named: dict[str, Any],
    kind: type[DualformError],
    field: str,
    says: str,
) -> None:
    for client in (remote, local):
        with pytest.raises(DualformError) as caught:
            dual_form(model, client, **named).__enter__()
        assert type(caught.value) is kind, caught.value
        assert caught.value.field == field
        assert says in str(caught.value)


def test_a_module_that_compiles_itself(remote: Client) -> None:
    model = network()
    model.fc.compile()
    with pytest.raises(InvalidArgumentError, match="module 'fc' is compiled"):
        dual_form(model, remote).__enter__()


def test_clients_that_can_not_answer_inside_a_forward(server: str) -> None:
    for client in (AsyncClient(server), server):
        with pytest.raises(TypeError, match=r"Client\.local\(PATH\)"):
            dual_form(network(), client).__enter__()  # type: ignore[arg-type]


def test_an_index_without_values(tmp_path: Path) -> None:
    path = make_index(tmp_path, np.ones((9, D_IN), np.float32), None)
    with (
        Client.local(path) as client,
        pytest.raises(FailedPreconditionError, match="without values") as caught,
    ):
        dual_form(network(d_out=1), client).__enter__()
    assert (caught.value.reason, caught.value.field) == ("NO_VALUES", "layers")


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A memory of two layers; the first one's gradient was clipped by value at step 3."""
    folder = tmp_path_factory.mktemp("clipped")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, folder / "recording"):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            if step == 3:
                nn.utils.clip_grad_value_(model[0].parameters(), 0.01)
            optimizer.step()
    build_index(folder / "recording", folder / "index")
    with Client.local(folder / "index") as client:
        yield client


@pytest.mark.filterwarnings("ignore:layer .* of the model holds other weights")
def test_an_inexact_layer_is_refused_from_its_mark_on(clipped: Client) -> None:
    layers = clipped.index().layers
    (mark,) = layers["0"].inexact
    assert mark.from_step == 3
    assert layers["0"].exactness == f"inexact from step {mark.from_step}: {mark.reason}"
    assert (layers["1"].inexact, layers["1"].exactness) == ((), "exact")
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with pytest.raises(FailedPreconditionError) as caught:
        dual_form(model, clipped, at_step=mark.from_step + 1).__enter__()
    assert (caught.value.reason, caught.value.field) == ("INEXACT", "layers")
    assert mark.reason in str(caught.value)
    assert f"at_step <= {mark.from_step}" in str(caught.value)
    x = torch.randn(2, 5)
    # Of the trained layer it is known how much no row explains.
    for named in ({}, {"layers": ["0"]}, {"layers": ["0"], "max_residual": 1e-4}):
        with (
            pytest.raises(FailedPreconditionError, match="unexplained, as residual") as caught,
            dual_form(model, clipped, **named),
        ):
            model(x)
        assert (caught.value.reason, caught.value.field) == ("RESIDUAL", "max_residual")
        assert mark.reason in str(caught.value)
    for named in (
        {},
        {"layers": ["0"]},
    ):  # with another layer outside it is compared with the model
        with dual_form(model, clipped, max_residual=float("inf"), **named):
            assert model(x).shape == (2, 3)
    with dual_form(model, clipped, layers=["1"]):
        assert model(x).shape == (2, 3)
    with dual_form(model, clipped, at_step=mark.from_step):
        assert model(x).shape == (2, 3)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.full((2, D_IN), torch.nan), "finite"),
        (torch.full((2, D_IN), torch.inf), "finite"),
        (torch.ones(2, D_IN, dtype=torch.float64), r"sees float64; .*model\.float\(\)"),
        (torch.ones(2, D_IN, dtype=torch.int64), "sees int64"),
        (torch.ones(2, 5), r"sees shape \[2, 5\]"),
        (torch.tensor(1.0), r"sees shape \[\]"),
    ],
)
def test_inputs_that_are_no_queries(remote: Client, x: torch.Tensor, says: str) -> None:
    model = network()
    with pytest.raises(InvalidArgumentError, match=says), dual_form(model, remote):
        model(x)


def test_a_layer_asked_for_that_does_not_run(remote: Client, memory: Memory) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(D_IN, D_OUT, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.fc.weight)

    model = Functional()
    with (
        pytest.raises(FailedPreconditionError, match="did not run inside the block: fc") as caught,
        dual_form(model, remote, layers=["fc"]),
    ):
        model(torch.ones(2, D_IN))
    assert caught.value.field == "layers"
    assert not model.fc._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:layer .* of the model holds other weights")
def test_the_encoders_fused_path_is_not_taken(tmp_path: Path) -> None:
    torch.manual_seed(1)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)
    with Recorder(encoder, optimizer, tmp_path / "recording", layers=["linear1", "linear2"]):
        for _ in range(3):
            optimizer.zero_grad()
            encoder(torch.randn(3, 4, 8)).square().sum().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    encoder.eval()
    x = torch.randn(2, 4, 8)
    with torch.no_grad(), Client.local(tmp_path / "index") as client:
        trained = encoder(x)
        with dual_form(encoder, client, layers=["linear*"]):
            torch.testing.assert_close(encoder(x), trained, rtol=1e-4, atol=1e-5)
        nn.init.zeros_(encoder.linear1.weight)
        assert not torch.allclose(encoder(x), trained, atol=1e-3)
        with dual_form(encoder, client, layers=["linear*"]):
            torch.testing.assert_close(encoder(x), trained, rtol=1e-4, atol=1e-5)
