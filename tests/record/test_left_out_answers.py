"""Answers from a recording that kept some rows say so: index, answers, command, verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.cli.main import main
from dualform.client import Client, Sampling
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.errors import DamagedError
from dualform.store.files import write_sealed
from dualform.store.index import IndexManifest
from dualform.store.recording import Recording

STEPS, BATCH = 10, 8


def recorded(path: Path, masked: bool = False, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, path, **options) as recorder:
        for step in range(STEPS):
            labels = torch.arange(BATCH) % 3
            labels[step % BATCH] = -100
            rows = torch.arange(BATCH) >= 2 if masked else None
            recorder.annotate(label=labels, rows=rows)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(BATCH, 6)), labels).backward()
            optimizer.step()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Of every second step, without 2 of 8 examples."""
    recorded(tmp_path / "r", masked=True, every=2)
    build_index(tmp_path / "r", tmp_path / "i")
    return tmp_path / "i"


MISSING = {"every": 5 * BATCH, "rows": 5 * 2}


def test_the_index_and_its_answers(index: Path) -> None:
    queries = np.eye(6, dtype=np.float32)[:2]
    with Client.local(index) as client:
        info = client.index()
        assert info.sampling == Sampling(every=2, sample=1.0, seed=0, zero_rows=True)
        layer = info.layers["0"]
        assert layer.dropped == MISSING
        assert layer.rows + sum(layer.dropped.values()) == STEPS * BATCH
        for answer in (
            client.top_k("0", queries, k=3),
            client.sums("0", queries, group_by="label"),
            client.sums("0", queries, group_by="label", where="label = 1"),
            client.dual_output("0", queries, max_residual=np.inf),
        ):
            assert (answer.coverage.total, answer.coverage.dropped) == (30, 50)
        assert client.sums("0", queries, group_by="label").counts.sum() == 30


def test_an_index_of_all_rows_says_nothing(tmp_path: Path) -> None:
    recorded(tmp_path / "r")
    build_index(tmp_path / "r", tmp_path / "i")
    with Client.local(tmp_path / "i") as client:
        assert client.index().sampling is None
        assert client.index().layers["0"].dropped == {}
        assert client.top_k("0", np.eye(6, dtype=np.float32), k=1).coverage.dropped == 0
    assert "sampling" not in json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert "sampling" not in json.loads((tmp_path / "r" / "manifest.json").read_text())


def test_a_refused_output_says_why(index: Path) -> None:
    with (
        Client.local(index) as client,
        pytest.raises(Exception, match=r"rows are left out by every=2.*annotate\(rows=...\)"),
    ):
        client.dual_output("0", np.eye(6, dtype=np.float32))


def test_the_command(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "inspect", str(index)]) == 0
    printed = capsys.readouterr().out
    assert "of a sample: recorded with every=2" in printed
    assert "not recorded" in printed
    assert main(["index", "inspect", str(index), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sampling"]["every"] == 2
    assert found["layers"][0]["dropped"] == MISSING
    np.save(tmp_path / "q.npy", np.eye(6, dtype=np.float32)[:1])
    query = ["--local", str(index), "--layer", "0", "--query", str(tmp_path / "q.npy")]
    assert main(["query", "sums", *query, "--group-by", "label"]) == 0
    assert "covers 30 of 30 rows; 50 more of training were not recorded" in capsys.readouterr().out
    assert main(["query", "top-k", *query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["coverage"]["dropped"] == 50
    assert main(["index", "verify", str(index)]) == 0
    assert "50 of 80 rows not recorded" in capsys.readouterr().out


def test_verify(index: Path, tmp_path: Path) -> None:
    """Marked layers count as ok; without rows of value zero alone the weights still rebuild."""
    report = verify_index(index)
    assert report.ok
    for layer in report.layers:
        assert layer.dropped == MISSING
        assert layer.exact_steps == 0
        assert "50 of 80 rows not recorded" in layer.note
    recorded(tmp_path / "z", zero_rows=False)
    build_index(tmp_path / "z", tmp_path / "zi")
    report = verify_index(tmp_path / "zi")
    assert report.ok
    for layer in report.layers:
        assert layer.dropped == {"zero": STEPS}
        assert layer.inexact == ()
        assert layer.exact_steps == STEPS
        assert layer.weight_error is not None
        assert layer.weight_error < 1e-5
        assert layer.note == "10 of 80 rows not recorded"


@pytest.mark.parametrize(
    ("field", "value"),
    [("every", 0), ("sample", 0), ("sample", 1.5), ("seed", -1), ("zero_rows", 1)],
)
@pytest.mark.parametrize("where", ["r", "i"])
def test_a_strange_manifest_is_refused(
    index: Path, tmp_path: Path, where: str, field: str, value: Any
) -> None:
    path = tmp_path / where / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["xxh3"]
    manifest["sampling"][field] = value
    write_sealed(path, manifest)
    with pytest.raises(DamagedError, match=rf"sampling\.{field}"):
        Recording.open(tmp_path / "r") if where == "r" else IndexManifest.load(index)


def test_strange_counts_are_refused(index: Path) -> None:
    manifest = json.loads((index / "manifest.json").read_text())
    del manifest["xxh3"]
    manifest["layers"][0]["dropped"]["rows"] = -1
    write_sealed(index / "manifest.json", manifest)
    with pytest.raises(DamagedError, match=r"layers\[0\]\.dropped\.rows"):
        IndexManifest.load(index)
