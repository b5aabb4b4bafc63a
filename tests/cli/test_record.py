"""`dualform record inspect`: what is committed, while training runs and after it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualform.cli import follow, record
from dualform.cli.main import main
from dualform.record import Recorder
from dualform.record.disk import DiskSink
from dualform.store.lock import holder_of
from dualform.store.ranks import Rank
from dualform.store.recording_format import RecordingManifest
from dualform.store.recording_ranks import open_recordings

ROWS, D_IN, D_OUT = 4, 5, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D_IN, D_OUT)
        self.table = nn.Parameter(torch.ones(D_OUT, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh() @ self.table


class Training:
    """Steps one by one, each committed at once."""

    def __init__(self, path: Path) -> None:
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        sink = DiskSink(path, segment_bytes=1)
        self.recorder = Recorder(self.model, self.optimizer, sink, zero_rows=False)
        self.sink = sink

    def step(self, clip: float | None = None) -> None:
        x = torch.randn(ROWS, D_IN)
        self.recorder.annotate(label=torch.arange(ROWS))
        self.optimizer.zero_grad()
        self.model(x)[1:].sum().backward()  # the first row's value is zero
        if clip is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), clip)
        self.optimizer.step()
        self.sink.commit()


def inspected(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["record", "inspect", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_while_training_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    training = Training(path)
    view = inspected(capsys, path)
    assert view["steps"] == 0
    assert view["writer"]
    assert view["seconds_since_commit"] is None
    training.step()
    training.step(clip=1e-3)
    view = inspected(capsys, path)
    assert (view["steps"], view["complete"]) == (2, False)
    assert "this process" in view["writer"]
    assert view["seconds_since_commit"] < 60
    (layer,) = view["layers"]
    kept = 2 * (ROWS - 1)
    assert (layer["name"], layer["rows"]) == ("first", kept)
    assert layer["bytes"] == kept * 4 * (D_IN + D_OUT)
    assert layer["dropped"] == {"zero": 2}
    assert layer["encodings"] == ["float32"]
    assert "clipped by value" in layer["inexact"][0]["reason"]
    assert layer["inexact"][0]["from_step"] == 1
    assert list(view["left_out"].values()) == [["table"]]  # of the model itself
    assert set(view["columns"]) == {"step", "slot", "position", "label"}
    files = [file for file in path.rglob("*") if file.is_file()]
    assert view["bytes"] == sum(file.stat().st_size for file in files)

    training.step()
    assert inspected(capsys, path)["steps"] == 3
    assert main(["record", "inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "3 steps of SGD committed" in said
    assert "being recorded by this process" in said
    assert "recorded with zero_rows=False" in said
    assert "not from step 1 on: the gradient was clipped by value" in said
    assert "put it into an nn.Linear" in said
    training.recorder.close()
    assert holder_of(path) is None
    assert main(["record", "inspect", str(path)]) == 0
    assert "; complete" in capsys.readouterr().out
    (path / "closed.json").unlink()
    assert main(["record", "inspect", str(path)]) == 0
    assert "cut off: no process writes it" in capsys.readouterr().out


def test_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some may have more steps than others, and one may not be there yet."""
    for rank in range(2):
        training = Training(tmp_path / "run" / f"rank-{rank}")
        for _ in range(rank + 1):
            training.step()
        training.recorder.close()
        folder = tmp_path / "run" / f"rank-{rank}"
        replace(RecordingManifest.load(folder), ranks=Rank(rank, 3)).save(folder)
    ranks = inspected(capsys, tmp_path / "run")["ranks"]
    assert [(view["rank"]["rank"], view["steps"]) for view in ranks] == [(0, 1), (1, 2)]
    assert main(["record", "inspect", str(tmp_path / "run")]) == 0
    assert "rank-1 (rank 1 of 3): 2 steps" in capsys.readouterr().out


def damage(final: Path, how: str) -> None:
    data = final.read_bytes()
    final.unlink()
    if how == "folder":
        final.mkdir()
    elif how != "missing":
        final.write_bytes(data[:-1] if how == "truncated" else b"")


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "folder"])
def test_a_damaged_final_state_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    training = Training(tmp_path / "run")
    training.step()
    training.recorder.close()
    damage(tmp_path / "run" / "final.safetensors", how)
    capsys.readouterr()
    assert main(["record", "inspect", str(tmp_path / "run")]) == 2
    assert "final.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("name", ["closed.json", "segments/000000.json", "manifest.json"])
def test_numbers_that_are_not_finite_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, number: str
) -> None:
    training = Training(tmp_path / "run")
    training.step()
    training.recorder.close()
    (tmp_path / "run" / name).write_text(f'{{"format":"dualform-recording","version":{number}}}')
    capsys.readouterr()
    assert main(["record", "inspect", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "not valid JSON" in said


def test_a_parameter_of_the_model_itself_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(tmp_path / "run").recorder.close()
    view = inspected(capsys, tmp_path / "run")
    assert list(view["left_out"].values()) == [["table"]]


def test_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "inspect", str(tmp_path)]) == 2
    assert "is not a recording" in capsys.readouterr().err


def test_one_that_is_closed_while_it_is_looked_at_was_not_cut_off(tmp_path: Path) -> None:
    """Read while a process writes it, and asked for its writer once that has closed it."""
    training = Training(tmp_path / "r")
    training.step()
    source = open_recordings([tmp_path / "r"])
    assert follow.waits(source) == ""
    training.recorder.close()
    assert holder_of(tmp_path / "r") is None
    assert not source.complete
    assert follow.waits(source) == ""
    view = record.view_of(source.recordings[0])
    assert view["complete"]


def test_one_that_is_left_open_was_cut_off(tmp_path: Path) -> None:
    training = Training(tmp_path / "r")
    training.step()
    source = open_recordings([tmp_path / "r"])
    training.sink.release()
    assert "was not closed: training was cut off after 1 committed steps" in follow.waits(source)
    assert not record.view_of(source.recordings[0])["complete"]
