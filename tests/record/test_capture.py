"""Keys and values are right whatever surrounds the layer: shapes, bias, in-place operations."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import CaptureError, Recorder
from dualform.store.recording import Recording

from . import reading

SHAPES = [(5,), (4, 5), (1, 5), (4, 3, 5), (2, 4, 3, 5)]


def nothing(y: torch.Tensor) -> torch.Tensor:
    return y


def relu_(y: torch.Tensor) -> torch.Tensor:
    return y.relu_()


def slice_write(y: torch.Tensor) -> torch.Tensor:
    y[..., 0] = 0
    y[..., 1:3].mul_(3)
    return y


def add_(y: torch.Tensor) -> torch.Tensor:
    return y.add_(1)


def one_step(
    layer: nn.Linear, path: Path, run: Callable[[nn.Linear], torch.Tensor]
) -> tuple[Recording, torch.Tensor, torch.Tensor | None]:
    """Record one step of the loss that `run` gives; returns the gradients at the step."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Recorder(layer, optimizer, path):
        run(layer).backward()
        weight = layer.weight.grad.clone()
        bias = None if layer.bias is None else layer.bias.grad.clone()
        optimizer.step()
    return Recording.open(path), weight, bias


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("after", [nothing, relu_, slice_write, add_])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_add_up_to_the_gradient(
    tmp_path: Path,
    shape: tuple[int, ...],
    bias: bool,
    after: Callable[[torch.Tensor], torch.Tensor],
    requires_grad: bool,
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 6, bias=bias)
    x = torch.randn(shape, requires_grad=requires_grad)
    recording, weight, grad_bias = one_step(
        layer, tmp_path / "r", lambda layer: after(layer(x)).mul(3.0).pow(2).sum()
    )
    assert recording.marks[""] == []
    (record,) = recording.passes("")
    assert np.array_equal(reading.keys(recording, "", record), x.detach().reshape(-1, 5).numpy())
    sums, bias_sums = reading.step_sums(recording, "")
    assert reading.relative(-sums[0], weight.numpy()) < 1e-6
    if grad_bias is not None:
        assert reading.relative(-bias_sums[0], grad_bias.numpy()) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4, 5).transpose(0, 1),
        lambda: torch.randn(4, 5, 3).transpose(1, 2),
        lambda: torch.randn(1, 1, 5).expand(4, 3, 5),
        lambda: torch.randn(4, 10)[:, ::2],
        lambda: torch.randn(5, 4).t(),
    ],
)
def test_inputs_of_any_stride(tmp_path: Path, bias: bool, make: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = make()
    layer = nn.Linear(5, 6, bias=bias)
    recording, weight, _ = one_step(layer, tmp_path / "r", lambda layer: layer(x).pow(2).sum())
    (record,) = recording.passes("")
    assert np.array_equal(reading.keys(recording, "", record), x.reshape(-1, 5).numpy())
    assert reading.relative(-reading.step_sums(recording, "")[0][0], weight.numpy()) < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 5, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(4, 5).relu().to_sparse(),
        lambda: torch.randn(4, 5).relu().to_sparse_csr(),
    ],
    ids=["negative bit", "sparse", "sparse rows"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_inputs_of_any_layout(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = make()
    layer = nn.Linear(5, 6)
    recording, weight, _ = one_step(layer, tmp_path / "r", lambda layer: layer(x).pow(2).sum())
    (record,) = recording.passes("")
    assert np.array_equal(reading.keys(recording, "", record), x.to_dense().numpy(force=True))
    assert reading.relative(-reading.step_sums(recording, "")[0][0], weight.numpy()) < 1e-6


class _NegativeBit(torch.autograd.Function):
    """The identity, whose gradient has the negative bit."""

    @staticmethod
    def forward(ctx: object, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-gradient)


def test_gradients_with_the_negative_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 6)
    x = torch.randn(4, 5)
    recording, weight, _ = one_step(
        layer, tmp_path / "r", lambda layer: _NegativeBit.apply(layer(x)).pow(2).sum()
    )
    assert recording.marks[""] == []
    assert reading.relative(-reading.step_sums(recording, "")[0][0], weight.numpy()) < 1e-6


@pytest.mark.filterwarnings("error")
def test_infinite_values_that_cancel_do_not_warn(tmp_path: Path) -> None:
    layer = nn.Linear(5, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Recorder(layer, optimizer, tmp_path / "r"):
        value = layer(torch.randn(4, 5)).sum() * torch.inf
        value.backward(retain_graph=True)
        (-value).backward()
        optimizer.step()
    (mark,) = Recording.open(tmp_path / "r").marks[""]
    assert "not finite" in mark.reason


def test_the_sum_as_loss_whose_gradient_is_expanded(tmp_path: Path) -> None:
    layer = nn.Linear(5, 6)
    x = torch.randn(4, 3, 5)
    recording, weight, _ = one_step(layer, tmp_path / "r", lambda layer: layer(x).sum())
    assert reading.relative(-reading.step_sums(recording, "")[0][0], weight.numpy()) < 1e-6


def test_input_buffer_reused_after_the_layer(tmp_path: Path) -> None:
    """The layer's input is overwritten before backward, as loops with a fixed buffer do.

    Autograd refuses to go on if it needs the input itself, so it works on a copy; the recorder's
    key must not follow the buffer either way.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer, seen = torch.empty(4, 5), []
    with Recorder(model, optimizer, tmp_path / "r", layers=["0"]):
        for _ in range(3):
            buffer.copy_(torch.randn(4, 5))
            seen.append(buffer.clone())
            loss = model(buffer).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            buffer.fill_(7.0)
            optimizer.step()
            buffer.fill_(8.0)
    recording = Recording.open(tmp_path / "r")
    for record, x in zip(recording.passes("0"), seen, strict=True):
        assert np.array_equal(reading.keys(recording, "0", record), x.numpy())


def test_input_modified_in_place_later_in_the_network(tmp_path: Path) -> None:
    """Behind autograd's back, so that backward uses the later input: the key is the one seen."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 6)
    x = torch.randn(4, 5)
    original = x.clone()

    def run(layer: nn.Linear) -> torch.Tensor:
        y = layer(x)
        x.data.copy_(torch.randn(4, 5))
        return y.pow(2).sum()

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Recorder(layer, optimizer, tmp_path / "r"):
        run(layer).backward()
        optimizer.step()
    recording = Recording.open(tmp_path / "r")
    (record,) = recording.passes("")
    assert np.array_equal(reading.keys(recording, "", record), original.numpy())
    # Autograd itself used the later input, so the rows do not explain the gradient: said so.
    assert [mark.from_step for mark in recording.marks[""]] == [0]


def test_called_with_keyword_arguments(tmp_path: Path) -> None:
    x = torch.randn(4, 5)
    recording, weight, _ = one_step(
        nn.Linear(5, 6), tmp_path / "r", lambda layer: layer(input=x).pow(2).sum()
    )
    assert reading.relative(-reading.step_sums(recording, "")[0][0], weight.numpy()) < 1e-6


def test_copies_and_pickles_of_the_model_are_not_recorded(tmp_path: Path) -> None:
    """Averaged copies (EMA) and torch.save take the model with its hooks inside."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    with Recorder(layer, optimizer, tmp_path / "r"):
        twin = copy.deepcopy(layer)
        stored = io.BytesIO()
        torch.save(layer, stored)
        twin(x).sum().backward()
        layer(x).pow(2).sum().backward()
        optimizer.step()
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert loaded(x).shape == (4, 6)
    assert [record.rows for record in Recording.open(tmp_path / "r").passes("")] == [4]


def test_hooks_are_gone_after_closing(tmp_path: Path) -> None:
    layer = nn.Linear(5, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Recorder(layer, optimizer, tmp_path / "r"):
        layer(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    assert not layer._forward_hooks
    assert not layer.weight._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class _Bypass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight, self.layer.bias)


def test_a_weight_used_behind_the_layers_back_is_an_error_at_the_first_step(
    tmp_path: Path,
) -> None:
    model = _Bypass()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    before = [parameter.clone() for parameter in model.parameters()]
    with Recorder(model, optimizer, tmp_path / "r"):
        model(x).pow(2).sum().backward()
        with pytest.raises(CaptureError, match=r"F\.linear.*\n.*out_proj") as caught:
            optimizer.step()
    assert "layers=" in str(caught.value)
    after = model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class _OtherSignature(nn.Linear):
    def forward(self, *, features: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.linear(features, self.weight, self.bias)


def test_a_subclass_called_in_its_own_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    layer = _OtherSignature(5, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with (
        Recorder(layer, optimizer, tmp_path / "r"),
        pytest.raises(CaptureError, match=r"_OtherSignature.*layers="),
    ):
        layer(features=torch.randn(4, 5))


def test_torch_func_transforms_in_the_loop_are_not_recorded(tmp_path: Path) -> None:
    """Their gradients are results; nothing of them reaches the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            torch.func.jacrev(model)(x)
            torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(x)
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    assert [record.rows for record in recording.passes("0")] == [4, 4, 4]
    reading.assert_rebuilds(tmp_path / "r")
