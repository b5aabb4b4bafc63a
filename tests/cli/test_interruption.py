"""`dualform index build` and signals: it ends at once, says so, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from synthetic import make_recording

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.store import ExistsError


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(0).standard_normal((12_000, 300)).astype(np.float32)
    path = tmp_path_factory.mktemp("interrupted") / "recording"
    return make_recording(path, keys, keys[:, :30], 30, 0.1, 0.0, {"label": [1] * len(keys)})


def start(recording: Path, target: Path, fresh: bool) -> Any:
    """A build whose handlers are in place: while it imports, or later."""
    words = ["index", "build", str(recording), str(target)]
    if fresh:
        process: Any = subprocess.Popen(
            [sys.executable, "-m", "dualform.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    else:
        process = warm.start("dualform", *words)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        if not fresh:  # importing took no time: the build has begun where its folder is
            if target.with_name(".index.partial").exists():
                break
            continue
        caught = status.read_text().split("SigCgt:")[1].split()[0]
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            break
        time.sleep(0.005)
    return process


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment(recording: Path, tmp_path: Path, number: signal.Signals) -> None:
    ended = []
    for attempt in range(7):
        target = tmp_path / str(attempt) / "index"
        # While it imports, while it looks for directions, while it writes, at its end.
        process = start(recording, target, fresh=attempt < 2)
        time.sleep(0.25 * attempt if attempt < 2 else 0.08 * (attempt - 2))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        left = [each.name for each in target.parent.iterdir()] if target.parent.exists() else []
        if process.returncode == 0:  # too late: it was done
            assert verify_index(target).damage == ()
            assert left == ["index"]
            continue
        expected = "interrupted" if number == signal.SIGINT else "terminated"
        assert process.returncode == 128 + number, errors
        assert errors.splitlines()[-1] == f"dualform: {expected}"
        assert "rror" not in errors
        assert left == []
        ended.append(attempt)
    assert len(ended) >= 2


def appearing(target: Path, content: list[str]) -> Callable[[int, int], None]:
    def appear(done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        for name in content:
            (target / name).touch()

    return appear


def test_a_target_that_appears_during_a_build(recording: Path, tmp_path: Path) -> None:
    contents: tuple[list[str], ...] = ([], ["mine"])
    for content in contents:
        target = tmp_path / f"index{len(content)}"

        def appear(
            done: int, total: int, target: Path = target, content: list[str] = content
        ) -> None:
            target.mkdir(exist_ok=True)
            for name in content:
                (target / name).touch()

        with pytest.raises(ExistsError, match="never overwritten"):
            build_index(recording, target, progress=appear)
        assert [each.name for each in target.iterdir()] == content
    assert {each.name for each in tmp_path.iterdir()} == {"index0", "index1"}
