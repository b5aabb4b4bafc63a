"""A recorder that nobody closes: said as the program ends, and nothing that it took is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

from dualform.store.recording import Recording

from . import reading

PROGRAM = """
import os, sys
import torch
from torch import nn
from dualform.record import Recorder

torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
recorder = Recorder(model, optimizer, sys.argv[1])
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('boom')", 1),
        ("child = os.fork()\nif child == 0: sys.exit(0)\nos.waitpid(child, 0)", 0),
    ],
    ids=["end", "exit", "error", "fork"],
)
def test_at_exit(tmp_path: Path, end: str, status: int) -> None:
    """However a program ends by itself, in whatever time: a whole recording, said once."""
    result = warm.run(PROGRAM + end, tmp_path / "r")
    assert result.returncode == status
    assert result.stderr.count("was not closed") == 1
    assert str(tmp_path / "r") in result.stderr
    assert "with Recorder(...)" in result.stderr
    recording = Recording.open(tmp_path / "r")
    assert recording.complete
    assert recording.steps == 5
    reading.assert_rebuilds(tmp_path / "r")
    assert not list(tmp_path.glob(".*.lock"))


def test_out_of_sight(tmp_path: Path) -> None:
    """Of a function that returned, with nothing left that names model, optimizer or recorder."""
    head, body = PROGRAM.split("torch.manual_seed(0)")
    lines = "\n".join(f"    {line}" for line in f"torch.manual_seed(0){body}".splitlines())
    program = f"{head}\ndef main():\n{lines}\nmain()\nimport gc\ngc.collect()\n"
    result = warm.run(program, tmp_path / "r")
    assert result.returncode == 0
    assert result.stderr.count("was not closed") == 1
    assert Recording.open(tmp_path / "r").complete
    reading.assert_rebuilds(tmp_path / "r")


def test_killed(tmp_path: Path) -> None:
    """By a scheduler's SIGTERM, which lets no program say anything: what was committed is there."""
    end = (
        "recorder._sink.commit()\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 6)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "os.kill(os.getpid(), 15)"
    )
    result = warm.run(PROGRAM + end, tmp_path / "r")
    assert result.returncode == -15
    recording = Recording.open(tmp_path / "r")
    assert not recording.complete
    assert recording.steps == 5
    assert sum(record.rows for record in recording.passes("")) == 20
    for record in recording.passes(""):
        assert reading.keys(recording, "", record).any()


def test_closed_is_closed(tmp_path: Path) -> None:
    end = "recorder.close()"
    result = warm.run(PROGRAM + end, tmp_path / "r")
    assert "not closed" not in result.stderr
