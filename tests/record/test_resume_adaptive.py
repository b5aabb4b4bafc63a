"""Checkpoints under optimizers without one coefficient a step: the right one goes on, though some
of its gradients are nothing but rounding; others are refused, and nothing is dropped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualform.record import Recorder, ResumeError
from dualform.store.recording import Recording

from .test_elements import LAYERS, OPTIMIZERS, Model

STEPS = 30
Checkpoint = dict[str, Any]


def train(model: Model, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        torch.manual_seed(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(torch.randn(16, 12)), torch.randint(0, 3, (16,))
        ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def made(
    name: str, checkpoint: Checkpoint | None = None, seed: int = 0
) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


def kept(model: Model, optimizer: torch.optim.Optimizer) -> Checkpoint:
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return copy.deepcopy(checkpoint)


def record(path: Path, name: str, seed: int = 0) -> dict[int, Checkpoint]:
    """Train and record, with a checkpoint at every tenth step."""
    model, optimizer = made(name, seed=seed)
    checkpoints = {}
    with Recorder(model, optimizer, path, layers=LAYERS):
        for step in range(0, STEPS, 10):
            train(model, optimizer, step, step + 10)
            checkpoints[step + 10] = kept(model, optimizer)
    return checkpoints


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("adamw", "rmsprop", "adagrad")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_the_right_checkpoint_goes_on_and_others_do_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r"
    checkpoints = record(path, name)
    others = record(tmp_path / "other", name, seed=1)

    def refused(checkpoint: Checkpoint, message: str, at: int = 20) -> None:
        with pytest.raises(ResumeError, match=message):
            Recorder(*made(name, checkpoint), path, layers=LAYERS, resume_at_step=at)
        assert Recording.open(path).steps == STEPS

    right = checkpoints[20]
    refused(checkpoints[10], "says that it took 10 steps with .*the recording 20")
    refused(checkpoints[30], "says that it took 30 steps with .*the recording 20")
    fresh = kept(*made(name))
    refused({**right, "optimizer": fresh["optimizer"]}, "says that it took 0 steps")
    refused({**right, "model": checkpoints[10]["model"]}, "is not what the recording says")
    refused({**right, "model": others[20]["model"]}, "is not what the recording says")
    refused({**right, "optimizer": others[20]["optimizer"]}, "is not what the recording says")
    for at in (30, 20):
        model, optimizer = made(name, checkpoints[at])
        with Recorder(model, optimizer, path, layers=LAYERS, resume_at_step=at):
            train(model, optimizer, at, STEPS)
        assert Recording.open(path).steps == STEPS


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
@pytest.mark.parametrize("unit", [0, 7])
def test_a_unit_that_was_changed_is_seen(tmp_path: Path, name: str, unit: int) -> None:
    def doubled(state: Any, key: Callable[[Any], torch.Tensor]) -> Any:
        key(state)[unit] *= 2
        return state

    path = tmp_path / "r"
    right = record(path, name)[20]
    edited = doubled(copy.deepcopy(right), lambda checkpoint: checkpoint["model"]["query.weight"])
    with pytest.raises(ResumeError, match=r"parameter 'query.weight', or its state"):
        Recorder(*made(name, edited), path, layers=LAYERS, resume_at_step=20)
