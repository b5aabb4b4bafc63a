"""A data-parallel run of real processes, a recording for each rank: followed while it trains, and
built by several machines; training and both of these killed in between."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import warm

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.index.plan import Options
from dualform.machines.building import build_on_machines
from dualform.store.versions import newest

from . import ranks_loop as loop

SHARD = 50
PATIENCE_S = 120.0


def start(folder: Path, first: int, last: int) -> list[warm.Process]:
    """All ranks."""
    program = ["-m", "tests.machines.ranks_loop"]
    arguments = [loop.WORLD, folder, first, last]
    return [warm.start("python", *program, rank, *arguments) for rank in range(loop.WORLD)]


# The command, with all that it says where its errors go.
BUILD = """
import os
from dualform.cli.main import program
os.dup2(2, 1)
program()
"""


def command(folder: Path, index: str, *options: str) -> warm.Process:
    """`dualform index build` of the run, its words in INDEX.log."""
    arguments = [folder / "run", folder / index, "--shard-rows", SHARD, "--parts", "label"]
    log = (folder / f"{index}.log").open("a+b")
    return warm.start(BUILD, "index", "build", *arguments, *options, errors=log)


def following(folder: Path) -> warm.Process:
    return command(folder, "versions", "--follow", "--every", "0.1")


def wait_until(is_so: Callable[[], bool], *running: warm.Process) -> None:
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
    with ExitStack() as started:
        follower = started.enter_context(following(folder))
        wait_until(lambda: "waiting for training to begin" in said(), follower)
        ranks = [started.enter_context(rank) for rank in start(folder, 0, 20)]
        stopped = [folder / f"stopped-{rank}" for rank in range(loop.WORLD)]
        wait_until(lambda: all(path.exists() for path in stopped), follower, *ranks)
        for process in ranks:
            process.kill()
        # The last step that both had committed, of 20.
        cut_off = "training was cut off after 17 committed steps"
        wait_until(lambda: cut_off in said(), follower)
    crashed = newest(folder / "versions")
    with Index.open(crashed, device="cpu") as index:
        assert (index.steps, index.complete) == (17, False)
    with following(folder) as follower:
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


def test_machines_build_what_one_process_builds(run: Run, cluster: str, tmp_path: Path) -> None:
    """From the folder of all ranks, and from the ranks' own."""
    options = Options(shard_rows=SHARD, parts=("label",))
    ranks = [run.folder / "run" / f"rank-{rank}" for rank in (1, 0)]
    for number, recordings in enumerate((run.folder / "run", ranks)):
        index = tmp_path / f"{number}"
        build_on_machines(recordings, index, address="local", workers=2, options=options)
        assert files(index) == files(run.folder / "plain")


@pytest.mark.slow
def test_a_build_of_machines_that_was_killed_goes_on(run: Run, cluster: str) -> None:
    on_ray = (run.folder, "index", "--ray", cluster, "--workers", "1")
    pieces = run.folder / ".index.pieces"
    with command(*on_ray) as build:
        wait_until(lambda: len(list(pieces.glob("notes/*.json"))) > 1, build)
        build.send_signal(signal.SIGKILL)
    assert not (run.folder / "index").exists()
    with command(*on_ray) as again:
        assert again.wait(timeout=PATIENCE_S) == 0, (run.folder / "index.log").read_text()
    assert files(run.folder / "index") == files(run.folder / "plain")
    assert not pieces.exists()
