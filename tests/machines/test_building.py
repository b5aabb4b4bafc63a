"""An index that several processes of a real Ray build: a build's files, whoever is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import digits
import numpy as np
import psutil
import pytest
import torch
import warm
from synthetic import make_recording

from dualform.index import BuildError, build_index
from dualform.index.plan import Options
from dualform.machines import building
from dualform.machines.building import build_on_machines
from dualform.store import ExistsError
from dualform.store.index import IndexManifest

SHARD = 300
OPTIONS = Options(shard_rows=SHARD, parts=("label",))


def files(index: Path) -> dict[str, bytes]:
    return {
        path.relative_to(index).as_posix(): path.read_bytes()
        for path in index.rglob("*")
        if path.is_file()
    }


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, marks=pytest.mark.slow), adamw],
    ids=["momentum", "adamw"],
)
def recording(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "recording"
    digits.record(path, make=request.param)
    return path


@pytest.fixture(scope="module")
def plain(recording: Path) -> dict[str, bytes]:
    build_index(recording, recording.parent / "plain", shard_rows=SHARD, parts=["label"])
    return files(recording.parent / "plain")


def build(recording: Path, index: Path, **options: Any) -> None:
    arguments = {"address": "local", "workers": 2, "options": OPTIONS, **options}
    build_on_machines(recording, index, **arguments)


def test_the_files_are_those_of_one_process(
    cluster: str, recording: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    build(recording, tmp_path / "index", progress=lambda *told: seen.append(told))
    assert files(tmp_path / "index") == plain
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(ExistsError, match="never overwritten"):
        build(recording, tmp_path / "index")


@pytest.mark.slow
@pytest.mark.parametrize("recording", [None], indirect=True)
def test_packed_files_are_those_of_one_process(
    cluster: str, recording: Path, tmp_path: Path
) -> None:
    build(recording, tmp_path / "index", options=Options(shard_rows=SHARD, pack=True))
    build_index(recording, tmp_path / "plain", shard_rows=SHARD, pack=True)
    assert files(tmp_path / "index") == files(tmp_path / "plain")
    manifest = IndexManifest.load(tmp_path / "index")
    stored, unpacked = manifest.row_bytes("2")
    assert stored < unpacked


def test_an_interrupted_build_goes_on(
    cluster: str,
    recording: Path,
    plain: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is there is not made again, and nothing is to be seen before all is."""

    def stop(done: int, total: int) -> None:
        if done > total / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(recording, tmp_path / "index", progress=stop, workers=1)
    assert not (tmp_path / "index").exists()
    notes = {path: path.stat().st_ino for path in tmp_path.glob(".index.pieces/notes/*.json")}
    assert 2 <= len(notes) < 7
    kept = {path: path.stat().st_mtime_ns for path in notes}
    taken: list[str] = []
    take = building._Work._take
    monkeypatch.setattr(
        building._Work, "_take", lambda *given: (taken.append(str(given[2])), take(*given))
    )
    build(recording, tmp_path / "index", progress=lambda done, total: unchanged(kept))
    assert files(tmp_path / "index") == plain
    assert len([name for name in taken if name.startswith("shard")]) <= 7 - len(notes)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def unchanged(kept: dict[Path, int]) -> None:
    for path, time_ns in kept.items():
        assert path.stat().st_mtime_ns == time_ns


@pytest.mark.slow
def test_killed_workers_are_replaced(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, killed in the middle of their work."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((40_000, 64)).astype(np.float32)
    make_recording(tmp_path / "run", keys, keys[:, :40], 1000, 0.1, 0.9, {})
    killed: list[int] = []
    done = threading.Event()

    def kill() -> None:
        while not done.is_set() and len(killed) < 2:
            for child in psutil.Process(os.getpid()).children(recursive=True):
                try:
                    if child.name().startswith("ray::do") and len(killed) < 2:
                        child.kill()
                        killed.append(child.pid)
                        time.sleep(1)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.001)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        build(tmp_path / "run", tmp_path / "index", workers=3, options=Options(shard_rows=2000))
    finally:
        done.set()
        killer.join()
    assert killed
    build_index(tmp_path / "run", tmp_path / "plain", shard_rows=2000)
    assert files(tmp_path / "index") == files(tmp_path / "plain")


def test_what_is_wrong_is_said(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = np.ones((50, 3), np.float32)
    run = make_recording(tmp_path / "run", keys, keys, 10, 0.1, 0.0, {})
    index = tmp_path / "index"
    with pytest.raises(BuildError, match="workers is 0"):
        build(run, index, workers=0)
    with pytest.raises(BuildError, match="no column 'label'"):
        build(run, index, workers=1, options=Options(parts=("label",)))
    with monkeypatch.context() as patch:
        patch.setattr(building, "mark_of", lambda chains: [[1, "0" * 16]])
        with pytest.raises(BuildError, match="is not on this node what it is where the build was"):
            build(run, index, workers=1, options=Options())
    with monkeypatch.context() as patch:
        patch.setattr(building, "__version__", "0.0.1")
        with pytest.raises(BuildError, match=r"a node has dualform .*, and the build 0\.0\.1"):
            build(run, index, workers=1, options=Options())
    data = next(run.glob("segments/*.bin"))
    data.write_bytes(data.read_bytes().replace(b"\x80\x3f", b"\x80\x40", 1))
    with pytest.raises(BuildError, match=r"\.bin.*not the one that was written"):
        build(run, index, workers=1, options=Options())
    assert not index.exists()


@pytest.mark.slow
@pytest.mark.parametrize("recording", [None], indirect=True)
def test_the_command(recording: Path, plain: dict[str, bytes], cluster: str) -> None:
    index = recording.parent / "by-command"
    arguments = ["--shard-rows", SHARD, "--parts", "label", "--ray"]
    command = ("dualform", "index", "build", recording)
    done = warm.run(*command, index, *arguments, cluster, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert files(index) == plain
    wrong = warm.run(*command, f"{index}2", *arguments, "127.0.0.1:1")
    assert wrong.returncode == 2
    assert "Ray cannot be reached at 127.0.0.1:1" in wrong.stderr
    stopped = warm.start(*command, f"{index}3", *arguments, cluster, "--workers", 1)
    pieces = index.with_name(f".{index.name}3.pieces")
    until = time.monotonic() + 100
    while not list(pieces.glob("notes/*.json")) and time.monotonic() < until:
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    errors = stopped.communicate(timeout=100)[1]
    assert (stopped.returncode, "Traceback" in errors) == (143, False), errors
    assert not Path(f"{index}3").exists()
    assert list(pieces.glob("notes/*.json"))
