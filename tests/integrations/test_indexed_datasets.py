"""`indexed` with Hugging Face's data sets, of either kind, and under its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from dualform.record import AnnotationError, indexed
from dualform.store.recording import Recording

from .training import accelerate_forgets, bert

__all__ = ["accelerate_forgets"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own
SIZE = 17


def data() -> Any:
    return datasets.Dataset.from_dict({"x": [i / 4 for i in range(SIZE)], "text": ["t"] * SIZE})


def content(batches: Any) -> dict[int, float]:
    """Of every id; each once."""
    found: dict[int, float] = {}
    for batch in batches:
        for x, place in zip(batch["x"].tolist(), batch["example"].tolist(), strict=True):
            assert place not in found
            found[place] = x
    return found


def test_a_dataset(tmp_path: Path) -> None:
    """Shuffled, filtered, split and in torch's format afterwards: ids stay with their examples."""
    whole = indexed(data())
    assert isinstance(whole, datasets.Dataset)
    expected = {i: i / 4 for i in range(SIZE)}
    assert content(DataLoader(whole.with_format("torch"), 4, shuffle=True)) == expected
    assert content(DataLoader(whole.shuffle(seed=1).with_format("torch"), 4)) == expected
    part = whole.filter(lambda row: row["x"] > 2).with_format("torch")
    assert content(DataLoader(part, 4)) == {i: i / 4 for i in range(9, SIZE)}


@pytest.mark.parametrize("columns", [None, ["x"]])
def test_a_format_is_kept(columns: list[str] | None) -> None:
    formatted = data()
    formatted.set_format("torch", columns)
    found = indexed(formatted)[2]
    assert set(found) == {"example", *(columns or ["x", "text"])}
    assert isinstance(found["example"], torch.Tensor)
    assert int(found["example"]) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset(workers: int) -> None:
    """In shards, by workers: ids of their own, and the same in every epoch."""
    stream = indexed(data().to_iterable_dataset(num_shards=2)).with_format("torch")
    loader = DataLoader(stream, 4, num_workers=workers)
    one, two = content(loader), content(loader)
    assert one == two
    assert sorted(one.values()) == [i / 4 for i in range(SIZE)]
    if not workers:
        assert one == {i: i / 4 for i in range(SIZE)}


def test_a_column_of_that_name() -> None:
    given = data().add_column("example", list(range(SIZE)))
    for each in (given, given.to_iterable_dataset()):
        with pytest.raises(AnnotationError, match="column 'example'"):
            indexed(each)
    assert indexed(given, name="place")[3]["place"] == 3


def test_under_trainer(tmp_path: Path) -> None:
    """One line more: ids are annotated by themselves."""
    transformers = pytest.importorskip("transformers")
    from dualform.record.integrations.transformers import RecorderCallback

    rows = {
        "input_ids": [[1 + i % 40, 2, 3] for i in range(12)],
        "labels": [i % 3 for i in range(12)],
    }
    trainer = transformers.Trainer(
        bert(),
        transformers.TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=indexed(datasets.Dataset.from_dict(rows)),
        callbacks=[RecorderCallback(tmp_path / "r", layers=["classifier"])],
    )
    trainer.train()
    recording = Recording.open(tmp_path / "r")
    found = [
        (row["example"], row["labels"])
        for record in recording.passes("classifier")
        for row in recording.read_rows([record.block]).to_pylist()
    ]
    assert sorted(found) == sorted([(i, i % 3) for i in range(12)] * 2)
