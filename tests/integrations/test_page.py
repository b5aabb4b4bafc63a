"""docs/training-stacks.md: its code runs beside a model and data of each framework."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from record import reading
from torch import nn

from dualform.record import Recorder
from dualform.store.recording import Recording

from . import training

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own

PAGE = Path(__file__).parents[2] / "docs" / "training-stacks.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
accelerate_forgets = training.accelerate_forgets


class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs() -> Any:
    labels = torch.arange(24) % 3
    points = torch.utils.data.TensorDataset(torch.randn(24, 4), labels)
    return torch.utils.data.DataLoader(points, batch_size=8)


def test_every_block_has_a_test() -> None:
    assert len(BLOCKS) == 4


def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = transformers.TrainingArguments(
        "out", max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    data = [{"input_ids": [1, 2, 3], "labels": i % 3} for i in range(24)]
    space = {"model": training.bert(), "args": args, "data": data}
    exec(compile(BLOCKS[0], str(PAGE), "exec"), space)
    assert Recording.open("runs/a").steps == 3


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[1].replace("lightning.Trainer(", "lightning.Trainer(max_epochs=1, ")
    exec(compile(code, str(PAGE), "exec"), {"module": Module(), "loader": pairs()})
    assert Recording.open("runs/b").steps == 3
    reading.assert_rebuilds(Path("runs/b"))


def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    space = {"torch": torch, "model": model, "optimizer": optimizer, "loader": pairs()}
    exec(compile(BLOCKS[2], str(PAGE), "exec"), space)
    assert Recording.open("runs/c").steps == 3
    reading.assert_rebuilds(Path("runs/c"))


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one process records as one without a group; test_ranks.py has several."""
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(4, 3))
    code, filled = re.subn(
        r"    \.\.\. .*",
        "    for inputs, labels in loader:\n"
        "        recorder.annotate(label=labels)\n"
        "        optimizer.zero_grad()\n"
        "        torch.nn.functional.cross_entropy(model(inputs), labels).backward()\n"
        "        optimizer.step()",
        BLOCKS[3],
    )
    assert filled == 1
    space = {"torch": torch, "Recorder": Recorder, "net": net, "loader": pairs()}
    space["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    try:
        exec(compile(code, str(PAGE), "exec"), space)
    finally:
        torch.distributed.destroy_process_group()
    recording = Recording.open("runs/d")
    assert (recording.steps, list(recording.marks)) == (3, ["0"])
