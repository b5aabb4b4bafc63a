"""Which rows belong to a step: those whose backward reached the gradient that the step used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dualform.record import Recorder
from dualform.store.recording import Recording

from . import reading

Model = nn.Sequential
Scenario = Callable[[Model, torch.Tensor], None]


def network() -> Model:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))


def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).sum()


def gradient_for_the_input(model: Model, x: torch.Tensor) -> None:
    torch.autograd.grad(model(x).sum(), x)
    loss(model, x).backward()


def backward_into_the_input_only(model: Model, x: torch.Tensor) -> None:
    model(x).sum().backward(inputs=[x])
    loss(model, x).backward()


def gradient_for_the_weight(model: Model, x: torch.Tensor) -> None:
    torch.autograd.grad(model(x).sum(), model[0].weight)
    loss(model, x).backward()


def generator_pass_then_none(model: Model, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    loss(model, x).backward()


def generator_pass_then_zeros(model: Model, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    loss(model, x).backward()


def generator_pass_then_zeroed_data(model: Model, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad.data.zero_()
    loss(model, x).backward()


def accumulation(model: Model, x: torch.Tensor) -> None:
    loss(model, x).backward()
    loss(model, x * 2).backward()
    loss(model, x[:2]).backward()


def two_backwards_through_one_forward(model: Model, x: torch.Tensor) -> None:
    y = model(x)
    y.sum().backward(retain_graph=True)
    y.pow(2).sum().backward()


def zeroed_between_two_backwards_through_one_forward(model: Model, x: torch.Tensor) -> None:
    y = model(x)
    y.sum().backward(retain_graph=True)
    model.zero_grad()
    y.pow(2).sum().backward()


def checkpoint_reentrant(model: Model, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=True).pow(2).sum().backward()


def checkpoint_not_reentrant(model: Model, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()


def layer_used_twice(model: Model, x: torch.Tensor) -> None:
    model(torch.tanh(model(x))).pow(2).sum().backward()


def several_forwards_then_one_backward(model: Model, x: torch.Tensor) -> None:
    (loss(model, x) + loss(model, x[:3]) * 2).backward()


def validation_without_gradients(model: Model, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x * 3)
    with torch.inference_mode():
        model(x.detach() * 3)
    loss(model, x).backward()
    with torch.no_grad():
        model(x * 3)


def validation_with_gradients(model: Model, x: torch.Tensor) -> None:
    kept = loss(model, x * 3)
    loss(model, x).backward()
    del kept


def forward_whose_backward_never_comes(model: Model, x: torch.Tensor) -> None:
    model(x * 3)
    loss(model, x).backward()
    model(x * 5)


def backward_that_breaks_off(model: Model, x: torch.Tensor) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):  # type: ignore[no-untyped-def]
            return y.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            raise ValueError("broken")

    y = model[2](Broken.apply(model[1](model[0](x))))
    with pytest.raises(ValueError, match="broken"):
        y.sum().backward()
    model.zero_grad()
    loss(model, x).backward()


def gradients_divided_by_hand(model: Model, x: torch.Tensor) -> None:
    loss(model, x).backward()
    loss(model, x * 2).backward()
    for parameter in model.parameters():
        parameter.grad /= 2


ROWS = {
    gradient_for_the_input: [7],
    backward_into_the_input_only: [7],
    gradient_for_the_weight: [7],
    generator_pass_then_none: [7],
    generator_pass_then_zeros: [7],
    generator_pass_then_zeroed_data: [7],
    accumulation: [7, 7, 2],
    two_backwards_through_one_forward: [7],
    zeroed_between_two_backwards_through_one_forward: [7],
    checkpoint_reentrant: [7],
    checkpoint_not_reentrant: [7],
    layer_used_twice: [7, 7],
    several_forwards_then_one_backward: [7, 3],
    validation_without_gradients: [7],
    validation_with_gradients: [7],
    forward_whose_backward_never_comes: [7],
    backward_that_breaks_off: [7],
    gradients_divided_by_hand: [7, 7],
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("scenario", ROWS, ids=lambda scenario: scenario.__name__)
def test_rows_of_a_step(tmp_path: Path, scenario: Scenario, set_to_none: bool) -> None:
    """Three steps of the scenario: the rows, scaled by the ledger, are the step's gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients: dict[str, list[np.ndarray]] = {"0": [], "2": []}
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(3):
            x = torch.randn(7, 5, requires_grad=True)
            optimizer.zero_grad(set_to_none=set_to_none)
            scenario(model, x)
            for name in gradients:
                gradients[name].append(model.get_submodule(name).weight.grad.double().numpy())
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    ledger = recording.ledger()
    for name, expected in gradients.items():
        assert recording.marks[name] == []
        passes = recording.passes(name)
        assert [record.rows for record in passes] == ROWS[scenario] * 3
        assert [record.step for record in passes] == sorted([0, 1, 2] * len(ROWS[scenario]))
        sums, _ = reading.step_sums(recording, name)
        for step, row in enumerate(ledger.parameters[f"{name}.weight"]):
            assert reading.relative(-row.scale * sums[step], expected[step]) < 1e-6
    reading.assert_rebuilds(tmp_path / "r")


def test_rows_are_in_forward_order_and_layers_share_blocks(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    xs = [torch.randn(n, 5) for n in (2, 3, 4)]
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        losses = []
        for i, x in enumerate(xs):
            recorder.annotate(part=i)
            losses.append(loss(model, x))
        for value in reversed(losses):
            value.backward()
        optimizer.step()
    recording = Recording.open(tmp_path / "r")
    for record, x in zip(recording.passes("0"), xs, strict=True):
        assert np.array_equal(reading.keys(recording, "0", record), x.numpy())
    blocks = [record.block for record in recording.passes("0")]
    assert blocks == [record.block for record in recording.passes("2")]
    assert recording.read_rows(blocks)["part"].to_pylist() == [0] * 2 + [1] * 3 + [2] * 4


def test_a_skipped_step_keeps_no_rows(tmp_path: Path) -> None:
    """As GradScaler skips a step with overflowing gradients: step() is never called."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for i in range(4):
            recorder.annotate(part=i)
            optimizer.zero_grad()
            loss(model, torch.randn(7, 5)).backward()
            if i != 1:
                optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 3
    assert recording.marks == {"0": [], "2": []}
    blocks = [record.block for record in recording.passes("0")]
    assert recording.read_rows(blocks)["part"].to_pylist() == [0] * 7 + [2] * 7 + [3] * 7


def test_a_layer_left_out_of_some_steps(tmp_path: Path) -> None:
    """A branch that a step does not use: its gradient is None, and nothing moves."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with Recorder(model, optimizer, tmp_path / "r"):
        for i in range(6):
            optimizer.zero_grad()
            x = torch.randn(7, 5)
            (loss(model, x) if i % 2 == 0 else model[0](x).pow(2).sum()).backward()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    rows = recording.ledger().parameters
    assert [row.took_part for row in rows["2.weight"]] == [True, False] * 3
    assert [row.took_part for row in rows["0.weight"]] == [True] * 6
    assert [record.step for record in recording.passes("2")] == [0, 2, 4]
    reading.assert_rebuilds(tmp_path / "r")


def test_a_zeroed_gradient_still_decays_and_moves_by_momentum(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with Recorder(model, optimizer, tmp_path / "r"):
        for i in range(5):
            optimizer.zero_grad(set_to_none=False)
            loss(model, torch.randn(7, 5)).backward()
            if i in (2, 3):
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert [record.step for record in recording.passes("0")] == [0, 1, 4]
    assert all(row.took_part for row in recording.ledger().parameters["0.weight"])
    assert recording.marks == {"0": [], "2": []}
    reading.assert_rebuilds(tmp_path / "r")


def test_frozen_and_unfrozen_midway(tmp_path: Path) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r", layers=["0", "2"]):
        for i in range(6):
            if i == 2:
                model[0].weight.requires_grad_(True)
            if i == 4:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            loss(model, torch.randn(7, 5)).backward()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert [record.step for record in recording.passes("0")] == list(range(6))
    assert [record.step for record in recording.passes("2")] == [0, 1, 2, 3]
    assert recording.marks == {"0": [], "2": []}
    took_part = [row.took_part for row in recording.ledger().parameters["0.weight"]]
    assert took_part == [False, False, True, True, True, True]
    reading.assert_rebuilds(tmp_path / "r")


@pytest.mark.parametrize("dead", ["keys", "values"])
@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_clipping_a_gradient_that_is_zero_drops_no_rows(
    tmp_path: Path, dead: str, clip: float
) -> None:
    """All keys zero (dead units before the layer) still train the bias; all values zero, nothing.
    Clipping touches those zeros at every step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r"):
        for i in range(6):
            optimizer.zero_grad()
            odd = i % 2 == 1
            x = torch.zeros(7, 5) if odd and dead == "keys" else torch.randn(7, 5)
            (loss(model, x) * (0.0 if odd and dead == "values" else 1.0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    for name in ("0", "2"):
        assert [record.step for record in recording.passes(name)] == list(range(6))
    reading.assert_rebuilds(tmp_path / "r")


def test_a_bias_gradient_that_was_zeroed_drops_rows_whose_keys_are_zero(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r"):
        for i in range(6):
            optimizer.zero_grad()
            loss(model, torch.zeros(7, 5) if i in (2, 3) else torch.randn(7, 5)).backward()
            if i == 3:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    for name in ("0", "2"):
        assert [record.step for record in recording.passes(name)] == [0, 1, 2, 4, 5]
    reading.assert_rebuilds(tmp_path / "r")


@pytest.mark.parametrize("time", [None, 3])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_biases_alone_are_trained(
    tmp_path: Path, time: int | None, in_place: bool, accumulate: int
) -> None:
    """As when only biases are tuned: rows that the weight takes no part in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=in_place), nn.Linear(6, 2))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shape = (7, 5) if time is None else (7, time, 5)
    with Recorder(model, optimizer, tmp_path / "r", layers=["0", "2"]):
        for i in range(6):
            optimizer.zero_grad()
            loss(model, torch.randn(shape)).backward()
            if i == 2:
                optimizer.zero_grad(set_to_none=False)
            for _ in range(accumulate):
                loss(model, torch.randn(shape)).backward()
            with torch.no_grad():
                loss(model, torch.randn(shape))
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    for name in ("0", "2"):
        rows = [record.rows for record in recording.passes(name) if record.step == 2]
        assert rows == [7 * (time or 1)] * accumulate
    reading.assert_rebuilds(tmp_path / "r", parameters=["0.bias", "2.bias"])


def test_a_weights_gradient_alone_is_dropped_or_zeroed(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r"):
        for i in range(6):
            optimizer.zero_grad()
            loss(model, torch.randn(7, 5)).backward()
            if i == 2:
                model[0].weight.grad = None
            if i == 4:
                model[0].weight.grad.zero_()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    assert len(recording.passes("0")) == 6
    reading.assert_rebuilds(tmp_path / "r")


def train_with_toggles(path: Path | None, bias: bool, when: str, time: int | None) -> Model:
    """Every other step the first weight is frozen in the forward or in the backward alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6, bias=bias), nn.Tanh(), nn.Linear(6, 2))
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with nullcontext() if path is None else Recorder(model, optimizer, path):
        for i in range(6):
            optimizer.zero_grad()
            if when == "second backward":
                loss(model, torch.randn(7, 5)).backward()
            weight.requires_grad_(i % 2 == 0 or when != "forward")
            # A sequence that is not contiguous adds its bias in a node of its own.
            x = torch.randn(7, 5) if time is None else torch.randn(5, 7, time).permute(1, 2, 0)
            value = loss(model, x)
            weight.requires_grad_(i % 2 == 0 or when == "forward")
            value.backward()
            weight.requires_grad_(True)
            optimizer.step()
    return model


@pytest.mark.parametrize("time", [None, 3])
@pytest.mark.parametrize("when", ["forward", "backward", "second backward"])
@pytest.mark.parametrize("bias", [True, False])
def test_frozen_in_the_forward_or_the_backward_alone(
    tmp_path: Path, bias: bool, when: str, time: int | None
) -> None:
    model = train_with_toggles(tmp_path / "r", bias, when, time)
    plain = train_with_toggles(None, bias, when, time)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    recording = Recording.open(tmp_path / "r")
    if bias and when == "second backward":  # rows that the two gradients do not share
        (mark,) = recording.marks["0"]
        assert mark.from_step == 1
        assert "frozen in part of the step" in mark.reason
        reading.assert_rebuilds(tmp_path / "r", ["0.bias", "2.weight", "2.bias"])
        return
    assert recording.marks == {"0": [], "2": []}
    rows = sum(record.rows for record in recording.passes("0"))
    batch = 7 * (time or 1)
    assert rows == batch * (6 if bias else 3) + (7 * 6 if when == "second backward" else 0)
    reading.assert_rebuilds(tmp_path / "r")


def test_frozen_with_its_bias_before_the_backward(tmp_path: Path) -> None:
    """Nothing reaches the layer, and what reached it before stays."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r"):
        loss(model, torch.randn(7, 5)).backward()
        value = loss(model, torch.randn(4, 5))
        model[0].requires_grad_(False)
        value.backward()
        model[0].requires_grad_(True)
        optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    assert [record.rows for record in recording.passes("0")] == [7]
    assert [record.rows for record in recording.passes("2")] == [7, 4]
    reading.assert_rebuilds(tmp_path / "r")


def test_a_hook_of_the_users_takes_the_gradient(tmp_path: Path) -> None:
    """As where an optimizer runs in the backward: the weight's rows do not reach this step."""
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, torch.randn(7, 5)).backward()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    reading.assert_rebuilds(tmp_path / "r", ["0.bias", "2.weight", "2.bias"])
