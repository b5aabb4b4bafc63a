"""A second training that is not the first one is found out, and gives no answer."""

from __future__ import annotations

import digits
import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import Recorder
from dualform.replay import DivergedError, FirstRun, Replay, ReplayError

from . import training

QUERY = np.ones((1, 64), np.float32)


@pytest.fixture(scope="module")
def first() -> FirstRun:
    run = FirstRun()
    training.mlp(run)
    return run


def test_another_order_of_batches(first: FirstRun) -> None:
    replay = Replay(first)
    answer = replay.top_k("0", QUERY, 3)
    with pytest.raises(DivergedError, match="layer '0' has other keys at step 0") as raised:
        training.mlp(replay, seed=1)
    assert "same batches in the same order" in str(raised.value)
    with pytest.raises(ReplayError, match="no answer yet"):
        answer.result()


def test_a_pixel_of_one_image(first: FirstRun) -> None:
    replay = Replay(first)
    replay.top_k("2", np.ones((1, 48), np.float32), 3)
    with pytest.raises(DivergedError, match="layer '0' has other keys at step 50"):
        training.mlp(replay, edit_at=50)


@pytest.mark.parametrize(("steps", "message"), [(80, "after 80 of 90"), (95, "step 90 comes")])
def test_another_number_of_steps(first: FirstRun, steps: int, message: str) -> None:
    replay = Replay(first)
    answer = replay.top_k("0", QUERY, 3)
    with pytest.raises(DivergedError, match=message):
        training.mlp(replay, steps=steps)
    with pytest.raises(ReplayError, match="no answer yet"):
        answer.result()


def run(sink: object, lr: float, factor: float = 1.0, start: float = 0.0, hand: float = 0) -> None:
    """A few steps that differ in one thing."""
    model = nn.Sequential(nn.Linear(64, 10))
    with torch.no_grad():
        model[0].weight.fill_(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = digits.load()
    with Recorder(model, optimizer, sink) as recorder:  # type: ignore[arg-type]
        recorder.annotate(label=0)
        loss = nn.functional.cross_entropy(model(data.images[:32]), data.labels[:32])
        (factor * loss).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight += hand


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.2}, "the ledger of '0.weight' differs at step 0: lr was 0.1 and is 0.2"),
        ({"factor": 2.0}, "layer '0' has other values at step 0"),
        ({"start": 0.5}, "'0.weight' differs before the first step"),
        ({"hand": 0.5}, "'0.weight' differs after the last step"),
    ],
)
def test_what_differs_is_named(change: dict[str, float], message: str) -> None:
    torch.manual_seed(0)
    first = FirstRun()
    run(first, lr=0.1)
    replay = Replay(first)
    replay.top_k("0", QUERY, 3)
    torch.manual_seed(0)
    with pytest.raises(DivergedError, match=message):
        run(replay, **{"lr": 0.1, **change})


def test_other_layers(first: FirstRun) -> None:
    replay = Replay(first)
    replay.top_k("0", QUERY, 3)
    model = digits.network()
    with pytest.raises(DivergedError, match="layers was"):
        Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), replay, layers=["0"])


def test_a_replay_runs_once(first: FirstRun) -> None:
    replay = Replay(first)
    replay.top_k("0", QUERY, 3)
    training.mlp(replay)
    with pytest.raises(ReplayError, match="runs once"):
        training.mlp(replay)
