"""Backwards of several threads through one graph: every row is there, whoever comes first."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dualform.record import Recorder
from dualform.record.watch import GradientWatch
from dualform.store.recording import Recording

from . import reading

THREADS = 6


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class SlowlyRead(nn.Parameter):
    """A parameter that hands out a gradient that it has not only after others had their turn."""

    @property
    def grad(self) -> torch.Tensor | None:
        found = torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]
        time.sleep(0.003 if found is None else 0)
        return found  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def train(path: Path, steps: int, set_to_none: bool, slow: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, THREADS))
    if slow:
        for layer in (model[0], model[2]):
            layer.weight = SlowlyRead(layer.weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with Recorder(model, optimizer, path):
        for _ in range(steps):
            model(torch.randn(8, 12)).square().mean().backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            losses = model(torch.randn(8, 12)).square().mean(0)
            threads = [
                threading.Thread(target=loss.backward, kwargs={"retain_graph": True})
                for loss in losses
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()


def assert_whole(path: Path, steps: int) -> None:
    recording = Recording.open(path)
    assert not any(recording.marks.values())
    for layer in ("0", "2"):
        assert [record.step for record in recording.passes(layer)] == list(range(steps))
    reading.assert_rebuilds(path)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.usefixtures("_eager_threads")
def test_all_rows_are_there(tmp_path: Path, set_to_none: bool) -> None:
    train(tmp_path / "r", 20, set_to_none)
    assert_whole(tmp_path / "r", 20)


def test_while_another_finds_no_gradient(tmp_path: Path) -> None:
    """One thread finds that there is none yet; before it acts on that, others bring their rows."""
    train(tmp_path / "r", 8, set_to_none=True, slow=True)
    assert_whole(tmp_path / "r", 8)


def test_while_another_looks_at_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread finds the gradient zeroed; before it acts on that, the others bring their rows."""
    zeroed = GradientWatch.zeroed

    def slowly(watch: GradientWatch, grad: torch.Tensor) -> bool:
        found = zeroed(watch, grad)
        time.sleep(0.02 if found else 0)
        return found

    monkeypatch.setattr(GradientWatch, "zeroed", slowly)
    train(tmp_path / "r", 8, set_to_none=False)
    assert_whole(tmp_path / "r", 8)
