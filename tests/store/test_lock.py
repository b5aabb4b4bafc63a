"""The lock of a writer: nothing of it stays behind where taking it is interrupted."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from dualform.store import lock
from dualform.store.errors import BusyError


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "fstat"])
def test_interrupted_while_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lock.os, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.WriterLock(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []
    lock.WriterLock(tmp_path / "index").release()


def test_interrupted_beside_another_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / ".index.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    real = fcntl.flock
    calls: list[int] = []

    def once(number: int, operation: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(number, operation)

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", once)
        with pytest.raises(KeyboardInterrupt):
            lock.WriterLock(tmp_path / "index")
    assert len(calls) == 2
    with pytest.raises(BusyError):
        lock.WriterLock(tmp_path / "index")
    os.close(fd)
    lock.WriterLock(tmp_path / "index").release()
    assert list(tmp_path.iterdir()) == []
