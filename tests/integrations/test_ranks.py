"""Trainer and Lightning in two processes: their callbacks record what each of them trains."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import warm

from dualform.client import Client
from dualform.engine import verify_index
from dualform.index import build_index


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "package", "column"),
    [("trainer", "transformers", "example"), ("lightning", "lightning", "label")],
)
def test_both_ranks_become_one_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str, package: str, column: str
) -> None:
    pytest.importorskip(package)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONWARNINGS": "ignore",
    }
    program = ["-m", "tests.integrations.ranks"]
    with monkeypatch.context() as patch:
        for name, value in common.items():
            patch.setenv(name, value)
        ranks = warm.start("python", *program, framework, tmp_path)
    said = ranks.communicate()[1]
    assert ranks.returncode == 0, said
    build_index(tmp_path / "run", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report
    with Client.local(tmp_path / "index") as client:
        for layer in client.index().layers.values():
            assert not layer.inexact
            assert layer.columns["rank"] == "int64"
            assert column in layer.columns
