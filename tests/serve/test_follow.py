"""A trainer, a follower and a server, each a process of its own; the first two are killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

from dualform.client import Client
from dualform.index import build_index
from dualform.store.recording import Recording
from dualform.store.versions import versions

ROWS, D = 64, 6
SHARD = 700
LAYER = "0"
OFTEN = ("--every", "0.1", "--shard-rows", SHARD)

TRAINER = f"""
import sys, time
from pathlib import Path
import torch
from torch import nn
from dualform.record import DiskSink, Recorder
path, resume = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear({D}, 5), nn.ReLU(), nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
def step(number):
    random = torch.Generator().manual_seed(number)
    x = torch.randn(({ROWS}, {D}), generator=random)
    y = torch.randint(0, 3, ({ROWS},), generator=random)
    if recorder is not None:
        recorder.annotate(label=y)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
recorder = None
for number in range(resume):
    step(number)
sink = DiskSink(path, commit_seconds=0.1)
recorder = Recorder(model, optimizer, sink, **({{"resume_at_step": resume}} if resume else {{}}))
print("begun", flush=True)
number = resume
while not path.with_name("enough").exists():
    step(number)
    number += 1
    time.sleep(0.03)
recorder.close()
"""


@pytest.fixture
def processes() -> Iterator[list[warm.Process]]:
    started: list[warm.Process] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)  # answers are compared with all that was recorded, each time
    return found


def steps_of(folder: Path) -> int:
    found = versions(folder) if folder.is_dir() else []
    return int(found[-1].name.rpartition("-")[2]) if found else 0


def check_answers(client: Client, run: Path, first: int) -> int:
    """The best rows are those of the committed rows, by a float64 loop over the recording."""
    queries = np.random.default_rng(first).standard_normal((2, D)).astype(np.float32)
    hits = client.top_k(LAYER, queries, k=5)
    steps = hits.coverage.total // ROWS
    assert hits.coverage.total == steps * ROWS
    with Recording.open(run) as recording:
        keys = np.empty((steps * ROWS, D), np.float32)
        for number, record in enumerate(recording.passes(LAYER)[:steps]):
            recording.read_keys(record, keys[number * ROWS : (number + 1) * ROWS])
    scores = (queries.astype(np.float64) @ keys.T.astype(np.float64)).astype(np.float32)
    for row, score, best in zip(scores, hits.scores, hits.rows, strict=True):
        order = np.lexsort((np.arange(len(row)), -row))[:5]
        np.testing.assert_array_equal(best, order)
        np.testing.assert_array_equal(score, row[order])
    return int(steps)


@pytest.mark.slow
def test_from_training_to_answers_while_it_runs(
    tmp_path: Path, processes: list[warm.Process]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "versions"

    def start(task: str, *arguments: object) -> warm.Process:
        processes.append(warm.start(task, *arguments))
        return processes[-1]

    def follow() -> warm.Process:
        return start("dualform", "index", "build", "--follow", *OFTEN, run, folder)

    follower = follow()  # before there is anything to follow
    trainer = start(TRAINER, run, 0)
    until(lambda: steps_of(folder))
    server = start("dualform", "serve", folder, "--port", 0)
    address = server.stdout.readline().removeprefix("listening on ").strip()
    with Client(address, timeout=60) as client:
        seen = check_answers(client, run, 1)
        until(lambda: check_answers(client, run, 2) > seen)

        follower.kill()
        seen = check_answers(client, run, 3)
        assert len(versions(folder)) <= 4
        follower = follow()
        until(lambda: check_answers(client, run, 4) * ROWS > max(seen * ROWS, 4 * SHARD))

        trainer.kill()
        trainer.wait()
        with Recording.open(run) as recording:
            committed = recording.steps
        until(lambda: check_answers(client, run, 5) == committed)
        trainer = start(TRAINER, run, committed - 5)  # what came after is taken back
        assert trainer.stdout.readline()
        until(lambda: steps_of(folder) > committed)
        until(lambda: check_answers(client, run, 6) > committed)

        (tmp_path / "enough").touch()
        assert trainer.wait() == 0
        assert follower.wait() == 0
        until(lambda: client.index().steps == steps_of(folder))
        check_answers(client, run, 7)
    out = follower.stdout.read()
    assert "waiting for it to be resumed" in out
    assert "this is the last" in out

    build_index(run, tmp_path / "plain", shard_rows=SHARD)
    last = versions(folder)[-1]
    for path in (tmp_path / "plain").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (last / path.relative_to(tmp_path / "plain")).read_bytes()
    assert len(versions(folder)) <= 3  # two, and one that the server had until just now
    assert not list(folder.glob(".next"))
    assert "Traceback" not in server.errors()
    assert "damaged" not in server.errors()


def test_an_interrupted_follower_leaves_a_whole_version(
    tmp_path: Path, processes: list[warm.Process]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "versions"
    processes.append(warm.start(TRAINER, run, 0))
    for number, status, wanted in ((2, 130, 1), (15, 143, 2)):
        follower = warm.start("dualform", "index", "build", "--follow", run, folder)
        processes.append(follower)
        until(lambda wanted=wanted: folder.is_dir() and len(versions(folder)) >= wanted)
        follower.send_signal(number)
        assert follower.wait(60) == status
        assert versions(folder)
        assert not (folder / ".next").exists()
        assert not folder.with_name(".versions.lock").exists()
        with Client.local(folder) as client:
            check_answers(client, run, number)
