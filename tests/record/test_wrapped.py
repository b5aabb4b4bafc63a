"""Optimizers as training frameworks hand them out: the real packages, and what imitates them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualform.record import OptimizerError, Recorder
from dualform.store.recording import Recording

from . import reading


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def assert_exact(path: Path, steps: int) -> None:
    recording = Recording.open(path)
    assert recording.steps == steps
    assert recording.manifest.optimizer == "SGD"
    assert not any(recording.marks.values())
    reading.assert_rebuilds(path)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_accelerate(tmp_path: Path, accumulation: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    data = torch.utils.data.DataLoader(torch.randn(96, 12), batch_size=8)
    model = network()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data)
    assert type(optimizer) is not torch.optim.SGD
    with Recorder(model, optimizer, tmp_path / "r"):
        for x in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert_exact(tmp_path / "r", 12 // accumulation)
    assert len(Recording.open(tmp_path / "r").passes("0")) == 12


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning(tmp_path: Path, automatic: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()
            self.automatic_optimization = automatic

        def on_train_start(self) -> None:
            optimizer = self.optimizers()
            assert type(optimizer).__name__ == "LightningSGD"
            self.recorder = Recorder(self.layers, optimizer, tmp_path / "r")

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.layers(x).square().mean()
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_end(self) -> None:
            self.recorder.close()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the framework's own, about workers and such
        lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(Module(), torch.utils.data.DataLoader(torch.randn(48, 12), batch_size=8))
    assert_exact(tmp_path / "r", 12)


def test_lightning_fabric(tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = network()
    wrapped, optimizer = fabric.setup(model, sgd(model))
    assert type(optimizer).__name__ == "FabricSGD"
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(12):
            optimizer.zero_grad()
            fabric.backward(wrapped(torch.randn(8, 12)).square().mean())
            optimizer.step()
    assert_exact(tmp_path / "r", 12)


class Holder:
    """Passes every step on, and is no optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [Holder, lambda optimizer: Holder(Holder(optimizer))])
def test_a_holder(tmp_path: Path, wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    model = network()
    optimizer = wrap(sgd(model))
    if isinstance(optimizer.optimizer, Holder):  # one that holds no optimizer itself is refused
        with pytest.raises(OptimizerError, match="give the optimizer that it was made from"):
            Recorder(model, optimizer, tmp_path / "r")
        return
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 12)).square().mean().backward()
            optimizer.step()
    assert_exact(tmp_path / "r", 12)


class Renamed(torch.optim.SGD):
    """A subclass that changes nothing of the step, as frameworks make them."""


class Rescaled(torch.optim.SGD):
    """A subclass that does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """An optimizer of its own, with hooks of its own, that works on another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


def test_a_subclass_of_sgd(tmp_path: Path) -> None:
    """What counts is whose step it takes, whichever class was made first."""
    for kind, reason in ((Rescaled, "Rescaled"), (Renamed, None), (Lookahead, "Lookahead")):
        model = network()
        made = sgd(model) if kind is Lookahead else model.parameters()
        optimizer = kind(made, **({} if kind is Lookahead else {"lr": 0.05}))  # type: ignore[arg-type]
        path = tmp_path / kind.__name__
        with Recorder(model, optimizer, path):
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.randn(8, 12)).square().mean().backward()
                optimizer.step()
        marks = Recording.open(path).marks["0"]
        if reason is None:
            assert not marks
            reading.assert_rebuilds(path)
        else:
            assert reason in marks[0].reason
