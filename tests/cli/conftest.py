"""The command as a process, and a server started by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import warm
from client.memory import D_IN, Memory, make_memory

COMMAND = [sys.executable, "-W", "error::DeprecationWarning", "-m", "dualform.cli"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str


def dualform(*arguments: object, **environment: str) -> Done:
    """Runs `dualform` with these arguments to its end.

    By a fork of a process that has imported all; a fresh one where the environment is another.
    """
    words = [str(word) for word in arguments]
    if environment or not warm.fits():
        done = subprocess.run(
            [*COMMAND, *words],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **environment},
        )
    else:
        done = warm.run("dualform", *words)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """`dualform serve` with these arguments; yields "HOST:PORT"; drains at the end."""
    process = warm.start("dualform", "serve", *arguments)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), process.communicate(timeout=30)
        yield line.removeprefix("listening on ").strip()
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    return make_memory(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="session")
def server(memory: Memory) -> Iterator[str]:
    """HOST:PORT of `dualform serve memory=…`."""
    with serving(f"memory={memory.path}", "--port", 0) as address:
        yield address


@pytest.fixture(scope="session")
def query_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two queries in a .npy file."""
    path = tmp_path_factory.mktemp("queries") / "q.npy"
    np.save(path, np.random.default_rng(8).standard_normal((2, D_IN)).astype(np.float32))
    return path
