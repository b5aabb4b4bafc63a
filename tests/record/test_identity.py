"""Training is bit for bit the same with and without the recorder."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import Recorder


def wide() -> nn.Module:
    """Wide enough for the paths that large layers take: threads in torch, sampling in the check."""
    return nn.Sequential(
        nn.Linear(300, 400),
        nn.ReLU(inplace=True),
        nn.Linear(400, 300),
        nn.ReLU(),
        nn.Linear(300, 7),
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 7))


def sequence() -> nn.Module:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(300, 64), nn.Linear(64, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x.view(-1, 4, 300))
            hidden.relu_()
            out: torch.Tensor = self.down(torch.dropout(hidden, 0.1, True))
            out[:, 0] = 0
            out = out.sum(1)
            return out

    return Tokens()


def train(
    make: Callable[[], nn.Module],
    path: Path | None,
    options: dict[str, float | bool],
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.05,
) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global state is what must not move)
    model = make()
    optimizer = kind(model.parameters(), lr=lr, **options)  # type: ignore[call-arg]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    recorder = None if path is None else Recorder(model, optimizer, path)
    losses = []
    for _ in range(20):
        x, y = torch.randn(64, 300), torch.randint(0, 7, (64,))
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y[: len(logits)])
        if recorder is not None:
            recorder.annotate(label=y[: len(logits)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    extra = [
        buffer
        for p in model.parameters()
        for buffer in optimizer.state.get(p, {}).values()
        if isinstance(buffer, torch.Tensor)
    ]
    dice = torch.cat(
        [torch.rand(3), torch.tensor([random.random()]), torch.from_numpy(np.random.rand(3))]  # noqa: NPY002
    )
    return losses, [*model.state_dict().values(), *extra], dice


@pytest.mark.parametrize("make", [wide, dropout, sequence])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {"momentum": 0.9, "foreach": False},
    ],
    ids=str,
)
def test_losses_weights_momentum_and_random_state(
    tmp_path: Path, make: Callable[[], nn.Module], options: dict[str, float | bool]
) -> None:
    threads = torch.get_num_threads()
    losses, state, dice = train(make, None, options)
    recorded_losses, recorded_state, recorded_dice = train(make, tmp_path / "r", options)
    assert recorded_losses == losses
    assert len(state) == len(recorded_state)
    assert all(torch.equal(a, b) for a, b in zip(state, recorded_state, strict=True))
    assert torch.equal(dice, recorded_dice)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adafactor, {}),
    ],
    ids=str,
)
def test_with_optimizers_that_are_followed_by_elements(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, float | bool]
) -> None:
    """Over more steps than lie between two looks at the weights."""
    losses, state, dice = train(dropout, None, options, kind, 1e-3)
    recorded_losses, recorded_state, recorded_dice = train(
        dropout, tmp_path / "r", options, kind, 1e-3
    )
    assert recorded_losses == losses
    assert len(state) == len(recorded_state)
    assert all(torch.equal(a, b) for a, b in zip(state, recorded_state, strict=True))
    assert torch.equal(dice, recorded_dice)


def test_the_loss_of_a_closure_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).pow(2).sum()
        loss.backward()
        return loss

    with Recorder(model, optimizer, tmp_path / "r"):
        expected = model(x).pow(2).sum().item()
        assert optimizer.step(closure).item() == expected
        assert optimizer.step() is None
