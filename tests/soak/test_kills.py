"""kill -9 at random moments: a recorder, a builder, a server; and what is there afterwards.

Committed is what a segment's .json says that stood there before the kill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dualform.client import Client
from dualform.client.errors import CancelledError, DualformError, UnavailableError
from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import DiskSink, Recorder
from dualform.store.recording import Recording

from .counts import SEED, count, tell
from .forking import Forks, alive, kill
from .training import FILTERS, Memory, batch, queries
from .workers import PAYLOADS, trained

pytestmark = pytest.mark.slow
KILLS_OF_ONE = 8
LAYER = "0"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


def committed(path: Path) -> int:
    """Steps of the segments that are committed now, by their own words."""
    return sum(json.loads(each.read_bytes())["steps"] for each in path.glob("segments/*.json"))


def check_recording(path: Path, seed: int) -> Recording:
    """Every row, annotation and payload of a recording is what was trained with."""
    recording = Recording.open(path)
    passes = recording.passes(LAYER)
    assert [record.step for record in passes] == list(range(recording.steps))
    table = recording.read_rows([record.block for record in passes]).to_pydict()
    first = 0
    for record in passes:
        rows = batch(seed * 10_000 + record.step)
        keys, values = np.empty(rows.keys.shape, "f4"), np.empty(rows.targets.shape, "f4")
        recording.read_keys(record, keys)
        recording.read_values(record, values)
        np.testing.assert_array_equal(keys, rows.keys)
        np.testing.assert_array_equal(values, -rows.targets)
        part = slice(first, first + len(keys))
        first = part.stop
        assert table["label"][part] == rows.labels.tolist()
        assert table["task"][part] == [rows.task] * len(keys)
    known = {i for each in recording.example_tables() for i in each["id"].to_pylist()}
    assert known >= {*range(0, recording.steps, PAYLOADS)}
    assert recording.ledger().steps == recording.steps
    return recording


def test_recorders(forks: Forks, tmp_path: Path) -> None:
    wanted, rows, kills = count(8, 260), 0, 0
    chance = random.Random(SEED + 1)
    outcomes: Counter[str] = Counter()
    while kills < wanted:
        seed, path = kills, tmp_path / f"r{kills}"
        start: int | None = None
        for _ in range(KILLS_OF_ONE):
            kills += 1
            started = Path(f"{path}.started")
            started.unlink(missing_ok=True)
            pid = forks.start("record", str(path), seed, start, 10**6)
            safe, end = start or 0, time.monotonic() + 60
            while kills % 2 and not (started.exists() and committed(path) > safe):  # else perhaps
                assert time.monotonic() < end, "nothing is committed"
                time.sleep(0.005)
            time.sleep(chance.random() ** 2 * 0.5)
            if started.exists():
                safe = max(safe, committed(path))
            assert alive(pid), "it ended by itself"
            kill(pid)
            if not (path / "manifest.json").exists():
                outcomes["never started"] += 1
                start = None
                continue
            recording = check_recording(path, seed)
            assert recording.steps >= safe
            rows += recording.rows(LAYER)
            outcomes["resumed" if start is not None else "started"] += 1
            back = chance.random() < 0.2 or recording.steps > 400
            start = chance.randrange(min(400, recording.steps) + 1) if back else recording.steps
            recording.close()
        if start is None:
            continue
        trainer = trained(seed, start)
        sink = DiskSink(path)
        with Recorder(trainer.model, trainer.optimizer, sink, resume_at_step=start) as recorder:
            recorder.add_examples([start], ["the last"])
            trainer.step(batch(seed * 10_000 + start), recorder.annotate)
        build_index(path, tmp_path / "index")
        assert verify_index(tmp_path / "index").ok
        left = {each.name for each in path.rglob("*") if each.suffix == ".tmp"}
        assert not left
        shutil.rmtree(tmp_path / "index")
        shutil.rmtree(path)
    assert rows
    tell(f"kills: {kills} of recorders, 0 of {rows:,} committed rows lost: {dict(outcomes)}")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = trained(0, 0)
    path = tmp_path_factory.mktemp("whole") / "recording"
    with Recorder(trainer.model, trainer.optimizer, path) as recorder:
        for step in range(400):
            trainer.step(batch(step), recorder.annotate)
    return path


@lru_cache(maxsize=1)
def everything_recorded() -> Memory:
    """What `recording` holds."""
    return trained(0, 400, copies=True).memory()


def check_index(path: Path) -> None:
    """Every file is as written, and the answers are the definition's."""
    memory, asked = everything_recorded(), queries(3, 2)
    with Index.open(path, device="cpu") as index:
        index.verify_files()
        assert index.damage is None
        hits = index.top_k(LAYER, asked, 7)
        scores = memory.scores(asked)
        everything = FILTERS[0].selects(memory.columns)
        for q in range(2):
            assert hits.rows[q].tolist() == memory.best(scores[q], everything, 7, "largest", None)
        expected = memory.output(asked, everything, None)
        np.testing.assert_allclose(index.dual_output(LAYER, asked).values, expected, rtol=1e-4)


def test_builders(forks: Forks, recording: Path, tmp_path: Path) -> None:
    wanted, kills = count(6, 160), 0
    chance = random.Random(SEED + 2)
    outcomes: Counter[str] = Counter()
    target = tmp_path / "out" / "index"
    begin = time.monotonic()
    pid = forks.start("build", str(recording), str(target))
    while alive(pid):
        time.sleep(0.005)
    length = time.monotonic() - begin
    check_index(target)
    shutil.rmtree(target)
    while kills < wanted:
        pid = forks.start("build", str(recording), str(target))
        slept = chance.random() * 1.1 * length
        time.sleep(slept)
        kills += 1
        kill(pid)
        if target.exists():
            outcomes["whole"] += 1
            length = min(length, slept)  # the machine was busier when the first was timed
            check_index(target)
            shutil.rmtree(target)
        else:
            outcomes["none"] += 1
    assert outcomes["none"] > wanted / 4
    build_index(recording, target, shard_rows=64)
    check_index(target)
    assert [each.name for each in target.parent.iterdir()] == ["index"]
    tell(f"kills: {kills} of builders, 0 unreadable indexes: {dict(outcomes)}")


def test_servers(forks: Forks, recording: Path, tmp_path: Path) -> None:
    wanted, kills = count(2, 100), 0
    chance = random.Random(SEED + 3)
    versions = tmp_path / "versions"
    for name, rows in (("a", 64), ("b", 1000)):
        build_index(recording, versions / name, shard_rows=rows)
    memory, asked = everything_recorded(), queries(5, 2)
    best = memory.best(memory.scores(asked)[0], np.ones(memory.rows, bool), 5, "largest", None)
    answered = 0

    def ask(address: str, stop: threading.Event, wrong: list[str]) -> None:
        nonlocal answered
        try:
            with Client(address, retry=None, timeout=20) as client:
                while not stop.is_set():
                    hits = client.top_k(LAYER, asked, k=5)
                    if hits.rows[0].tolist() != best:
                        wrong.append(str(hits.rows))
                    answered += 1
        except (UnavailableError, CancelledError):
            pass  # killed
        except DualformError as error:
            wrong.append(repr(error))

    while kills < wanted:
        address = tmp_path / f"address{kills}"
        pid = forks.start("serve", str(versions), str(address))
        wrong: list[str] = []
        stop = threading.Event()
        if kills % 4:  # else while it starts
            end = time.monotonic() + 60
            while not address.exists():
                assert time.monotonic() < end
                time.sleep(0.005)
            where = address.read_text()
            clients = [threading.Thread(target=ask, args=(where, stop, wrong)) for _ in range(3)]
            for client in clients:
                client.start()
            before = answered
            while kills % 2 and answered == before and not wrong:  # else perhaps before any
                assert time.monotonic() < end
                time.sleep(0.005)
            time.sleep(chance.random() * 0.2)
            os.utime(versions / "ab"[kills % 2] / "manifest.json")
            os.kill(pid, signal.SIGHUP)
            time.sleep(chance.random() * 0.1)
        else:
            clients = []
            time.sleep(chance.random() * 0.3)
        kill(pid)
        kills += 1
        stop.set()
        for client in clients:
            client.join(60)
            assert not client.is_alive()
        assert not wrong
        for name in "ab":
            check_index(versions / name)
    assert answered
    tell(f"kills: {kills} of servers, {answered:,} answers before, 0 wrong, 0 unreadable indexes")
