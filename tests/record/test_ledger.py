"""The ledger and the rows, read back, rebuild the trained weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import Recorder
from dualform.store.recording import Recording

from . import reading


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))


def train(
    path: Path,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    steps: int,
    before_step: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Recording:
    with Recorder(model, optimizer, path, **options):
        for step in range(steps):
            x, y = torch.randn(16, 12), torch.randint(0, 3, (16,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before_step(step)
            optimizer.step()
    return Recording.open(path)


SETTINGS = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.8, "dampening": 0.1, "weight_decay": 0.01, "maximize": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rebuilds_the_trained_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def clip_and_schedule(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        if step > 0:
            schedule.step()

    recording = train(tmp_path / "r", optimizer, model, 200, clip_and_schedule)
    assert recording.marks == {"0": [], "2": []}
    reading.assert_rebuilds(tmp_path / "r")


def test_decay_on_weights_only_and_a_learning_rate_per_layer(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(
        [
            {"params": [model[0].weight], "weight_decay": 0.1, "lr": 0.02},
            {"params": [model[0].bias], "momentum": 0.5},
            {"params": model[2].parameters(), "lr": torch.tensor(0.03)},
        ],
        lr=0.01,
    )
    recording = train(tmp_path / "r", optimizer, model, 50)
    parameters = recording.ledger().parameters
    assert parameters["0.weight"][7].settings.weight_decay == 0.1
    assert parameters["0.bias"][7].settings.weight_decay == 0.0
    assert parameters["0.bias"][7].settings.momentum == 0.5
    assert [row.first for row in parameters["0.bias"]] == [True] + [False] * 49
    assert parameters["2.bias"][7].settings.lr == float(torch.tensor(0.03))
    reading.assert_rebuilds(tmp_path / "r")


def test_momentum_that_starts_late_and_a_group_added_midway(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.02)

    def change(step: int) -> None:
        if step == 10:
            optimizer.param_groups[0]["momentum"] = 0.9
        if step == 20:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

    recording = train(tmp_path / "r", optimizer, model, 40, change, layers=["0"])
    rows = recording.ledger().parameters["0.weight"]
    assert [row.step for row in rows if row.first] == [10]
    reading.assert_rebuilds(tmp_path / "r")


def test_a_resumed_run_keeps_its_momentum(tmp_path: Path) -> None:
    """Buffers that the optimizer has when recording starts are part of the initial state."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train(tmp_path / "first", optimizer, model, 10)
    recording = train(tmp_path / "second", optimizer, model, 30)
    assert "momentum:0.weight" in recording.initial()
    assert not any(row.first for row in recording.ledger().parameters["0.weight"])
    reading.assert_rebuilds(tmp_path / "second")


def test_a_state_loaded_after_the_recorder_was_made_is_the_initial_one(tmp_path: Path) -> None:
    source = network()
    model = network()
    nn.init.ones_(source[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with Recorder(model, optimizer, tmp_path / "r"):
        model.load_state_dict(source.state_dict())
        model(torch.randn(4, 12)).sum().backward()
        optimizer.step()
    assert (Recording.open(tmp_path / "r").initial()["0.weight"] == 1).all()
    assert Recording.open(tmp_path / "r").marks["0"] == []


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_by_norm_is_a_scale(tmp_path: Path, accumulate: int) -> None:
    """The scale is the clipping factor, to 1e-9 of a float64 reference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    expected: list[float] = []
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(accumulate):
                loss = nn.functional.cross_entropy(
                    model(torch.randn(32, 300)), torch.randint(0, 5, (32,))
                )
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            # The factor as PyTorch computes it, a float32 tensor.
            expected.append(float(torch.clamp(0.1 / (norm + 1e-6), max=1.0)))
            optimizer.step()
    assert all(factor < 0.9 for factor in expected)
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    for name in ("0.weight", "2.weight"):
        for row, factor in zip(recording.ledger().parameters[name], expected, strict=True):
            # 8,192 elements from the second step on, 1,000 before and in the small layer; each is
            # rounded by at most 6e-8.
            many = name == "0.weight" and row.step > 0
            assert row.scale == pytest.approx(factor, rel=1e-9 if many else 4e-9)
    reading.assert_rebuilds(tmp_path / "r")


@pytest.mark.parametrize(
    "edit", ["in place", "data", "replaced", "negated", "unscaled then clipped"]
)
def test_every_way_of_scaling_a_gradient(tmp_path: Path, edit: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def scale(step: int) -> None:
        for p in model.parameters():
            if edit == "in place":
                p.grad *= 0.3
            elif edit == "data":
                p.grad.data.mul_(0.3)
            elif edit == "replaced":
                p.grad = p.grad * 0.3
            elif edit == "negated":
                p.grad.mul_(-0.3)
            else:
                p.grad.mul_(0.7)
        if edit == "unscaled then clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)

    recording = train(tmp_path / "r", optimizer, model, 20, scale)
    assert recording.marks == {"0": [], "2": []}
    if edit != "unscaled then clipped":
        sign = -1 if edit == "negated" else 1
        for name in ("0.weight", "0.bias"):
            for row in recording.ledger().parameters[name]:
                assert row.scale == pytest.approx(sign * 0.3, rel=1e-7)
    reading.assert_rebuilds(tmp_path / "r")


def test_a_factor_of_its_own_for_the_bias(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def scale(step: int) -> None:
        model[0].weight.grad.mul_(0.5)
        model[0].bias.grad.mul_(0.25)

    recording = train(tmp_path / "r", optimizer, model, 20, scale)
    assert recording.marks["0"] == []
    rows = recording.ledger().parameters
    assert rows["0.bias"][3].scale == pytest.approx(0.25, rel=1e-7)
    reading.assert_rebuilds(tmp_path / "r")


def test_gradients_changed_by_another_pre_hook(tmp_path: Path) -> None:
    """A hook that the user adds after the recorder still runs before the ledger is taken."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with Recorder(model, optimizer, tmp_path / "r"):
        optimizer.register_step_pre_hook(
            lambda *_: [p.grad.mul_(0.5) for p in model.parameters()] and None
        )
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 12)).pow(2).sum().backward()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": []}
    assert recording.ledger().parameters["0.weight"][2].scale == 0.5
    reading.assert_rebuilds(tmp_path / "r")


def test_a_step_with_a_closure(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for step in range(10):
            recorder.annotate(part=step)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.randn(16, 12)).pow(2).mean()
                loss.backward()
                return loss

            if step % 2:
                optimizer.step(closure)
            else:
                optimizer.step(closure=closure)
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 10
    blocks = [record.block for record in recording.passes("0")]
    parts = recording.read_rows(blocks)["part"].to_pylist()
    assert parts == [step for step in range(10) for _ in range(16)]
    reading.assert_rebuilds(tmp_path / "r")


def test_final_state_is_the_trained_one(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    recording = train(tmp_path / "r", optimizer, model, 10)
    final = recording.final()
    assert final is not None
    for name, parameter in model.named_parameters():
        assert np.array_equal(final[name], parameter.detach().numpy())
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert np.array_equal(final[f"momentum:{name}"], buffer.numpy())


def test_keys_alone(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    recording = train(tmp_path / "r", optimizer, model, 5, values=False)
    assert not recording.manifest.values
    assert recording.marks == {"0": [], "2": []}
    assert [record.values for record in recording.passes("0")] == [None] * 5
    with pytest.raises(ValueError, match="values=True"):
        recording.read_values(recording.passes("0")[0], np.empty(1))
    assert math.isclose(sum(record.rows for record in recording.passes("0")), 80)
