"""`dualform query attribute` and `dualform plot attribute`, with a model from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from client.memory import LR, Memory

from dualform.cli.attribute import loaded
from dualform.client import (
    AttributionResult,
    Client,
    Coverage,
    DualformError,
    InvalidArgumentError,
)
from dualform.plot import attribute, style

from .conftest import dualform

FILE = """
from collections import OrderedDict

import torch
from torch import nn

from dualform.engine import Index
from helper import INDEX  # beside the file, as if it were run


def trained():
    model = nn.Sequential(OrderedDict(fc=nn.Linear(12, 5, bias=False)))
    with Index.open(INDEX) as index:
        model.fc.weight.data = torch.from_numpy(index.state("fc", "final")["fc.weight"])
    return model, torch.randn(3, 12, generator=torch.Generator().manual_seed(0)), [0, 1, 2]


def model_alone():
    return trained()[0]


def fails():
    raise ValueError("no checkpoint")


def ends():
    raise SystemExit(7)


def wrong_inputs():
    return trained()[0], torch.randn(3, 11)


class Ending(nn.Sequential):
    def forward(self, x):
        raise SystemExit(7)


def ending():
    return Ending(OrderedDict(fc=trained()[0].fc)), torch.randn(3, 12)
"""


@pytest.fixture
def file(memory: Memory, tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text(f"INDEX = {str(memory.path)!r}\n")
    path = tmp_path / "train.py"
    path.write_text(FILE)
    return path


def test_query_and_plot(memory: Memory, server: str, file: Path, tmp_path: Path) -> None:
    asked = (f"{file}:trained", "--server", server, "--by", "label", "-k", 3)
    done = dualform("query", "attribute", *asked, "--target", 2, "--json")
    assert (done.status, done.err) == (0, "")
    data = json.loads(done.out)
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)).double().numpy()
    terms = LR * (x @ memory.keys.T.astype(np.float64)) * memory.values[:, 2]
    for number in range(3):
        sums = {
            label: terms[number][[one == label for one in memory.label]].sum()
            for label in (0, 1, 2, 3, None)
        }
        best = sorted(sums, key=lambda label: -sums[label])[:3]
        assert data["groups"][number] == best
        np.testing.assert_allclose(data["scores"][number], [sums[each] for each in best], atol=1e-5)
    assert data["layers"] == ["fc"]
    table = dualform("query", "attribute", *asked, "--target", "loss").out.splitlines()
    assert table[0].startswith("input 0, loss ")
    assert table[1].split() == ["rank", "label", "rows", "score", "layer", "fc"]
    beside = ["input", "initial", "rows", "residual", "unrecorded"]
    assert any(line.split() == beside for line in table)

    out = tmp_path / "scores.npy"
    refused = dualform("query", "attribute", *asked, "--target", 2, "--out", out)
    assert (refused.status, out.exists()) == (2, False)
    assert "leave out -k" in refused.err
    done = dualform("query", "attribute", *asked[:-2], "--target", 2, "--out", out)
    assert done.out == f"{out}: float64 [3, 5], inputs by label\n"
    np.testing.assert_allclose(np.sort(np.load(out))[:, :1:-1], data["scores"], rtol=1e-9)
    picture = tmp_path / "bars.svg"
    done = dualform("plot", "attribute", *asked, "--number", 1, "--out", picture)
    assert (done.status, done.out, done.err) == (0, f"{picture}\n", "")
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("train.txt:trained", "is no FILE.py:FUNCTION"),
        ("nowhere.py:trained", "is not there"),
        ("train.py:untrained", "has no function 'untrained'"),
        ("train.py:fails", "failed: ValueError: no checkpoint"),
        ("train.py:ends", "train.py:ends failed: SystemExit: 7"),
        ("train.py:model_alone", r"returned Sequential; \(model, inputs\) is needed"),
    ],
)
def test_a_file_that_gives_no_model(file: Path, spec: str, says: str) -> None:
    with pytest.raises(DualformError, match=says):
        loaded(f"{file.parent / spec}")


@pytest.mark.parametrize("target", ["margn", "²"])
def test_bad_input(memory: Memory, file: Path, target: str) -> None:
    asked = (f"{file}:trained", "--local", memory.path, "--by", "label", "--target", target)
    done = dualform("query", "attribute", *asked)
    assert (done.status, done.out) == (2, "")
    assert "none of 'margin', 'loss'" in done.err


@pytest.mark.parametrize(
    ("function", "says"), [("wrong_inputs", "RuntimeError: mat1"), ("ending", "SystemExit: 7")]
)
@pytest.mark.parametrize("out", [False, True])
def test_what_the_model_raises_is_its_files(
    memory: Memory, file: Path, function: str, says: str, out: bool
) -> None:
    more = ["--out", file.with_name("scores.npy")] if out else []
    asked = (f"{file}:{function}", "--local", memory.path, "--by", "label", *more)
    done = dualform("query", "attribute", *asked)
    assert (done.status, done.out) == (2, "")
    assert f"train.py:{function} failed on its inputs: {says}" in done.err


def test_many_layers_share_the_last_colour() -> None:
    parts = np.arange(16.0).reshape(1, 2, 8) - 4
    none = np.zeros((1, 8))
    names = tuple("abcdefgh")
    found = AttributionResult(
        names, np.zeros(1), none, none, none, none, np.zeros(1),
        dict.fromkeys(names, Coverage(1, 1, 0)), "", np.array([[7, None]], object),
        parts.sum(2), np.ones((1, 2), np.int64), parts,
    )  # fmt: skip
    figure = attribute(found)
    (panel,) = figure.axes
    assert len(panel.containers) == 2 * len(style.TASK_COLOURS)
    widths = sum(bar.get_width() for bar in panel.patches)  # type: ignore[attr-defined]
    assert widths == pytest.approx(parts.sum())
    with pytest.raises(InvalidArgumentError, match="inputs 0 to 0"):
        attribute(found, number=1)


def test_self_influence(memory: Memory, server: str) -> None:
    asked = ("query", "self-influence", "--server", server, "--by", "label")
    done = dualform(*asked, "-k", 2, "--layer", "fc", "--json")
    assert (done.status, done.err) == (0, "")
    data = json.loads(done.out)
    with Client(server) as client:
        found = client.self_influence(by="label")
    best = np.argsort(-found.scores, kind="stable")[:2]
    assert data["groups"] == [found.groups[place] for place in best]
    assert data["scores"] == found.scores[best].tolist()
    assert data["layers"] == ["fc"]
    done = dualform(*asked, "--where", "label = 1")
    assert done.status == 0
    assert done.out.split()[:5] == ["rank", "label", "rows", "lowered", "fc"]
    assert dualform(*asked, "-k", 0).status == 2
