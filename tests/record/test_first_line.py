"""What a recorder says at its first step: one line, seen wherever nobody asked for silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warm
from torch import nn

from dualform.record import Recorder

PROGRAM = """
import sys, logging
import torch
from torch import nn
from dualform.record import Recorder
{before}
model = nn.Sequential(nn.Linear(6, 3), nn.ConvTranspose1d(3, 2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Recorder(model, optimizer, sys.argv[1], steps=2000):
    for _ in {loop}(range(3)):
        model[0](torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LINE = "dualform: recording 1 layer, 75.0 % of the model's matrix parameters, 8.19 kB per step"


def program(tmp_path: Path, before: str = "", loop: str = "") -> str:
    """What it writes to standard error."""
    text = PROGRAM.format(before=before, loop=loop)
    result = warm.run(text, tmp_path / "r")
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    "before",
    ["", "logging.basicConfig()", "logging.basicConfig(level=logging.WARNING)"],
    ids=["plain", "configured", "quiet root"],
)
def test_seen_by_default(tmp_path: Path, before: str) -> None:
    (line,) = program(tmp_path, before).splitlines()  # one line, and nothing else
    assert LINE in line
    assert "16.38 MB needed for 2,000 steps" in line
    assert f"to {tmp_path / 'r'} (" in line
    assert "Left out: '1' (ConvTranspose1d is of no kind that is recorded; " in line


def test_silence(tmp_path: Path) -> None:
    before = "logging.getLogger('dualform.record.start').setLevel(logging.WARNING)"
    assert program(tmp_path, before) == ""


def test_above_a_progress_bar(tmp_path: Path) -> None:
    """On a line of its own."""
    text = program(tmp_path, "import tqdm", "tqdm.tqdm")
    lines = [part for line in text.splitlines() for part in line.split("\r")]
    assert next(line for line in lines if "dualform" in line).startswith(LINE)
    assert "3/3" in lines[-1]


class Kinds(nn.Module):
    """One of everything that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.renormalised = nn.Embedding(10, 8, max_norm=1.0)
        self.kept = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(8, 2, kdim=6)
        self.images = nn.ModuleList(nn.ConvTranspose2d(8, 8, 3) for _ in range(5))
        self.frozen = nn.Linear(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)


def test_groups_with_their_reasons_and_remedies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Kinds()
    held = [p for name, p in model.named_parameters() if not name.startswith("frozen")]
    optimizer = torch.optim.SGD(held, lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r"):
        model.kept(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    line = next(r.getMessage() for r in caplog.records if "recording" in r.getMessage())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert f"2 layers, {100 * (64 + 64) / matrices:.1f} % of" in line  # kept, attention.out_proj
    left_out = line.split("Left out: ")[1]
    for group, remedy in [
        ("'embedding' (tied: its weight is also head.weight", "leave out the bias"),
        ("'renormalised' (nn.Embedding with max_norm", "leave max_norm out"),
        ("'head' (tied: its weight is also embedding.weight", "name it in layers=[...]"),
        ("'attention' (with kdim or vdim", "give key and value the width of the query"),
        ("'images.0', 'images.1', 'images.2' and 2 more (ConvTranspose2d", "write it as nn.Linear"),
        ("'frozen' (its weight is not among the optimizer", "give it to the optimizer"),
    ]:
        assert group in left_out
        assert remedy in left_out.split(group)[1].split(")")[0]
    assert "norm'" not in left_out.replace("'normed", "")  # no matrix
    assert "matrix parameters (3.7 % of those that train; LayerNorm holds none), " in line


def test_layers_that_were_not_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r", layers=["1"]):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    assert "recording 1 layer, 50.0 % of" in caplog.text
    assert "'0' (not among layers=[...]; name it there)" in caplog.text


class Around(nn.Module):
    """A position embedding of its own, beside a layer; and one more that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4, 8))
        self.kept = nn.Linear(8, 8)
        self.adapted = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.adapted(self.kept(x + self.place))
        return found


@pytest.mark.parametrize("layers", [None, ["block.kept"]])
def test_what_a_module_adds_by_itself_and_what_is_frozen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: list[str] | None
) -> None:
    """The parameter is named, not the module, whose layers are recorded."""
    model = nn.ModuleDict({"block": Around(), "other": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r", layers=layers):
        model["block"](torch.randn(2, 4, 8)).sum().backward()
        optimizer.step()
    line = next(r.getMessage() for r in caplog.records if "recording" in r.getMessage())
    recorded = 64 if layers else 128
    assert f"{100 * recorded / 224:.1f} % of the model's matrix parameters " in line
    assert f"({100 * recorded / 160:.1f} % of those that train)" in line
    assert "'block.place' (used by Around itself, in no layer of its own; what is only" in line
    assert "'block.adapted' (frozen: its weight requires no gradient" in line
    assert ("'other' (not among layers=[...]" in line) == bool(layers)


class Signed(torch.optim.Optimizer):
    """Of no family."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad.sign()


def test_values_that_serve_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody knows what a row moved, keys alone are suggested, with what they take."""
    for name, values in (("both", True), ("keys", False)):
        model = nn.Linear(2000, 3)
        optimizer = Signed(model.parameters())
        with Recorder(model, optimizer, tmp_path / name, values=values):
            model(torch.randn(4, 2000)).sum().backward()
            optimizer.step()
    both, keys = (r.getMessage() for r in caplog.records if "recording" in r.getMessage())
    assert "36.86 kB per step" in both
    assert "not known under Signed, so values serve no answer: values=False takes 32.77 kB" in both
    assert "32.77 kB per step" in keys
    assert "serve no answer" not in keys
