"""A data-parallel run of real processes, a recording for each rank: followed while it trains, and
built by several machines; training and both of these killed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.index.plan import Options
from dualform.machines.building import build_on_machines
from dualform.machines.fleet import Fleet
from dualform.store.versions import newest

from . import ranks_loop as loop

SHARD = 50
PATIENCE_S = 120.0


def start(folder: Path, first: int, last: int) -> list[subprocess.Popen[str]]:
    """All ranks."""
    root = Path(__file__).parents[2]
    arguments = [str(loop.WORLD), str(folder), str(first), str(last)]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.machines.ranks_loop", str(rank), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(loop.WORLD)
    ]


def command(folder: Path, index: str, *options: str) -> subprocess.Popen[str]:
    """`dualform index build` of the run, its words in INDEX.log."""
    arguments = ["run", index, "--shard-rows", str(SHARD), "--parts", "label", *options]
    with (folder / f"{index}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "dualform.cli", "index", "build", *arguments],
            stdout=log,
            stderr=log,
            text=True,
            cwd=folder,
        )


def wait_until(is_so: Callable[[], bool], *running: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in running)
        time.sleep(0.02)


@dataclass(frozen=True)
class Run:
    """A run that was closed in the end.

    Attributes:
        folder: With the recordings in `run`, versions in `versions`, a build of it in `plain`.
        said: What those said who published versions.
    """

    folder: Path
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "versions.log"

    def said() -> str:
        return log.read_text()

    (folder / "run").mkdir()
    (folder / "run" / ".rank-0.lock").touch()  # as for a moment, before a rank's folder is there
    follower = command(folder, "versions", "--follow", "--every", "0.1")
    wait_until(lambda: "waiting for training to begin" in said(), follower)
    ranks = start(folder, 0, 20)
    stopped = [folder / f"stopped-{rank}" for rank in range(loop.WORLD)]
    wait_until(lambda: all(path.exists() for path in stopped), follower, *ranks)
    for process in ranks:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    # The last step that both had committed, of 20.
    wait_until(lambda: "training was cut off after 17 committed steps" in said(), follower)
    follower.kill()
    follower.wait(timeout=PATIENCE_S)
    crashed = newest(folder / "versions")
    with Index.open(crashed, device="cpu") as index:
        assert (index.steps, index.complete) == (17, False)
    follower = command(folder, "versions", "--follow", "--every", "0.1")
    ranks = start(folder, loop.CHECKPOINT, loop.STEPS)
    errors = [process.communicate(timeout=PATIENCE_S)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert follower.wait(timeout=PATIENCE_S) == 0, said()
    build_index(folder / "run", folder / "plain", shard_rows=SHARD, parts=["label"])
    return Run(folder, said())


def test_the_last_version_is_what_a_build_gives(run: Run) -> None:
    ours, theirs = newest(run.folder / "versions"), run.folder / "plain"
    assert "the recording is closed, this is the last" in run.said
    assert "Traceback" not in run.said
    assert verify_index(ours).ok
    queries = np.random.default_rng(0).standard_normal((3, loop.WIDTH)).astype(np.float32)
    with Index.open(ours, device="cpu") as a, Index.open(theirs, device="cpu") as b:
        a.verify_files()
        rows = loop.WORLD * loop.STEPS * loop.ROWS
        for index in (a, b):
            assert (index.steps, index.complete, index.layers["0"].rows) == (30, True, rows)
        one, other = (i.top_k("0", queries, rows, group_by="rank") for i in (a, b))
        assert one.rows.tobytes() == other.rows.tobytes()
        assert one.scores.tobytes() == other.scores.tobytes()
        for options in ({}, {"group_by": "label"}, {"at_step": 15}):
            one, other = (i.dual_output("0", queries, **options) for i in (a, b))
            assert one.values.tobytes() == other.values.tobytes()
    assert all(layer.exact_steps == loop.STEPS for layer in verify_index(theirs).layers)


def files(index: Path) -> dict[str, bytes]:
    return {
        p.relative_to(index).as_posix(): p.read_bytes() for p in index.rglob("*") if p.is_file()
    }


def test_machines_build_what_one_process_builds(run: Run, fleet: Fleet, tmp_path: Path) -> None:
    """From the folder of all ranks, and from the ranks' own."""
    options = Options(shard_rows=SHARD, parts=("label",))
    ranks = [run.folder / "run" / f"rank-{rank}" for rank in (1, 0)]
    for number, recordings in enumerate((run.folder / "run", ranks)):
        index = tmp_path / f"{number}"
        build_on_machines(recordings, index, address="local", workers=2, options=options, cpus=0.0)
        assert files(index) == files(run.folder / "plain")


def test_a_build_of_machines_that_was_killed_goes_on(run: Run, ray_folder: Path) -> None:
    build = command(run.folder, "index", "--ray", "local", "--workers", "1")
    pieces = run.folder / ".index.pieces"
    wait_until(lambda: len(list(pieces.glob("notes/*.json"))) > 1, build)
    build.send_signal(signal.SIGKILL)
    build.wait(timeout=PATIENCE_S)
    assert not (run.folder / "index").exists()
    again = command(run.folder, "index", "--ray", "local", "--workers", "1")
    assert again.wait(timeout=PATIENCE_S) == 0, (run.folder / "index.log").read_text()
    assert files(run.folder / "index") == files(run.folder / "plain")
    assert not pieces.exists()
