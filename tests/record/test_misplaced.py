"""Every wrapper in the wrong place, recorders that meet, and recorders in processes that do not
train: what is recorded all the same, and what is refused in words, with nothing left behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dualform.client import Client, capture_queries
from dualform.index import build_index
from dualform.record import LayerSelectionError, OptimizerError, OptionError, Recorder, RecordError
from dualform.store.recording import Recording

from . import reading

Given = tuple[Any, Any, Any]


def network() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


def copies(model: nn.Module, _: Any, path: Path) -> Given:
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0, 1]  # as where there are two GPUs
    return wrapped, _, path


@pytest.mark.parametrize(
    ("wrongly", "error", "said"),
    [
        (lambda m, o, p: (o, m, p), LayerSelectionError, "model must be .*not SGD: Recorder"),
        (lambda m, o, p: ([m], o, p), LayerSelectionError, "not list"),
        (lambda m, o, p: (m, [o], p), OptimizerError, "not list"),
        (lambda m, o, p: (m, m.parameters(), p), OptimizerError, "not generator"),
        (lambda m, o, p: (m, o, None), OptionError, "path_or_sink=None: it is the path of"),
        (lambda m, o, p: (m, o, 7), OptionError, "path_or_sink=7"),
        (copies, LayerSelectionError, "copies of the model on 2 devices.*DistributedDataParallel"),
        (
            lambda m, o, p: (copy.deepcopy(m), o, p),
            LayerSelectionError,
            "not among the optimizer's parameters; give it to the optimizer",
        ),
        (
            lambda m, o, p: (torch.optim.swa_utils.AveragedModel(m), o, p),
            LayerSelectionError,
            "not among the optimizer's parameters",
        ),
    ],
)
def test_refused_in_words(
    tmp_path: Path, wrongly: Callable[..., Given], error: type[Exception], said: str
) -> None:
    model, optimizer = network()
    with pytest.raises(error, match=said) as caught:
        Recorder(*wrongly(model, optimizer, tmp_path / "r"))
    assert isinstance(caught.value, RecordError)
    assert not list(tmp_path.iterdir())
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("which", ["scheduler", "data parallel"])
def test_taken_all_the_same(tmp_path: Path, which: str) -> None:
    """A scheduler holds the optimizer; layers of one device's DataParallel are the inner model's,
    in the recording as in queries."""
    model, optimizer = network()
    trained: nn.Module = nn.DataParallel(model) if which == "data parallel" else model
    given = torch.optim.lr_scheduler.StepLR(optimizer, 1) if which == "scheduler" else optimizer
    with Recorder(trained, given, tmp_path / "r"):  # type: ignore[arg-type]
        train(trained, optimizer)
    assert Recording.open(tmp_path / "r").marks == {"0": [], "2": []}
    reading.assert_rebuilds(tmp_path / "r")
    build_index(tmp_path / "r", tmp_path / "i")
    x = torch.randn(2, 4)
    with Client.local(tmp_path / "i") as client:
        queries = capture_queries(trained, x)
        output = client.dual_output("2", queries["2"]).values
    np.testing.assert_allclose(output, model(x).detach().numpy(), rtol=0, atol=1e-6)


def test_two_recorders_on_one_optimizer(tmp_path: Path) -> None:
    """Both record every step, each its own layers; closing one leaves the other as it was."""
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "both") as other:
        one = Recorder(model, optimizer, tmp_path / "one", layers=["0"])
        one.annotate(label=1)
        other.annotate(label=2)
        train(model, optimizer)
        one.close()
        train(model, optimizer)
    for name, steps, label in (("one", 3, 1), ("both", 6, 2)):
        recording = Recording.open(tmp_path / name)
        assert recording.steps == steps
        assert not any(recording.marks.values())
        first = recording.passes("0")[0]
        assert recording.read_rows([first.block])["label"].to_pylist() == [label] * 6
        if name == "both":
            reading.assert_rebuilds(tmp_path / name)
    assert list(Recording.open(tmp_path / "one").manifest.layers) == ["0"]
    whole, part = Recording.open(tmp_path / "both"), Recording.open(tmp_path / "one")
    for both, alone in zip(whole.passes("0")[:3], part.passes("0"), strict=True):
        np.testing.assert_array_equal(
            reading.keys(whole, "0", both), reading.keys(part, "0", alone)
        )


class Annotating(Dataset[torch.Tensor]):
    """Annotates where it should not, with as many labels as it likes."""

    def __init__(self, recorder: Recorder, labels: int) -> None:
        self.recorder, self.labels = recorder, labels

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        self.recorder.annotate(label=list(range(self.labels)))
        return torch.randn(4, generator=torch.Generator().manual_seed(i))


def loop(loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("labels", [3, 5])
def test_annotating_in_a_data_loader_s_worker(tmp_path: Path, labels: int) -> None:
    """Of right or wrong length: the worker's copy of the recorder would have lost it in silence."""
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        forked = DataLoader(
            Annotating(recorder, labels), 3, num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(RecordError, match=r"worker of a DataLoader.*annotate in the training"):
            loop(forked, model, optimizer)
        train(model, optimizer)  # and the recorder is as it was
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 3
    blocks = [record.block for record in recording.passes("0")]
    assert "label" not in recording.read_rows(blocks).column_names
    reading.assert_rebuilds(tmp_path / "r")


def test_it_does_not_travel(tmp_path: Path) -> None:
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for taken in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RecordError, match="stays in the process that it was made in"):
                taken(recorder)
        train(model, optimizer)
    assert Recording.open(tmp_path / "r").complete


def test_a_fork_that_trains(tmp_path: Path) -> None:
    """Its steps would go to a thread that it does not have; closing there closes nothing here."""
    import multiprocessing

    model, optimizer = network()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)
        try:
            with recorder:
                train(model, optimizer)
        except RecordError as refused:
            theirs.send(str(refused))

    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        train(model, optimizer)
        process = context.Process(target=child)
        process.start()
        assert "where a forked process trains, make the recorder there" in ours.recv()
        process.join()
        train(model, optimizer)
    assert Recording.open(tmp_path / "r").steps == 6
    reading.assert_rebuilds(tmp_path / "r")


def test_callbacks_of_the_other_framework(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning")
    from dualform.record.integrations import lightning as of_lightning
    from dualform.record.integrations import transformers as of_transformers

    arguments = transformers.TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[])
    with pytest.raises(RecordError, match="is Lightning's; transformers' Trainer takes that of"):
        transformers.Trainer(
            network()[0], arguments, callbacks=[of_lightning.RecorderCallback(tmp_path / "r")]
        )

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.made = network()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.made

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[of_transformers.RecorderCallback(tmp_path / "r")],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RecordError, match="is transformers'; Lightning's Trainer takes that of"):
        trainer.fit(Module(), DataLoader(torch.randn(6, 4), 3))
    assert not (tmp_path / "r").exists()
