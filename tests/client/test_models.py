"""Models of other kinds that meet an index: compiled, scripted, exported, LSTM, not its own."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, InvalidArgumentError, capture_queries, dual_form
from dualform.index import build_index
from dualform.record import LSTM, Recorder

from .memory import D_IN, D_OUT


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.inner(x)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_queries_of_models_without_layers_to_watch() -> None:
    model, x = stack().eval(), torch.randn(5, 4)
    exported = torch.export.export(model, (x,))
    scripted = torch.jit.script(model)
    for kind in (scripted, torch.jit.trace(model, x), exported, exported.module()):
        with pytest.raises(InvalidArgumentError, match=r"pass the nn\.Module") as caught:
            capture_queries(kind, x)
        assert caught.value.field == "model"
    around = Around(scripted)
    with pytest.raises(InvalidArgumentError, match="module 'inner' is scripted"):
        capture_queries(around, x)
    queries = capture_queries(around, x, layers="head")
    np.testing.assert_array_equal(queries["head"], model(x).detach().numpy())
    for kind in (torch.fx.symbolic_trace(model), torch.compile(model, backend="eager")):
        np.testing.assert_array_equal(capture_queries(kind, x)["0"], x.numpy())


def linear() -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc=nn.Linear(D_IN, D_OUT, bias=False)))


# torch's own, from inside its translation.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_compiled_function_around_a_model_in_dual_form(
    local: Client, queries: np.ndarray, seen_before: bool
) -> None:
    model, x = linear(), torch.from_numpy(queries)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(x) * 2)

    reference = twice(x).detach()
    expected = 2 * local.dual_output("fc", x).values
    torch._dynamo.reset()
    compiled = torch.compile(twice, backend="eager")
    if seen_before:
        compiled(x)
    with dual_form(model, local):
        np.testing.assert_array_equal(compiled(x).numpy(), expected)
    torch.testing.assert_close(compiled(x).detach(), reference)


def test_dual_form_inside_a_compiled_function(local: Client, queries: np.ndarray) -> None:
    model, x = linear(), torch.from_numpy(queries)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with dual_form(model, local):
            return torch.as_tensor(model(x) * 2)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it leaves to Python
        found = torch.compile(inside, backend="eager")(x)
    np.testing.assert_array_equal(found.numpy(), 2 * local.dual_output("fc", x).values)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(inside, backend="eager", fullgraph=True)(x)


class Tagger(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.rnn = LSTM(5, 7, bias)
        self.head = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor, state: object = None) -> torch.Tensor:
        output, (h, c) = self.rnn(x, state)
        return torch.as_tensor(torch.cat([self.head(output).flatten(1), h, c], 1))


def train(folder: Path, bias: bool) -> Tagger:
    torch.manual_seed(0)
    model = Tagger(bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for step in range(25):
            recorder.annotate(part=step % 2)
            optimizer.zero_grad()
            model(torch.randn(6, 8, 5)).square().mean().backward()
            optimizer.step()
    build_index(folder / "recording", folder / "index")
    return model


@pytest.fixture(scope="module", params=[True, False], ids=["biased", "without bias"])
def tagged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tagger, Client]]:
    folder = tmp_path_factory.mktemp("tagger")
    model = train(folder, request.param)
    with Client.local(folder / "index") as client:
        yield model, client


def test_an_lstm_in_dual_form(tagged: tuple[Tagger, Client]) -> None:
    model, client = tagged
    fresh = Tagger(model.rnn.ih.bias is not None)
    x, state = torch.randn(3, 9, 5), (torch.randn(3, 7), torch.randn(3, 7))
    for given in (None, state):
        with torch.no_grad():
            primal = model(x, given)
        with dual_form(fresh, client):
            dual = fresh(x, given)
        assert float((dual - primal).norm() / primal.norm()) <= 1e-5
    assert "forward" not in vars(fresh.rnn)


def test_an_lstm_at_the_start_and_without_some_rows(tagged: tuple[Tagger, Client]) -> None:
    model, client = tagged
    torch.manual_seed(0)
    start = Tagger(model.rnn.ih.bias is not None)
    x = torch.randn(2, 4, 5)
    with torch.no_grad():
        initial, primal = start(x), model(x)
    with dual_form(start, client, at_step=0):
        torch.testing.assert_close(start(x), initial, rtol=1e-5, atol=1e-6)
    with dual_form(start, client, where="part = 7"):
        torch.testing.assert_close(start(x), initial, rtol=1e-5, atol=1e-6)
    with dual_form(start, client, where="part = 1"):
        assert float((start(x) - primal).norm() / primal.norm()) > 1e-3
    with dual_form(model, client), pytest.raises(InvalidArgumentError, match="one time step"):
        model(x[:, :0])


def test_a_model_that_is_not_the_recorded_one_is_noticed(tagged: tuple[Tagger, Client]) -> None:
    model, client = tagged
    other = Tagger(model.rnn.ih.bias is not None)
    x = torch.randn(2, 4, 5)
    # The LSTM stays the model's own, and is another one's.
    with (
        pytest.warns(UserWarning, match="is this the model that was recorded"),
        dual_form(other, client, layers="head"),
    ):
        other(x)
    with pytest.warns(UserWarning, match="layer 'rnn'"), dual_form(other, client, layers="rnn"):
        other(x)
    torch.manual_seed(0)
    start = Tagger(model.rnn.ih.bias is not None)
    with (
        dual_form(model, client, layers="head"),
        dual_form(start, client, layers="head", at_step=0),
    ):
        model(x), start(x)  # the trained one, and the one of that step
    with pytest.warns(UserWarning, match="layer 'head'"), dual_form(start, client, layers="head"):
        start(x)
