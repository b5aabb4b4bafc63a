"""Stored parts, as `build_index` writes them: their order, what they take, and what is refused."""

from __future__ import annotations

from pathlib import Path

import digits
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from synthetic import make_recording
from torch import nn

from dualform.index import build_index, parts, row_sum
from dualform.record import Recorder
from dualform.store import IndexManifest

ROWS, D_IN, D_OUT = 60, 5, 4


def recorded(directory: Path, **columns: list[object]) -> tuple[Path, np.ndarray, np.ndarray]:
    """Rows by plain SGD of lr 0.1, seven a step; with their keys and values."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    path = make_recording(directory / "recording", keys, values, 7, 0.1, 0.0, columns)
    return path, keys, values


def refused(recording: Path, index: Path, columns: list[str], message: str) -> None:
    """A build that is refused leaves nothing, and had announced nothing."""
    said: list[str] = []
    with pytest.raises(ValueError, match=message):
        build_index(recording, index, parts=columns, announce=said.append)
    assert not said
    assert [path.name for path in index.parent.iterdir()] == [recording.name]


@pytest.mark.parametrize(
    ("column", "order"),
    [
        ([r % 3 - 1 for r in range(ROWS)], [-1, 0, 1]),
        (["b" if r % 4 else "a" for r in range(ROWS)], ["a", "b"]),
        ([r % 5 == 0 for r in range(ROWS)], [False, True]),
        ([[2.5, -0.0, 0.0, float("nan")][r % 4] for r in range(ROWS)], [0.0, 2.5, "nan"]),
    ],
)
@pytest.mark.parametrize("shard_rows", [17, 1000])
def test_groups_are_in_the_order_of_answers(
    tmp_path: Path, column: list[object], order: list[object], shard_rows: int
) -> None:
    """Each the float64 sum of its rows, and all of them what the index says of all rows."""
    recording, keys, values = recorded(tmp_path, group=column)
    index, said = tmp_path / "index", list[str]()
    build_index(recording, index, parts=["group"], announce=said.append, shard_rows=shard_rows)
    published = IndexManifest.load(index).layers["fc"]
    (stored,) = published.parts
    assert (stored.column, stored.groups) == ("group", len(order))
    weights = load_file(index / stored.file.name)["fc.weight"]
    assert weights.shape == (len(order), D_OUT, D_IN)
    for weight, value in zip(weights, order, strict=True):
        which = np.array([v != v if value == "nan" else v == value for v in column])
        expected = 0.1 * values[which].T.astype(np.float64) @ keys[which].astype(np.float64)
        np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert published.rebuilt is not None
    rebuilt = load_file(index / published.rebuilt.name)["fc.weight"]
    np.testing.assert_allclose(weights.sum(0), rebuilt, atol=1e-6)
    size = weights.nbytes / 1e6
    assert said == [f"parts of group ({len(order)} groups): {size:.1f} MB"]
    build_index(recording, tmp_path / "bare", shard_rows=shard_rows)
    bare = load_file(tmp_path / "bare" / published.rebuilt.name)["fc.weight"]
    np.testing.assert_array_equal(rebuilt, bare)


def test_a_column_of_a_million_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their number, whatever it is: the bound is lowered to see it at work on a few rows."""
    assert parts.MOST_GROUPS < 10**6
    monkeypatch.setattr(parts, "MOST_GROUPS", 50)
    monkeypatch.setattr(parts, "_CHUNK_ROWS", 16)
    recording, _, _ = recorded(tmp_path, example=list(range(ROWS)), few=[r % 50 for r in range(60)])
    refused(recording, tmp_path / "index", ["few", "example"], "'example' has more than 50 values")
    build_index(recording, tmp_path / "index", parts=["few"])


def test_what_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _, _ = recorded(tmp_path, label=[r % 3 for r in range(ROWS)])
    index = tmp_path / "index"
    refused(recording, index, ["labels"], "no column 'labels'; the recording has step, .*label")
    refused(recording, index, ["label", ""], "no column ''")
    refused(recording, index, ["position"], "no row has a value of column 'position'")
    with pytest.raises(ValueError, match="leave out --parts"):
        build_index(recording, index, parts=["label"], values=False)
    # Of the whole and of three parts, each number and its momentum in float64; a float32 product
    # and its multiple.
    needed = D_IN * D_OUT * ((1 + 3) * (8 + 8) + 4 + 8)
    monkeypatch.setattr(row_sum, "MOST_MEMORY", needed - 1)
    refused(
        recording,
        index,
        ["label"],
        r"'fc' became in 3 parts takes 0\.0 GB of memory.*fewer columns",
    )
    monkeypatch.setattr(row_sum, "MOST_MEMORY", needed)
    build_index(recording, index, parts=["label", "label"])
    assert len(IndexManifest.load(index).layers["fc"].parts) == 1


class Odd(torch.optim.SGD):
    """Of no known family: it has a step of its own."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_optimizer_of_no_family_is_refused(tmp_path: Path) -> None:
    digits.record(tmp_path / "recording", make=lambda model: Odd(model.parameters(), lr=0.1))
    refused(tmp_path / "recording", tmp_path / "index", ["label"], "Odd is of no known family")


@pytest.mark.parametrize("odd", [np.nan, 3e38])
def test_parts_that_are_not_finite_are_not_kept(tmp_path: Path, odd: float) -> None:
    """A scan has to tell which of the groups they are."""
    keys, values = np.ones((20, 3), np.float32), np.full((20, 2), 1e3, np.float32)
    keys[4, 1] = odd
    labels: list[object] = [r % 2 for r in range(20)]
    recording = make_recording(tmp_path / "r", keys, values, 7, 0.1, 0.0, {"label": labels})
    build_index(recording, tmp_path / "index", parts=["label"])
    assert IndexManifest.load(tmp_path / "index").layers["fc"].parts == ()


def test_layers_of_other_rows_have_their_own_groups(tmp_path: Path) -> None:
    """A column that has values for some layers' rows alone is kept for these."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(8):
            optimizer.zero_grad()
            recorder.annotate(kind=[f"k{step % 2}", "k2", "k2"])
            loss = model["a"](torch.randn(3, 4)).square().sum()
            recorder.annotate(other=torch.arange(5))
            (loss + model["b"](torch.randn(5, 4)).square().sum()).backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index", parts=["kind", "other"])
    layers = IndexManifest.load(tmp_path / "index").layers
    groups = {
        name: {stored.column: stored.groups for stored in layer.parts}
        for name, layer in layers.items()
    }
    assert groups == {"a": {"kind": 3}, "b": {"other": 5}}
