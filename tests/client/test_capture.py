"""capture_queries: what the layers saw, and a model that is afterwards as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, FailedPreconditionError, InvalidArgumentError, capture_queries


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
    )


def test_queries_are_what_the_layers_see() -> None:
    model, images = network(), torch.randn(5, 6)
    queries = capture_queries(model, images)
    assert list(queries) == ["0", "4"]
    assert all(q.dtype == np.float32 and q.flags.c_contiguous for q in queries.values())
    np.testing.assert_array_equal(queries["0"], images.numpy())
    model.eval()
    with torch.no_grad():
        np.testing.assert_array_equal(queries["4"], model[:4](images).numpy())


def test_mode_random_state_buffers_gradients_and_hooks_stay() -> None:
    model, images = network(), torch.randn(5, 6)
    model[3].eval()
    model(images).sum().backward()
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random_state = torch.get_rng_state()
    capture_queries(model, images)
    assert [module.training for module in model.modules()] == flags
    now = model.state_dict()
    assert state.keys() == now.keys()
    assert all(torch.equal(state[name], now[name]) for name in state)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, after, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_hooks for module in model.modules())


class Restless(nn.Module):
    """Draws, counts and rebinds a buffer even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("noise", torch.full((2,), torch.nan))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        self.calls.add_(1)
        self.noise = torch.rand(2)
        if fail:
            raise RuntimeError("in the middle of the pass")
        return self.layer(self.layer(x))


@pytest.mark.parametrize("fail", [False, True])
def test_a_model_that_changes_itself_is_put_back(fail: bool) -> None:
    model = Restless()
    noise, random_state = model.noise, torch.get_rng_state()
    if fail:
        with pytest.raises(RuntimeError, match="middle"):
            capture_queries(model, torch.ones(2, 3), fail)
    else:
        capture_queries(model, torch.ones(2, 3))
    assert model.noise is noise
    assert noise.isnan().all()
    assert model.calls == 0
    assert model.absent is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert not model.layer._forward_hooks


def test_a_layer_used_twice_gives_its_rows_in_call_order() -> None:
    model, x = Restless(), torch.randn(2, 3)
    queries = capture_queries(model, x, kwargs={"fail": False})
    with torch.no_grad():
        expected = torch.cat([x, model.layer(x)])
    np.testing.assert_array_equal(queries["layer"], expected.numpy())


class Sequence(nn.Module):
    """Three-dimensional input, given by keyword, overwritten after use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
        self.unused = nn.Linear(2, 2)

    def forward(self, *, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner["up"](input=tokens)
        out: torch.Tensor = self.inner["down"](hidden)
        hidden.zero_()
        return out


def test_sequences_are_flattened_and_copied_at_once() -> None:
    model, tokens = Sequence(), torch.randn(2, 5, 4)
    queries = capture_queries(model, kwargs={"tokens": tokens})
    assert list(queries) == ["inner.up", "inner.down"]
    np.testing.assert_array_equal(queries["inner.up"], tokens.reshape(10, 4).numpy())
    with torch.no_grad():
        hidden = model.inner["up"](tokens).reshape(10, 6)
    np.testing.assert_array_equal(queries["inner.down"], hidden.numpy())


def test_layers_by_name_and_pattern() -> None:
    model, tokens = Sequence(), torch.randn(1, 2, 4)

    def names(layers: Any) -> list[str]:
        return list(capture_queries(model, layers=layers, kwargs={"tokens": tokens}))

    assert names("inner.up") == ["inner.up"]
    assert names(["inner.*"]) == ["inner.up", "inner.down"]
    with pytest.raises(InvalidArgumentError, match=r"'outer\.\*' matches no linear layer") as error:
        names(["inner.up", "outer.*"])
    assert error.value.field == "layers"
    assert "'inner.down'" in str(error.value)
    with pytest.raises(FailedPreconditionError, match="did not run: unused"):
        names("*")


def test_a_layers_own_name_goes_before_patterns() -> None:
    model = nn.Sequential()
    for name in ("[a]", "a", "*"):
        model.add_module(name, nn.Linear(4, 4))

    def names(layers: Any) -> list[str]:
        return list(capture_queries(model, torch.randn(2, 4), layers=layers))

    assert names("[a]") == ["[a]"]
    assert names("*") == ["*"]
    assert names(["?", "[a]"]) == ["[a]", "a", "*"]


def test_half_precision_fits_and_double_is_refused() -> None:
    halves = torch.randn(3, 4).bfloat16()
    model = nn.Sequential(nn.Linear(4, 2)).bfloat16()
    np.testing.assert_array_equal(capture_queries(model, halves)["0"], halves.float().numpy())
    with pytest.raises(FailedPreconditionError, match="float64"):
        capture_queries(nn.Sequential(nn.Linear(4, 2)).double(), halves.double())
    with pytest.raises(InvalidArgumentError, match=r"torch\.nn\.Module"):
        capture_queries("model", halves)  # type: ignore[arg-type]


def test_captured_queries_keep_no_gradient_graph() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.ones(1, 3, requires_grad=True)
    capture_queries(model, x)
    assert x.grad is None
    assert torch.is_grad_enabled()


def test_captured_queries_reach_the_trained_layers_output(digits_index: Path) -> None:
    with Client.local(digits_index) as client:
        for layer in client.index().layers.values():
            model = nn.Sequential(nn.Linear(layer.d_in, layer.d_out))
            queries = capture_queries(model, torch.rand(3, layer.d_in))
            output = client.dual_output(layer.name, queries["0"])
            assert output.trained is not None
            error = np.linalg.norm(output.values - output.trained, axis=1)
            assert (error <= 1e-5 * np.linalg.norm(output.trained, axis=1)).all()
