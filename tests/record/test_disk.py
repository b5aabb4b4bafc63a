"""The disk: killed processes, full disks, back-pressure, and what is said about space."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from torch import nn

from dualform.record import DiskSink, Recorder, RecordingFailedError, disk
from dualform.store import direct
from dualform.store.recording import Recording

from . import reading

TRAINER = Path(__file__).with_name("trainer.py")
STEPS = 60
SEGMENT_BYTES = 100_000


def start(path: Path, pause: float) -> warm.Process:
    return warm.start(TRAINER.read_text(), path, STEPS, SEGMENT_BYTES, pause)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The run that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole") / "r"
    process = start(path, 0)
    assert process.communicate(timeout=120)[0].split()[-1] == str(STEPS - 1)
    assert process.returncode == 0
    return Recording.open(path)


@pytest.mark.parametrize("segments", [1, 4, 9])
def test_after_kill_9_everything_committed_is_there(
    tmp_path: Path, whole: Recording, segments: int
) -> None:
    process = start(tmp_path / "r", 0.02)
    for _ in process.stdout:  # a line per step
        if len(list((tmp_path / "r" / "segments").glob("*.json"))) >= segments:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    recording = Recording.open(tmp_path / "r")
    assert not recording.complete
    assert recording.final() is None
    assert 0 < recording.steps < STEPS
    ledger, full = recording.ledger(), whole.ledger()
    for name, rows in ledger.parameters.items():
        assert rows == full.parameters[name][: recording.steps]
    for name, array in recording.initial().items():
        assert np.array_equal(array, whole.initial()[name])
    for layer in recording.manifest.layers:
        passes = recording.passes(layer)
        expected = whole.passes(layer)[: len(passes)]
        assert len(passes) == recording.steps
        for mine, theirs in zip(passes, expected, strict=True):
            assert np.array_equal(
                reading.keys(recording, layer, mine), reading.keys(whole, layer, theirs)
            )
            assert np.array_equal(
                reading.values(recording, layer, mine), reading.values(whole, layer, theirs)
            )
        blocks = [record.block for record in passes]
        assert recording.read_rows(blocks).equals(whole.read_rows(blocks))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 256) -> None:
    optimizer.zero_grad()
    model(torch.randn(rows, 64)).pow(2).mean().backward()
    optimizer.step()


def fill(path: Path, sink: DiskSink) -> tuple[int, str]:
    """Record until the disk is full; returns the steps taken and the message."""
    model, optimizer = network()
    steps = 0
    with pytest.raises(RecordingFailedError) as caught, Recorder(model, optimizer, sink):  # noqa: PT012
        for _ in range(2000):
            step(model, optimizer)
            steps += 1
    assert not model._forward_hooks
    return steps, str(caught.value)


def check_full(path: Path, steps: int, message: str, why: str = "no space left") -> None:
    assert why in message
    assert "free some space" in message
    recording = Recording.open(path)
    assert not recording.complete
    assert 0 < recording.steps <= steps
    assert f"{recording.steps:,} of" in message
    for record in recording.passes(""):
        reading.keys(recording, "", record)
        reading.values(recording, "", record)
    assert recording.ledger().steps == recording.steps


def test_a_full_disk(tmp_path: Path) -> None:
    """A real file system of 4 MiB, where this machine lets us mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        sink = DiskSink(mount / "r", segment_bytes=1 << 20)
        steps, message = fill(mount / "r", sink)
        check_full(mount / "r", steps, message)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    """As of a disk that is unplugged: what is said is that it has gone, not what stays readable."""
    path = tmp_path / "r"
    model, optimizer = network()
    sink = DiskSink(path)

    def lost() -> None:
        with Recorder(model, optimizer, sink):
            for number in range(5):
                step(model, optimizer)
                if number == 2:
                    sink.commit()
                    path.rename(tmp_path / "elsewhere")
            sink.commit()

    with pytest.raises(RecordingFailedError) as refusal:
        lost()
    assert "has gone" in str(refusal.value)
    assert "3 of 5 steps were committed" in str(refusal.value)
    assert "stay readable" not in str(refusal.value)
    with Recording.open(tmp_path / "elsewhere") as recording:
        assert recording.steps == 3


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The kernel refuses to let the segment grow (EFBIG); the training loop hears of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Commits by age make segments of some steps each, until one outgrows the limit.
    sink = DiskSink(tmp_path / "r", segment_bytes=64 << 20, commit_seconds=0.05)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))
        model, optimizer = network()
        with pytest.raises(RecordingFailedError) as caught, Recorder(model, optimizer, sink):  # noqa: PT012
            step(model, optimizer)
            sink.commit()
            sink._commit_seconds = 1e9
            for _ in range(2000):
                step(model, optimizer)
        message = str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    check_full(tmp_path / "r", 2000, message, "`ulimit -f`")


def test_the_loops_own_exception_is_not_hidden(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, optimizer = network()
    monkeypatch.setattr(direct.os, "pwritev", full)
    with pytest.raises(ZeroDivisionError), Recorder(model, optimizer, tmp_path / "r"):  # noqa: PT012
        step(model, optimizer)
        raise ZeroDivisionError
    assert "no space left" in caplog.text


def test_an_exception_in_the_middle_of_a_step(tmp_path: Path) -> None:
    model, optimizer = network()
    with pytest.raises(KeyboardInterrupt), Recorder(model, optimizer, tmp_path / "r"):  # noqa: PT012
        for i in range(5):
            if i == 3:
                model(torch.randn(4, 64)).sum().backward()
                raise KeyboardInterrupt
            step(model, optimizer)
    recording = Recording.open(tmp_path / "r")
    assert recording.complete
    assert recording.steps == 3
    assert recording.marks[""] == []
    reading.assert_rebuilds(tmp_path / "r")


def test_where_there_is_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening or writing with O_DIRECT fails with EINVAL: buffered writes give the same bytes."""
    real_open, real_write = os.open, os.pwritev

    def no_direct_open(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    refused: list[int] = []

    def no_direct_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, buffers, offset)

    rows = {}
    for name in ("direct", "open", "write"):
        with monkeypatch.context() as patch:
            if name == "open":
                patch.setattr(direct.os, "open", no_direct_open)
            if name == "write":
                patch.setattr(direct.os, "pwritev", no_direct_write)
            model, optimizer = network()
            with Recorder(model, optimizer, tmp_path / name):
                for _ in range(3):
                    step(model, optimizer)
        recording = Recording.open(tmp_path / name)
        rows[name] = [reading.values(recording, "", record) for record in recording.passes("")]
    assert refused
    assert np.array_equal(rows["direct"], rows["open"])
    assert np.array_equal(rows["direct"], rows["write"])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:4096]], offset)

    rows = []
    for name, write in (("whole", real), ("short", short)):
        monkeypatch.setattr(direct.os, "pwritev", write)
        torch.manual_seed(0)
        model, optimizer = network()
        with Recorder(model, optimizer, tmp_path / name):
            step(model, optimizer)
        recording = Recording.open(tmp_path / name)
        rows.append(reading.values(recording, "", recording.passes("")[0]))
    np.testing.assert_array_equal(rows[0], rows[1])


def test_a_full_queue_waits_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    largest = 0
    sink = DiskSink(tmp_path / "r", queue_bytes=1 << 20, segment_bytes=256 << 10)

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal largest
        time.sleep(0.01)
        largest = max(largest, sink._waiting_bytes)
        return real(fd, buffers, offset)

    monkeypatch.setattr(direct.os, "pwritev", slow)
    model, optimizer = network()
    with Recorder(model, optimizer, sink):
        for _ in range(60):
            step(model, optimizer)
    assert Recording.open(tmp_path / "r").steps == 60
    assert largest <= (1 << 20) + (256 << 10) + 2 * 256 * 64 * 4
    reading.assert_rebuilds(tmp_path / "r")


def test_the_writing_thread_ends(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "r"):
        step(model, optimizer)
    assert set(threading.enumerate()) <= before


def test_says_what_a_step_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "r"):
        step(model, optimizer)
        (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert "131.07 kB per step" in message  # 256 rows of 64 + 64 float32
    assert f"{tmp_path / 'r'} (" in message
    enough = re.search(r"enough for ([\d,]+) steps", message)
    assert enough is not None
    steps = int(enough[1].replace(",", ""))
    assert steps == pytest.approx(shutil.disk_usage(tmp_path).free / 131072, rel=0.05)


def test_warns_where_the_planned_run_does_not_fit(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "fits", steps=3):
        step(model, optimizer)
    before = [p.clone() for p in model.parameters()]
    with Recorder(model, optimizer, tmp_path / "r", steps=free // 131072 * 2):
        model(torch.randn(256, 64)).sum().backward()
        with pytest.warns(UserWarning, match="GB are free; record fewer layers"):
            optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


def test_segments_are_committed_by_age(tmp_path: Path) -> None:
    model, optimizer = network()
    sink = DiskSink(tmp_path / "r", commit_seconds=0.6)
    with Recorder(model, optimizer, sink):
        step(model, optimizer)
        time.sleep(0.7)
        step(model, optimizer)
        deadline = time.monotonic() + 10
        while not list((tmp_path / "r" / "segments").glob("*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert Recording.open(tmp_path / "r").steps == 2


def test_segments_are_committed_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may be short and metadata long; their table is made in memory."""
    monkeypatch.setattr(disk, "_SEGMENT_ROWS", 1000)
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(20):
            step(model, optimizer)
    assert len(list((tmp_path / "r" / "segments").glob("*.json"))) == 20 * 256 // 1024
    assert Recording.open(tmp_path / "r").steps == 20
