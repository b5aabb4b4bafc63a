"""Annotation: what is accepted, what it becomes, and what is refused before weights move."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import AnnotationError, Recorder, RecorderClosedError
from dualform.store.recording import Recording


class Task(str, enum.Enum):
    """Its members print as "Task.A", but are the text "a"."""

    A = "a"
    B = "b"


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...] = (3, 4)
) -> None:
    optimizer.zero_grad()
    model(torch.randn(shape)).pow(2).sum().backward()
    optimizer.step()


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


Pair = tuple[nn.Module, torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([3, 1, 2]), [3, 1, 2]),
        (torch.tensor([3, 1, 2], dtype=torch.uint8), [3, 1, 2]),
        (np.array([3, 1, 2], np.int32), [3, 1, 2]),
        ([3, 1, 2], [3, 1, 2]),
        ((0.5, 1.5, 2.5), [0.5, 1.5, 2.5]),
        (torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16), [0.5, 1.5, 2.5]),
        ([True, False, True], [True, False, True]),
        (["a", "b", "ü"], ["a", "b", "ü"]),
        (np.array(["a", "b", "c"]), ["a", "b", "c"]),
        (np.array(["a", "b", "c"], object), ["a", "b", "c"]),
        (Task.A, ["a"] * 3),
        ([Task.A, Task.B, Task.A], ["a", "b", "a"]),
        ((Task.A, "c", np.str_("d")), ["a", "c", "d"]),
        (np.array([Task.A, Task.B, "c"], object), ["a", "b", "c"]),
        ("a\0", ["a\0"] * 3),
        (["a\0", "b", "\0"], ["a\0", "b", "\0"]),
        (np.ma.array([3, 1, 2]), [3, 1, 2]),
        (torch.tensor([1j, 2j, 3j]).conj().imag, [-1.0, -2.0, -3.0]),
        (torch.tensor([0.5, 1.5, 2.0]).to(torch.float8_e4m3fn), [0.5, 1.5, 2.0]),
        (7, [7] * 3),
        (torch.tensor(7), [7] * 3),
        ("mnist", ["mnist"] * 3),
        (False, [False] * 3),
        (float("nan"), None),
        (-(2**63), [-(2**63)] * 3),
    ],
    ids=repr,
)
def test_values_of_a_batch(tmp_path: Path, pair: Pair, value: Any, expected: Any) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(extra=value)
        step(model, optimizer)
    column = Recording.open(tmp_path / "r").read_rows([0])["extra"]
    assert column.null_count == 0
    if expected is None:
        assert np.isnan(column.to_numpy()).all()
    else:
        assert column.to_pylist() == expected
        assert type(column[0].as_py()) is type(expected[0])


def test_sequences(tmp_path: Path, pair: Pair) -> None:
    """[batch] goes along the leading dimension, [batch, time] row by row."""
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(
            example=["p", "q"], label=torch.arange(6).view(2, 3), task="t", weight=[[0.5] * 3] * 2
        )
        step(model, optimizer, (2, 3, 4))
        step(model, optimizer, (2, 3, 4))
        recorder.annotate(label=torch.arange(12).view(2, 3, 2))
        step(model, optimizer, (2, 3, 2, 4))
    recording = Recording.open(tmp_path / "r")
    table = recording.read_rows([0, 1, 2]).to_pydict()
    assert table["step"] == [0] * 6 + [1] * 6 + [2] * 12
    assert table["slot"] == [0, 0, 0, 1, 1, 1] * 2 + [0] * 6 + [1] * 6
    assert table["position"] == [0, 1, 2] * 4 + list(range(6)) * 2
    assert table["example"] == ["p"] * 3 + ["q"] * 3 + [None] * 18
    assert table["label"] == [0, 1, 2, 3, 4, 5] + [None] * 6 + list(range(12))
    assert table["task"] == ["t"] * 6 + [None] * 18
    assert recording.schema.names == [
        "step", "slot", "position", "example", "label", "task", "weight",
    ]  # fmt: skip


def test_one_row_without_a_batch(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=[5], task="t")
        step(model, optimizer, (4,))
    (row,) = Recording.open(tmp_path / "r").read_rows([0]).to_pylist()
    assert row == {"step": 0, "slot": 0, "position": None, "label": 5, "task": "t"}


def test_annotation_holds_until_the_next_call_or_step(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(part=0)
        for _ in range(2):
            model(torch.randn(1, 4)).sum().backward()
        recorder.annotate(part=1)
        model(torch.randn(1, 4)).sum().backward()
        optimizer.step()
        step(model, optimizer, (1, 4))
    recording = Recording.open(tmp_path / "r")
    blocks = [record.block for record in recording.passes("")]
    assert recording.read_rows(blocks)["part"].to_pylist() == [0, 0, 1, None]


def test_annotation_is_copied(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    labels = torch.tensor([1, 2, 3])
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=labels)
        labels.zero_()
        step(model, optimizer)
    assert Recording.open(tmp_path / "r").read_rows([0])["label"].to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("value", [[1, 2], [[1, 2], [3, 4]], np.zeros((4, 3)), torch.zeros(0)])
def test_a_size_that_does_not_fit_is_an_error_before_weights_move(
    tmp_path: Path, pair: Pair, value: Any
) -> None:
    model, optimizer = pair
    before = [p.clone() for p in model.parameters()]
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=value)
        with pytest.raises(AnnotationError) as caught:
            step(model, optimizer)
    message = str(caught.value)
    assert "annotate(label=...)" in message
    assert str(list(np.shape(value))) in message
    assert "3 values, one per example" in message
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert Recording.open(tmp_path / "r").steps == 0


def test_the_loop_can_go_on_after_a_refused_step(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=[1, 2])
        with pytest.raises(AnnotationError):
            step(model, optimizer)
        recorder.annotate(label=[1, 2, 3])
        step(model, optimizer)
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 1
    assert [record.rows for record in recording.passes("")] == [3]
    assert recording.marks[""] == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"step": 1}, "step, slot, position and row are filled"),
        ({"row": 1}, "and row are filled"),
        ({"": 1}, "no name"),
        ({"\udc80": 1}, "no name"),
        ({"task": "img\udc80.png"}, "not valid Unicode"),
        ({"task": ["a", "img\udc80.png", "b"]}, "'img.udc80.png' is not valid"),
        ({"slot": 1}, "filled"),
        ({"label": [1, None]}, "NoneType"),
        ({"label": [object()]}, "cannot store"),
        ({"label": [[1, 2], [3]]}, "different lengths"),
        ({"label": ["a", 1]}, "mixed"),
        ({"label": 1j}, "complex"),
        ({"label": 2**63}, "cannot store"),
        ({"label": [2**63, -1]}, "beyond 64 bits"),
        ({"label": [[2**70], [0]]}, "cannot store"),
        ({"label": np.array(["2020-01-01"], "datetime64[D]")}, "datetime64"),
        ({"label": [[np.ma.masked, 1]]}, "masked"),
        ({"label": np.ma.masked}, "masked"),
        ({"label": torch.ones(3).to_sparse()}, "sparse_coo tensor of torch.float32"),
        ({"label": torch.ones(3, device="meta")}, "cannot store a"),
        ({"label": [torch.ones((), dtype=torch.bfloat16)] * 3}, "not an array of values"),
        ({"example": 0.5}, "integer or a string"),
        ({"example": True}, "integer or a string"),
    ],
)
def test_refused_at_once(tmp_path: Path, pair: Pair, columns: dict[str, Any], message: str) -> None:
    model, optimizer = pair
    with (
        Recorder(model, optimizer, tmp_path / "r") as recorder,
        pytest.raises(AnnotationError, match=message),
    ):
        recorder.annotate(**columns)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_quantized_tensors_are_refused(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with (
        Recorder(model, optimizer, tmp_path / "r") as recorder,
        pytest.raises(AnnotationError, match="qint8"),
    ):
        recorder.annotate(label=quantized)


def test_a_column_keeps_its_type(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=1)
        with pytest.raises(AnnotationError, match="got string where earlier calls gave int64"):
            recorder.annotate(label="one")


@pytest.mark.parametrize("none", [[], torch.zeros(0), np.zeros(0, np.int64)], ids=repr)
def test_an_empty_batch_tells_no_type(tmp_path: Path, pair: Pair, none: Any) -> None:
    """An empty list was float64, before integers and behind them."""
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for labels, examples in ((none, none), ([3, 1], ["a", "b"]), (none, none)):
            recorder.annotate(
                rows=none if len(labels) == 0 else None, label=labels, example=examples
            )
            step(model, optimizer, (len(labels), 4))
    with Recording.open(tmp_path / "r") as recording:
        rows = recording.read_rows([record.block for record in recording.passes("")])
    assert recording.steps == 3
    assert rows["label"].to_pylist() == [3, 1]
    assert rows["example"].to_pylist() == ["a", "b"]


def test_an_empty_column_of_a_batch_that_is_not_is_refused(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=[])
        with pytest.raises(AnnotationError, match=r"annotate\(label=...\) was given shape \[0\]"):
            step(model, optimizer)


@pytest.mark.parametrize("name", ["self", "columns", "cls"])
def test_a_column_may_have_any_name(tmp_path: Path, pair: Pair, name: str) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(**{name: [1, 2, 3]})
        recorder.annotate_step(**{f"{name}_step": 4})
        recorder.annotate_step(**{name: 5})  # the pass's own stays
        step(model, optimizer)
    assert Recording.open(tmp_path / "r").read_rows([0])[name].to_pylist() == [1, 2, 3]


def test_closed(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    recorder = Recorder(model, optimizer, tmp_path / "r")
    recorder.close()
    recorder.close()
    with pytest.raises(RecorderClosedError, match="new Recorder"):
        recorder.annotate(label=1)
    with pytest.raises(RecorderClosedError, match="new Recorder"):
        recorder.add_examples([1], ["text"])


def test_examples(tmp_path: Path, pair: Pair) -> None:
    png = b"\x89PNG\r\n\x1a\nrest"
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.add_examples([1, 2], [png, "täxt"])
        recorder.add_examples(torch.tensor([2, 3]), ["other", b"raw"])
        recorder.add_examples(np.array([3]), [b"again"])
        step(model, optimizer)
    rows = [row for t in Recording.open(tmp_path / "r").example_tables() for row in t.to_pylist()]
    assert rows == [
        {"id": 1, "kind": "png", "data": png},
        {"id": 2, "kind": "text", "data": "täxt".encode()},
        {"id": 3, "kind": "bytes", "data": b"raw"},
    ]


@pytest.mark.parametrize(
    ("ids", "payloads", "message"),
    [
        ([1, 2], ["a"], "2 ids for 1 payloads"),
        ([1.5], ["a"], "integer or a string"),
        ([1, "b"], ["a", "b"], "one type"),
        ([1], [3], "int"),
        ([1], ["\udc80"], "not valid Unicode"),
        (["\udc80"], ["a"], "can't be kept"),
        ([2**63], ["a"], "64 bits"),
    ],
)
def test_examples_refused(
    tmp_path: Path, pair: Pair, ids: Any, payloads: Any, message: str
) -> None:
    model, optimizer = pair
    with (
        Recorder(model, optimizer, tmp_path / "r") as recorder,
        pytest.raises(AnnotationError, match=message),
    ):
        recorder.add_examples(ids, payloads)


def test_a_refused_annotation_leaves_none_in_force(tmp_path: Path, pair: Pair) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=[1, 2, 3])
        with pytest.raises(AnnotationError):
            recorder.annotate(note="new", label=[object()] * 3)
        step(model, optimizer)
        recorder.annotate(note=1)  # the refused call gave the column no type
    table = Recording.open(tmp_path / "r").read_rows([0])
    assert "label" not in table.column_names


def test_a_step_is_annotated_once_its_loss_is_known(tmp_path: Path, pair: Pair) -> None:
    """One value for all rows of the step, of all its passes; what a pass says itself stays."""
    model, optimizer = pair
    losses = []
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for number in range(3):
            optimizer.zero_grad()
            for size in (3, 2):
                recorder.annotate(part=size, **({"kept": 7} if size == 2 else {}))
                loss = model(torch.randn(size, 4)).pow(2).sum()
                loss.backward()
            losses.append(loss.item())
            if number != 1:
                recorder.annotate_step(loss=loss, kept=number)
            optimizer.step()
    with Recording.open(tmp_path / "run") as recording:
        blocks = [record.block for record in recording.passes("")]
        rows = recording.read_rows(blocks)
    first, last = [losses[0]] * 5, [losses[2]] * 5
    assert rows["part"].to_pylist() == [3, 3, 3, 2, 2] * 3
    assert rows["loss"].to_pylist() == first + [None] * 5 + last
    assert rows["kept"].to_pylist() == [0, 0, 0, 7, 7] + [None] * 3 + [7, 7] + [2, 2, 2, 7, 7]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss": [1.0, 2.0]}, r"annotate_step\(loss=...\) was given shape \[2\]: one value"),
        ({"step": 3}, r"step, slot, position and row are filled by themselves"),
        (
            {"loss": "high"},
            r"annotate_step\(loss=...\): got string where earlier calls gave float64",
        ),
        ({"loss": None}, r"annotate_step\(loss=...\): cannot store"),
    ],
)
def test_what_a_step_is_not_annotated_with(
    tmp_path: Path, pair: Pair, columns: dict[str, Any], message: str
) -> None:
    model, optimizer = pair
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        recorder.annotate(loss=0.5)
        with pytest.raises(AnnotationError, match=message):
            recorder.annotate_step(**columns)
        step(model, optimizer)
