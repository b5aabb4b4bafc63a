"""RecorderCallback in Lightning's Trainer: columns, closing, resuming, accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record import reading
from torch import nn

from dualform.record import AnnotationError, OptimizerError
from dualform.store.recording import Recording

lightning = pytest.importorskip("lightning")
from dualform.record.integrations.lightning import RecorderCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework's own

INPUTS = torch.randn(48, 12, generator=torch.Generator().manual_seed(1))


class Pairs(torch.utils.data.Dataset[Any]):
    """Points, labels and numbers: as tuples, or by name with a text."""

    def __init__(self, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, i: int) -> Any:
        if not self.named:
            return INPUTS[i], i % 3, i
        return {"x": INPUTS[i], "labels": i % 3, "example": i, "source": f"file {i // 10}"}


class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
    """Three classes; raises at a step where told."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
        self.fails_at = fails_at

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("out of luck")
        x, labels = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch[:2]
        return nn.functional.cross_entropy(self.layers(x), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def trainer(tmp_path: Path, callback: Any, **settings: Any) -> Any:
    return lightning.Trainer(
        callbacks=[callback] if not isinstance(callback, list) else callback,
        default_root_dir=tmp_path,
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        },
    )


def loader(named: bool = True, shuffle: bool = True) -> Any:
    return torch.utils.data.DataLoader(Pairs(named), batch_size=8, shuffle=shuffle)


def rows_of(path: Path, layer: str) -> list[dict[str, Any]]:
    recording = Recording.open(path)
    blocks = [record.block for record in recording.passes(layer)]
    found: list[dict[str, Any]] = recording.read_rows(blocks).to_pylist()
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
def test_columns_by_name(tmp_path: Path, accumulation: int) -> None:
    callback = RecorderCallback(tmp_path / "r", annotate=("labels", "source"))
    trainer(tmp_path, callback, accumulate_grad_batches=accumulation, gradient_clip_val=0.1).fit(
        Module(), loader()
    )
    assert callback.recorder is None
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 12 // accumulation
    assert list(recording.manifest.layers) == ["layers.0", "layers.2"]
    reading.assert_rebuilds(tmp_path / "r")
    rows = rows_of(tmp_path / "r", "layers.0")
    assert len(rows) == 96
    for row in rows:
        assert row["labels"] == row["example"] % 3
        assert row["source"] == f"file {row['example'] // 10}"


def test_columns_by_place(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "r", annotate={"label": 1, "example": -1})
    trainer(tmp_path, callback).fit(Module(), loader(named=False))
    recording = Recording.open(tmp_path / "r")
    rows = rows_of(tmp_path / "r", "layers.0")
    keys = np.concatenate(
        [reading.keys(recording, "layers.0", record) for record in recording.passes("layers.0")]
    )
    for row, key in zip(rows, keys, strict=True):
        assert row["label"] == row["example"] % 3
        np.testing.assert_array_equal(key, INPUTS[row["example"]].numpy())


def test_closed_when_fit_raises(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "r")
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path, callback).fit(Module(fails_at=7), loader())
    assert callback.recorder is None
    recording = Recording.open(tmp_path / "r")
    assert recording.complete
    assert recording.steps == 7
    reading.assert_rebuilds(tmp_path / "r")


def test_resumed_at_a_checkpoint(tmp_path: Path) -> None:
    """One epoch, then another from its checkpoint: the same memory as two at once."""

    def fit(name: str, epochs: int, step: int | None, checkpoint: str | None) -> Any:
        made = trainer(
            tmp_path,
            RecorderCallback(tmp_path / name, resume_at_step=step),
            max_epochs=epochs,
            enable_checkpointing=True,
        )
        made.fit(Module(), loader(shuffle=False), ckpt_path=checkpoint, weights_only=False)
        return made

    fit("one", 2, None, None)
    fit("two", 1, None, None).save_checkpoint(tmp_path / "first.ckpt")
    fit("two", 2, 6, str(tmp_path / "first.ckpt"))
    one, two = Recording.open(tmp_path / "one"), Recording.open(tmp_path / "two")
    assert one.steps == two.steps == 12
    reading.assert_rebuilds(tmp_path / "two")
    for name in one.manifest.layers:
        for a, b in zip(one.passes(name), two.passes(name), strict=True):
            np.testing.assert_array_equal(reading.keys(one, name, a), reading.keys(two, name, b))


@pytest.mark.parametrize(
    ("annotate", "named", "said"),
    [
        (("author",), True, "no 'author' for column 'author'; it is .*'labels'"),
        ({"label": 7}, False, "no 7 for column 'label'; it is of type list and length 3"),
    ],
)
def test_a_column_that_is_not_there(tmp_path: Path, annotate: Any, named: bool, said: str) -> None:
    callback = RecorderCallback(tmp_path / "r", annotate=annotate)
    with pytest.raises(AnnotationError, match=said):
        trainer(tmp_path, callback).fit(Module(), loader(named))


@pytest.mark.parametrize("annotate", [("rows",), {"rows": 1}, {7: 1}], ids=repr)
def test_a_name_that_no_column_has(tmp_path: Path, annotate: Any) -> None:
    with pytest.raises(AnnotationError, match=r"is no name for a column.* annotate=\{'my_"):
        RecorderCallback(tmp_path / "r", annotate=annotate)


class TwoOptimizers(Module):
    """Each layer has its own, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        loss = super().training_step(batch, number)
        optimizer = self.optimizers()[number % 2]
        self.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.layers[0].parameters(), lr=0.05),
            torch.optim.SGD(self.layers[2].parameters(), lr=0.05),
        ]


def test_one_of_several_optimizers(tmp_path: Path) -> None:
    with pytest.raises(OptimizerError, match="the module has 2 optimizers"):
        trainer(tmp_path, RecorderCallback(tmp_path / "r")).fit(TwoOptimizers(), loader())
    callbacks = [RecorderCallback(tmp_path / f"r{i}", optimizer=i) for i in (0, 1)]
    trainer(tmp_path, callbacks).fit(TwoOptimizers(), loader())
    for i, name in enumerate(["layers.0", "layers.2"]):
        recording = Recording.open(tmp_path / f"r{i}")
        assert list(recording.manifest.layers) == [name]
        assert recording.steps == 6
        reading.assert_rebuilds(tmp_path / f"r{i}")


def test_rows_that_are_recorded(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "r", rows=lambda batch: batch["labels"] != 0)
    trainer(tmp_path, callback).fit(Module(), loader())
    rows = rows_of(tmp_path / "r", "layers.0")
    assert {row["labels"] for row in rows} == {1, 2}
    assert len(rows) == 64
    assert Recording.open(tmp_path / "r").dropped("layers.0") == {"rows": 32}
