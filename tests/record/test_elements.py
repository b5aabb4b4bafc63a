"""A sample of every parameter's elements is followed under families without one coefficient:
training as it comes is not suspected, whatever changes weights or buffers behind its back is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import Recorder
from dualform.store.recording import Recording

STEPS = 40
CHANGED = "weights changed other than by the recorded optimizer steps"

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class Model(nn.Module):
    """With gradients that are only rounding: of a key's bias, of a bias before batch norm, of dead
    units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 20), nn.BatchNorm1d(20)
        self.query, self.key = nn.Linear(20, 20), nn.Linear(20, 20)
        self.dead, self.last = nn.Linear(20, 10), nn.Linear(30, 3)
        with torch.no_grad():
            self.dead.bias.fill_(-100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x)))
        h = torch.softmax(self.query(h) @ self.key(h).T, 1) @ h
        output: torch.Tensor = self.last(torch.cat([h, torch.relu(self.dead(h))], 1))
        return output


LAYERS = ("first", "query", "key", "dead", "last")


def train(
    path: Path,
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    meddle: Callable[[int, Model, torch.optim.Optimizer], None] = lambda step, model, given: None,
    scaler: torch.amp.GradScaler | None = None,
    apart: bool = False,
    clip: float = 1.0,
) -> dict[str, list[tuple[int, str]]]:
    """Train, and give the marks of every layer that tell of changed weights."""
    torch.manual_seed(0)
    model = Model()
    parameters: Any = list(model.parameters())
    if apart:
        parameters = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
    optimizer = optimizer_of(parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    with Recorder(model, optimizer, path, layers=LAYERS) as recorder:
        for step in range(STEPS):
            recorder.annotate(example=np.arange(16))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(torch.randn(16, 12)), torch.randint(0, 3, (16,))
            )
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            else:
                scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            meddle(step, model, optimizer)
    with Recording.open(path) as recording:
        return {
            name: [(mark.from_step, mark.reason) for mark in recording.marks[name]
                   if "optimizer" not in mark.reason or CHANGED in mark.reason]
            for name in LAYERS
        }  # fmt: skip


NONE: dict[str, list[tuple[int, str]]] = {name: [] for name in LAYERS}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_as_it_comes_is_as_predicted(tmp_path: Path, name: str) -> None:
    assert train(tmp_path / "r", OPTIMIZERS[name], apart=name in ("adamw", "nadam")) == NONE


@pytest.mark.parametrize("name", ["adamw", "fused"])
def test_with_a_grad_scaler_that_skips_a_step(tmp_path: Path, name: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert train(tmp_path / "r", OPTIMIZERS[name], scaler=scaler) == NONE


def weights(step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    if step == 20:
        model.last.weight.data *= 1.01


def buffers(step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    if step == 20:
        for tensor in optimizer.state[model.last.weight].values():
            if tensor.shape == model.last.weight.shape:
                tensor *= 1.5


def at_the_last_moment(step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """A step before the weights are looked at; weights still are as predicted then."""
    if step == 31:
        buffers(20, model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_that_change_are_seen_at_once(tmp_path: Path, name: str) -> None:
    found = train(tmp_path / "r", OPTIMIZERS[name], weights)
    assert found == {**NONE, "last": [(20, f"{CHANGED} (between step 20 and step 21)")]}


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "adafactor"])
@pytest.mark.parametrize("meddle", [buffers, at_the_last_moment])
def test_buffers_that_change_are_seen(
    tmp_path: Path, name: str, meddle: Callable[[int, Model, torch.optim.Optimizer], None]
) -> None:
    found = train(tmp_path / "r", OPTIMIZERS[name], meddle)
    assert found == {**NONE, "last": [(16, f"{CHANGED} (between step 16 and step 32)")]}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weights_that_are_no_longer_finite(tmp_path: Path, name: str) -> None:
    def end(step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
        if step == STEPS - 1:
            model.last.weight.data.fill_(float("nan"))

    found = train(tmp_path / "r", OPTIMIZERS[name], end)
    assert found == {
        **NONE,
        "last": [(39, "the weights are no longer finite (between step 39 and step 40)")],
    }
