"""`dualform index inspect --device`: host memory stands in for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from standing_in import FAST, repeats, tf32

from dualform.cli.main import main
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.stand_in import StandIn

from .conftest import dualform


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repeats(tmp_path_factory.mktemp("memory"))[0]


def test_what_lies_where_is_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def find(device: object, memory: object) -> Devices:
        asked[:] = [device, memory]
        return Devices([StandIn(0), StandIn(1, rounded=tf32)], 64 << 20, paces=FAST)

    monkeypatch.setattr(Devices, "find", find)
    inspect = ["index", "inspect", str(path), "--device", "cuda:0,cuda:1", "--gpu-memory", "0.5"]
    assert main(inspect) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert asked == [["cuda:0", "cuda:1"], 0.5]
    assert ["fc", "stand-in:0", "10000", "1.5", "MiB", "234.4", "KiB"] in lines
    (refused,) = [line for line in lines if line[:1] == ["stand-in:1"]]
    assert "float64's" in refused
    assert main([*inspect, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]
    (residence,) = found["layers"]["fc"]
    assert residence["rows"] == 10_000
    assert residence["key_bytes"] == 10_000 * 160
    assert [state["refused"] is None for state in found["states"]] == [False, True]


def test_a_device_that_is_not_there(path: Path) -> None:
    for words, says in (
        (["--device", "tpu"], "allowed are auto, cpu, cuda"),
        (["--device", "cuda", "--gpu-memory", "lots"], "gpu_memory is 'lots'"),
        (["--gpu-memory", "0.5"], "name one"),
        (["--device", "cpu"], "there is no GPU"),
    ):
        done = dualform("index", "inspect", path, *words)
        assert done.status == 2, done
        assert says in done.err
    if not torch.cuda.is_available():
        done = dualform("index", "inspect", path, "--device", "cuda:1")
        assert (done.status, "torch finds no GPU" in done.err) == (2, True)
