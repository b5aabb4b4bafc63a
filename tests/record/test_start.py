"""Starting and continuing: what fails leaves nothing behind, and two never write one recording."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import warm
from torch import nn

from dualform.record import (
    OptimizerError,
    Recorder,
    RecordError,
    RecordingExistsError,
    RecordingFailedError,
    ResumeError,
)
from dualform.record.recorded import RecordedLayer
from dualform.store import ExistsError, files, recording_cut
from dualform.store.recording import Recording
from dualform.store.recording_writer import RecordingWriter

from . import reading

TRAINER = Path(__file__).with_name("trainer.py")


def network() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()


@contextmanager
def leaves_nothing(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> Iterator[None]:
    """No folder or file beside those that were there, no thread, no hook."""
    before = sorted(path.parent.rglob("*"))
    threads = set(threading.enumerate())
    yield
    assert sorted(path.parent.rglob("*")) == before
    assert set(threading.enumerate()) == threads
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(module._forward_hooks for module in model.modules())
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def works_afterwards(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    with Recorder(model, optimizer, path):
        train(model, optimizer)
    reading.assert_rebuilds(path)
    assert not list(path.parent.glob(".*.lock"))


@pytest.mark.parametrize("given", [None, "sgd", nn.Linear(2, 2)])
def test_something_else_as_the_optimizer(tmp_path: Path, given: object) -> None:
    model, optimizer = network()
    with leaves_nothing(model, optimizer, tmp_path / "r"):
        with pytest.raises(OptimizerError, match=r"must be a torch\.optim\.Optimizer") as caught:
            Recorder(model, given, tmp_path / "r")  # type: ignore[arg-type]
        assert isinstance(caught.value, RecordError)
        assert isinstance(caught.value, TypeError)
    works_afterwards(model, optimizer, tmp_path / "r")


@pytest.mark.parametrize("where", ["attach", "thread", "set up", "manifest"])
def test_a_constructor_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At every place where it has begun something."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    model, optimizer = network()
    with leaves_nothing(model, optimizer, tmp_path / "r"), monkeypatch.context() as patched:
        if where == "attach":
            attach, layers = RecordedLayer.attach, []

            def second_fails(layer: RecordedLayer) -> None:
                layers.append(layer)
                attach(layer) if len(layers) == 1 else fail()

            patched.setattr(RecordedLayer, "attach", second_fails)
        elif where == "thread":
            patched.setattr(threading.Thread, "start", fail)
        elif where == "set up":
            patched.setattr(RecordingWriter, "_set_up", fail)
        else:
            patched.setattr(files.os, "replace", fail)
        with pytest.raises(RuntimeError, match="boom"):
            Recorder(model, optimizer, tmp_path / "r")
    works_afterwards(model, optimizer, tmp_path / "r")


def test_a_full_disk_at_the_start(tmp_path: Path) -> None:
    """No byte may be written (EFBIG, by the kernel)."""
    model, optimizer = network()
    refused = pytest.raises(RecordingFailedError, match=r"`ulimit -f`.*free some")
    with leaves_nothing(model, optimizer, tmp_path / "r"), no_space(), refused:
        Recorder(model, optimizer, tmp_path / "r")
    works_afterwards(model, optimizer, tmp_path / "r")


@contextmanager
def no_space() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_path_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, optimizer = network()
    refused = pytest.raises(RecordingFailedError, match="choose a path")
    with leaves_nothing(model, optimizer, tmp_path / "r"), refused:
        Recorder(model, optimizer, tmp_path / "file" / "r")


def test_a_full_disk_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it strikes, the same call goes through once there is space."""
    model, optimizer = network()
    states = [{key: value.clone() for key, value in model.state_dict().items()}]
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(6):
            train(model, optimizer, 1)
            states.append({key: value.clone() for key, value in model.state_dict().items()})
    writes = 0
    message = r"No space left.*resume at the same step again"
    full_disk = pytest.raises(ResumeError, match=message)

    def full(path: Path, data: bytes) -> object:
        nonlocal writes
        writes += 1
        if writes > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return files.write_atomic(path, data)

    for allowed, said in ((0, full_disk), (1, full_disk), (2, nullcontext())):
        path = tmp_path / f"copy{allowed}"
        shutil.copytree(tmp_path / "r", path)
        model.load_state_dict(states[3])
        writes = 0
        monkeypatch.setattr(recording_cut, "write_atomic", full)
        with said, Recorder(model, optimizer, path, resume_at_step=3):
            pass
        monkeypatch.undo()
        with Recorder(model, optimizer, path, resume_at_step=3):
            train(model, optimizer)
        assert Recording.open(path).steps == 6
        reading.assert_rebuilds(path)


def test_a_recording_without_steps_is_resumed(tmp_path: Path) -> None:
    model, optimizer = network()
    Recorder(model, optimizer, tmp_path / "r").close()
    with Recorder(model, optimizer, tmp_path / "r", resume_at_step=0):
        train(model, optimizer)
    assert Recording.open(tmp_path / "r").steps == 3
    reading.assert_rebuilds(tmp_path / "r")


def test_a_start_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """Before the manifest was whole: nothing can be continued there, so a start may take it."""
    model, optimizer = network()
    (tmp_path / "r" / "segments").mkdir(parents=True)
    (tmp_path / "r" / "manifest.json.tmp").write_text("{")
    works_afterwards(model, optimizer, tmp_path / "r")
    (tmp_path / "mine" / "segments").mkdir(parents=True)
    (tmp_path / "mine" / "segments" / "precious").write_text("")
    with pytest.raises(ExistsError, match="never overwrites"):
        Recorder(model, optimizer, tmp_path / "mine")
    assert (tmp_path / "mine" / "segments" / "precious").exists()


def test_nothing_committed_is_continued_at_0(tmp_path: Path) -> None:
    process = trainer(tmp_path / "r", pause=10)
    process.kill()
    process.communicate()
    model, optimizer = kin()
    with pytest.raises(RecordingExistsError, match="of step 0 where nothing was committed"):
        Recorder(model, optimizer, tmp_path / "r")
    with Recorder(model, optimizer, tmp_path / "r", resume_at_step=0):
        pass
    assert Recording.open(tmp_path / "r").complete


def kin() -> tuple[nn.Sequential, torch.optim.SGD]:
    """The network of trainer.py."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trainer(path: Path, pause: float, steps: int = 40) -> warm.Process:
    """A real training process that has taken its first step."""
    process = warm.start(TRAINER.read_text(), path, steps, 20000, pause)
    assert process.stdout.readline() == "0\n"
    return process


def test_two_processes_on_one_path(tmp_path: Path) -> None:
    """A hung job restarted by a scheduler: the second is told who records, and spoils nothing."""
    process = trainer(tmp_path / "r", pause=0.05)
    model, optimizer = kin()
    who = f"process {process.pid} on {socket.gethostname()}"
    with pytest.raises(ResumeError, match=f"recorded by {who}.*Nothing was dropped"):
        Recorder(model, optimizer, tmp_path / "r", resume_at_step=0)
    with pytest.raises(RecordingExistsError, match=f"recorded by {who}"):
        Recorder(model, optimizer, tmp_path / "r")
    assert process.communicate(timeout=60)[0].split()[-1] == "39"
    assert process.returncode == 0
    assert Recording.open(tmp_path / "r").steps == 40
    assert Recording.open(tmp_path / "r").complete
    reading.assert_rebuilds(tmp_path / "r")
    assert not list(tmp_path.glob(".*.lock"))


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    process = trainer(tmp_path / "r", pause=10)
    process.kill()
    process.communicate()
    model, optimizer = kin()
    with Recorder(model, optimizer, tmp_path / "r", resume_at_step=0):
        assert Recording.open(tmp_path / "r").steps == 0
    assert Recording.open(tmp_path / "r").complete


def test_two_recorders_of_one_process(tmp_path: Path) -> None:
    model, optimizer = network()
    with Recorder(model, optimizer, tmp_path / "r"):
        train(model, optimizer)
        with pytest.raises(ResumeError, match=r"this process .* not closed"):
            Recorder(model, optimizer, tmp_path / "r", resume_at_step=0)
        (tmp_path / "link").symlink_to(tmp_path / "r")
        with pytest.raises(ResumeError, match="recorded by"):
            Recorder(model, optimizer, tmp_path / "link", resume_at_step=0)
        train(model, optimizer)
    assert Recording.open(tmp_path / "r").steps == 6


def test_a_forked_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A data loader's worker may outlive the recorder."""
    model, optimizer = network()
    read, write = os.pipe()
    with Recorder(model, optimizer, tmp_path / "r"):
        train(model, optimizer)
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    os.close(read)
    with Recorder(model, optimizer, tmp_path / "r", resume_at_step=3):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it lives
        train(model, optimizer)
    assert Recording.open(tmp_path / "r").steps == 6
    os.close(write)
    os.waitpid(child, 0)
