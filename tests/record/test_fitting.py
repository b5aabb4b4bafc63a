"""One annotation for layers that see a batch in different shapes.

Where a row comes from is told by its value: the loss is of one example, or token, at a time, and a
row's value is not zero where it is of that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import AnnotationError, Recorder
from dualform.store.recording import Recording

from . import reading

BATCH, TIME, WIDTH = 3, 4, 5
Reshape = Callable[[torch.Tensor], torch.Tensor]


class Shaped(nn.Module):
    """A linear layer that sees its input reshaped, between two that see it [batch, time, width]."""

    def __init__(self, there: Reshape, back: Reshape, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shaped = nn.Linear(width, width)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.there, self.back = there, back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.back(torch.tanh(self.shaped(self.there(x)))))  # type: ignore


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH * TIME, WIDTH)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, TIME, WIDTH)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def windows(x: torch.Tensor) -> torch.Tensor:
    """As Swin's: the 2 by 2 places of an example in windows of 2 by 1, not in their order."""
    x = x.reshape(BATCH, 2, 1, 2, 1, WIDTH).permute(0, 3, 1, 2, 4, 5)
    return x.reshape(BATCH * 2, 2, WIDTH)


def unwindows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, 2, 2, WIDTH).transpose(1, 2).reshape(BATCH, TIME, WIDTH)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, TIME // 2, 2 * WIDTH)


SHAPES: dict[str, tuple[Reshape, Reshape, int, bool]] = {
    "as it is": (whole, whole, WIDTH, True),
    "flat": (flat, whole, WIDTH, True),
    "sequence first": (turned, turned, WIDTH, True),
    "square": (lambda x: x.reshape(BATCH, 2, 2, WIDTH), whole, WIDTH, True),
    "windows": (windows, unwindows, WIDTH, False),
    "merged": (merged, whole, 2 * WIDTH, False),
}
"""There, back, width, and whether its rows are tokens, each known by its place."""


def record(path: Path, model: nn.Module, x: torch.Tensor, **columns: Any) -> Recording:
    """A step for each token, its own the only output in the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, path) as recorder:
        for token in np.ndindex(*x.shape[:2]):
            recorder.annotate(**columns)
            optimizer.zero_grad()
            model(x)[token].square().sum().backward()
            optimizer.step()
    return Recording.open(path)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_values_of_their_example_and_token(tmp_path: Path, shape: str) -> None:
    torch.manual_seed(0)
    there, back, width, tokens = SHAPES[shape]
    token_of = torch.arange(BATCH * TIME).view(BATCH, TIME)
    recording = record(
        tmp_path / "r",
        Shaped(there, back, width),
        torch.randn(BATCH, TIME, WIDTH),
        example=[10, 20, 30],
        token=token_of,
        shared=np.ma.MaskedArray([[1] * TIME, [2] * TIME, [3] * TIME], [[True, False] * 2] * 3),
        text=[["a"] * TIME, ["b"] * TIME, ["c", "d", "c", "c"]],
    )
    for layer in recording.manifest.layers:
        for record_ in recording.passes(layer):
            moved = reading.values(recording, layer, record_).any(1)
            assert moved.any()
            rows = recording.read_rows([record_.block]).filter(moved).to_pydict()
            example, place = divmod(record_.step, TIME)
            assert set(rows["example"]) == {10 * (example + 1)}
            if shape == "merged" and layer == "first":
                assert record_.step in rows["token"]  # and the one that it was merged with
            elif layer != "shaped" or tokens:
                assert rows["token"] == [record_.step]
                assert rows["shared"] == [None if place % 2 == 0 else example + 1]
                assert rows["text"] == ["d" if record_.step == 9 else "abc"[example]]
            else:  # what an example's tokens share, null where they differ
                assert set(rows["token"]) == {None}
                assert set(rows["shared"]) == {example + 1}
                assert set(rows["text"]) == {("a", "b", None)[example]}


class Pooled(nn.Module):
    """A classifier, as BERT's: rows per token, then one row per example."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.tokens(x)).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers", [None, ["head"], ["tokens"]])
def test_tokens_and_examples(tmp_path: Path, layers: list[str] | None) -> None:
    """Columns per token and per example, of layers with rows of either kind, or of one alone."""
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "r", layers=layers) as recorder:
        recorder.annotate(
            label=[[5], [6], [7]],  # as some data sets have one label per example
            document=torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 4, 4]]),
        )
        model(torch.randn(BATCH, TIME, WIDTH)).sum().backward()
        optimizer.step()
    recording = Recording.open(tmp_path / "r")
    expected = {
        "tokens": [(5, 1)] * 4 + [(6, 2)] * 4 + [(7, 3)] * 2 + [(7, 4)] * 2,
        "head": [(5, 1), (6, 2), (7, None)],
    }
    for layer in recording.manifest.layers:
        (record_,) = recording.passes(layer)
        rows = recording.read_rows([record_.block]).select(["label", "document"]).to_pydict()
        assert list(zip(rows["label"], rows["document"], strict=True)) == expected[layer]


def test_rows_that_are_of_no_example(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A layer over something else than the batch has null, and that is said once."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
            self.register_buffer("places", torch.randn(7, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x + self.table(self.places).mean(0))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    caplog.set_level(logging.WARNING, "dualform.record")
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for _ in range(3):
            recorder.annotate(label=[5, 6, 7], task="t")
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            optimizer.step()
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert said.startswith("annotate(label=...) of shape [3] says nothing of the rows of layer")
    assert "'table', whose leading dimensions are [7]" in said
    recording = Recording.open(tmp_path / "r")
    for layer, labels in (("table", [None] * 7), ("head", [5, 6, 7])):
        for record_ in recording.passes(layer):
            rows = recording.read_rows([record_.block]).to_pydict()
            assert rows["label"] == labels
            assert set(rows["task"]) == {"t"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(BATCH - 1), "3 values, one per example"),
        (torch.zeros(BATCH, TIME - 1), r"shape \[3, 4\], one per row"),
        (torch.zeros(BATCH, TIME, 2), r"shape \[3, 4\], one per row"),
        (torch.zeros(1), "3 values, one per example"),
    ],
)
def test_what_fits_no_layer_is_refused(tmp_path: Path, value: torch.Tensor, said: str) -> None:
    model = Shaped(windows, unwindows)
    with pytest.raises(AnnotationError, match=said):
        record(tmp_path / "r", model, torch.randn(BATCH, TIME, WIDTH), label=value)


def test_windows_alone_do_not_tell_how_large_the_batch_is(tmp_path: Path) -> None:
    """3 values for 6 windows may be half of a batch: said, with what to do; and that works."""
    model, x = Shaped(windows, unwindows), torch.randn(BATCH, TIME, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "r", layers=["shaped"]) as recorder:
        recorder.annotate(label=[5, 6, 7])
        model(x).sum().backward()
        with pytest.raises(AnnotationError, match="2 windows of each example, record a layer too"):
            optimizer.step()
        optimizer.zero_grad()
        recorder.annotate(label=[5, 5, 6, 6, 7, 7])
        model(x).sum().backward()
        optimizer.step()
    rows = Recording.open(tmp_path / "r").read_rows([0])
    assert rows["label"].to_pylist() == [5] * 4 + [6] * 4 + [7] * 4


@pytest.mark.parametrize("time", [5, 6, 9])
def test_sequence_first_throughout(tmp_path: Path, time: int) -> None:
    """Values per example go along the second axis where no layer sees the batch first; also of a
    layer whose rows are flattened, and of one with a row per example."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.flat = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.pooled = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            return self.flat(x.view(-1, WIDTH)).sum() + self.pooled(x.mean(0)).sum()  # type: ignore

    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.arange(BATCH * time).view(BATCH, time)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=[5, 6, 7], token=tokens)
        model(torch.randn(time, BATCH, WIDTH)).backward()
        optimizer.step()
    recording = Recording.open(tmp_path / "r")
    for layer in recording.manifest.layers:
        (record_,) = recording.passes(layer)
        rows = recording.read_rows([record_.block]).to_pydict()
        assert rows["label"] == [5, 6, 7] * (1 if layer == "pooled" else time)
        if layer == "pooled":
            assert rows["token"] == [None] * 3
        else:
            assert rows["token"] == tokens.T.reshape(-1).tolist()


def test_as_many_places_in_a_window_as_examples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """[6, 2] may be windows of 2 places, or 2 examples sequence first: null."""

    def there(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(6, 2, WIDTH)

    torch.manual_seed(0)
    caplog.set_level(logging.WARNING, "dualform.record")
    model = Shaped(there, lambda x: x.reshape(2, 6, WIDTH))
    recording = record(
        tmp_path / "r", model, torch.randn(2, 6, WIDTH), label=[5, 6], token=np.eye(2, 6)
    )
    (record_, *_) = recording.passes("shaped")
    rows = recording.read_rows([record_.block]).to_pydict()
    assert set(rows["label"]) == set(rows["token"]) == {None}
    assert len(caplog.records) == 2
