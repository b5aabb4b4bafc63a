"""RecorderCallback in transformers' Trainer: columns, closing, resuming, accumulation, padding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from record import reading

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import AnnotationError, RecordError, ResumeError
from dualform.store.recording import Recording

from .training import accelerate_forgets, bert, llama, sentences

transformers = pytest.importorskip("transformers")
from dualform.record.integrations.transformers import RecorderCallback  # noqa: E402

__all__ = ["accelerate_forgets"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework's own


class Listed(torch.utils.data.Dataset[Any]):
    """A list as a data set."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads at the left, as decoders are fed; refuses text, as tokenizers' own do."""
    width = max(len(example["input_ids"]) for example in examples)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor(
            [[fill] * (width - len(e["input_ids"])) + list(e[name]) for e in examples]
        )

    batch = {"input_ids": padded("input_ids", 0)}
    batch["attention_mask"] = torch.tensor(
        [[0] * (width - len(e["input_ids"])) + [1] * len(e["input_ids"]) for e in examples]
    )
    for name in examples[0].keys() - {"input_ids"}:
        if isinstance(examples[0][name], list):
            batch[name] = padded(name, -100)
        else:
            batch[name] = torch.tensor([example[name] for example in examples])
    return batch


def arguments(tmp_path: Path, **settings: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.05,
            "optim": "sgd",
            "max_grad_norm": 0.5,
            "use_cpu": True,
            "report_to": [],
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        },
    )


def rows_of(path: Path, layer: str) -> pa.Table:
    recording = Recording.open(path)
    return recording.read_rows([record.block for record in recording.passes(layer)])


def assert_rebuilds(path: Path) -> None:
    """Of all parameters but the keys' biases, which attention's softmax takes out: what gradient
    they have is rounding."""
    specs = Recording.open(path).manifest.layers.values()
    names = [name for spec in specs for name in spec.parameters if not name.endswith("key.bias")]
    reading.assert_rebuilds(path, names)


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_that_the_model_does_not_take(tmp_path: Path, workers: int) -> None:
    """Text and numbers of the data set, by the example that every row came from."""
    examples = sentences()
    callback = RecorderCallback(
        tmp_path / "r", annotate={"label": "labels", "document": "document", "example": "number"}
    )
    trainer = transformers.Trainer(
        model=bert(),
        args=arguments(tmp_path, dataloader_num_workers=workers),
        train_dataset=Listed(examples),
        eval_dataset=Listed([{k: e[k] for k in ("input_ids", "labels")} for e in examples]),
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.train()
    trainer.evaluate()
    assert callback.recorder is None
    assert_rebuilds(tmp_path / "r")
    rows = rows_of(tmp_path / "r", "classifier").to_pylist()
    assert len(rows) == 24
    for row in rows:
        example = examples[row["example"]]
        assert row["label"] == example["labels"]
        assert row["document"] == example["document"]
    seen = [row["example"] for row in rows]
    assert len(set(seen)) == 24  # shuffled, in one epoch
    assert seen != sorted(seen)


def test_what_is_taken_by_default(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        model=bert(),
        args=arguments(tmp_path),
        train_dataset=Listed(sentences()),
        data_collator=collate,
        callbacks=[RecorderCallback(tmp_path / "r", layers=["classifier", "*.dense"])],
    )
    trainer.train()
    assert set(Recording.open(tmp_path / "r").manifest.layers) >= {
        "classifier",
        "bert.encoder.layer.0.output.dense",
    }
    table = rows_of(tmp_path / "r", "classifier")
    assert table.column_names == ["step", "slot", "position", "labels"]
    assert set(table["labels"].to_pylist()) == {0, 1, 2}


def test_labels_per_token_and_padding(tmp_path: Path) -> None:
    """Every row has its token's label: none where it is -100 or padding, however it is padded."""
    examples = sentences("each")
    trainer = transformers.Trainer(
        model=bert("BertForTokenClassification"),
        args=arguments(tmp_path, gradient_accumulation_steps=2),
        train_dataset=Listed(examples),
        data_collator=collate,
        callbacks=[RecorderCallback(tmp_path / "r", annotate=("labels", "weight", "number"))],
    )
    trainer.train()
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 6
    assert len(recording.passes("classifier")) == 12
    assert_rebuilds(tmp_path / "r")
    rows = rows_of(tmp_path / "r", "bert.encoder.layer.0.output.dense").to_pylist()
    width = 0
    for at, row in enumerate(rows):
        if row["position"] == 0:
            following = (j for j in range(at + 1, len(rows)) if rows[j]["position"] == 0)
            width = next(following, len(rows)) - at
        example = examples[row["number"]]
        place = row["position"] - (width - len(example["input_ids"]))
        label = example["labels"][place] if place > 0 else None  # the first is -100
        assert row["labels"] == label
        assert row["weight"] == (example["weight"][place] if place >= 0 else None)
    assert any(row["labels"] is None for row in rows)


class Failing(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises in the middle of training."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            raise RuntimeError("out of luck")


def test_closed_when_training_raises(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "r")
    trainer = transformers.Trainer(
        model=bert(),
        args=arguments(tmp_path),
        train_dataset=Listed(sentences()),
        data_collator=collate,
        callbacks=[callback, Failing(4)],
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    assert callback.recorder is None
    recording = Recording.open(tmp_path / "r")
    assert recording.complete
    assert recording.steps == 4
    assert_rebuilds(tmp_path / "r")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_resumed_at_a_checkpoint(tmp_path: Path, optimizer: str) -> None:
    """Stopped at step 5, resumed at the checkpoint of step 4: the same memory as without."""
    settings = {"save_strategy": "steps", "save_steps": 2, "optim": optimizer, "max_steps": 8}
    if optimizer == "adamw_torch":
        settings["learning_rate"] = 1e-3

    def trainer(path: Path, name: str, step: int | None, *others: Any) -> Any:
        return transformers.Trainer(
            model=bert(),
            args=arguments(path, **settings),
            train_dataset=Listed(sentences()),
            data_collator=collate,
            callbacks=[
                RecorderCallback(tmp_path / name, annotate=["number"], resume_at_step=step),
                *others,
            ],
        )

    trainer(tmp_path / "whole", "one", None).train()
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path / "cut", "two", None, Failing(5)).train()
    checkpoint = str(tmp_path / "cut" / "trainer" / "checkpoint-4")
    with pytest.raises(RecordError, match="resume_at_step"):
        trainer(tmp_path / "cut", "two", None).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ResumeError, match="Nothing was dropped"):
        trainer(tmp_path / "cut", "two", 3).train(resume_from_checkpoint=checkpoint)
    trainer(tmp_path / "cut", "two", 4).train(resume_from_checkpoint=checkpoint)
    one, two = Recording.open(tmp_path / "one"), Recording.open(tmp_path / "two")
    assert two.steps == one.steps == 8
    assert not any(two.marks.values())
    for name in one.manifest.layers:
        pairs = list(zip(one.passes(name), two.passes(name), strict=True))
        assert pairs
        for a, b in pairs:
            assert a.step == b.step
            np.testing.assert_array_equal(reading.keys(one, name, a), reading.keys(two, name, b))
            np.testing.assert_allclose(
                reading.values(one, name, a), reading.values(two, name, b), rtol=1e-5, atol=1e-7
            )
    first, second = rows_of(tmp_path / "one", "classifier"), rows_of(tmp_path / "two", "classifier")
    assert first["number"].to_pylist() == second["number"].to_pylist()


def test_the_best_model_is_not_what_the_last_step_left(tmp_path: Path) -> None:
    turns = itertools.count()
    trainer = transformers.Trainer(
        model=bert(),
        args=arguments(
            tmp_path,
            load_best_model_at_end=True,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="turn",
            greater_is_better=False,  # the first is the best
        ),
        train_dataset=Listed(sentences()),
        eval_dataset=Listed(sentences()),
        data_collator=collate,
        compute_metrics=lambda _: {"turn": next(turns)},
        callbacks=[RecorderCallback(tmp_path / "r")],
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 6
    assert not any(recording.marks.values())
    assert_rebuilds(tmp_path / "r")
    final = recording.final()
    assert final is not None
    now = trainer.model.classifier.weight.detach()
    assert not torch.equal(now, before["classifier.weight"])
    assert not np.array_equal(final["classifier.weight"], now.numpy())


def test_a_decoder_with_adamw(tmp_path: Path) -> None:
    """Labels are the tokens, padding -100: the index verifies, and rows say their token."""
    examples = [
        {"input_ids": e["input_ids"], "labels": e["input_ids"], "document": e["document"]}
        for e in sentences()
    ]
    model = llama()
    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path, optim="adamw_torch", learning_rate=1e-3, max_steps=10),
        train_dataset=Listed(examples),
        data_collator=collate,
        callbacks=[RecorderCallback(tmp_path / "r", annotate=("labels", "document"))],
    )
    trainer.train()
    build_index(tmp_path / "r", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, [(layer.layer, layer.note) for layer in report.layers if not layer.ok]
    assert len(report.layers) == 9
    assert all(layer.exact_steps == 10 for layer in report.layers)
    table = rows_of(tmp_path / "r", "lm_head")
    assert len(set(table["document"].to_pylist())) > 1
    assert None in table["labels"].to_pylist()


def test_added_after_the_trainer_was_made(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "r")
    trainer = transformers.Trainer(
        model=bert(),
        args=arguments(tmp_path),
        train_dataset=Listed(sentences()),
        data_collator=collate,
    )
    trainer.add_callback(callback)
    trainer.train()
    assert callback.recorder is None
    assert_rebuilds(tmp_path / "r")


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        model=bert(),
        args=arguments(tmp_path),
        train_dataset=Listed(sentences()),
        data_collator=collate,
        callbacks=[RecorderCallback(tmp_path / "r", annotate=("author",))],
    )
    with pytest.raises(AnnotationError, match=r"no 'author'.*it is .*'input_ids'"):
        trainer.train()


def test_outside_of_a_trainer(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"use dualform\.record\.Recorder"):
        RecorderCallback(tmp_path / "r").on_init_end(None, None, None)


def test_rows_that_are_recorded(tmp_path: Path) -> None:
    """Those with a label: of the classifier all that have a gradient, so nothing is amiss; with
    `options` for the recorder."""
    callback = RecorderCallback(
        tmp_path / "r",
        annotate=("labels",),
        rows=lambda batch: batch["labels"] != -100,
        options={"every": 2},
    )
    trainer = transformers.Trainer(
        model=bert("BertForTokenClassification"),
        args=arguments(tmp_path),
        train_dataset=Listed(sentences("each")),
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.train()
    recording = Recording.open(tmp_path / "r")
    for layer in ("classifier", "bert.encoder.layer.0.output.dense"):
        rows = rows_of(tmp_path / "r", layer)
        assert rows["labels"].null_count == 0
        assert set(rows["step"].to_pylist()) == {0, 2, 4}
        dropped = recording.dropped(layer)
        assert set(dropped) == {"every", "rows"}
        assert all(mark.reason.startswith("rows are left out") for mark in recording.marks[layer])
    # The first token's row has a gradient through attention, and none in the classifier.
    starts = [recording.marks[layer][0].from_step for layer in recording.manifest.layers]
    assert recording.marks["classifier"][0].from_step == 1
    assert min(starts) == 0
