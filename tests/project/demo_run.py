"""Running the demo and its server, for the tests beside this file."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]
DUALFORM = Path(sys.executable).with_name("dualform")


@dataclass(frozen=True)
class Demo:
    """What a run of the demo printed and where its files are."""

    folder: Path
    output: str


def run_demo(folder: Path) -> Demo:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        done = warm.run_file(ROOT / "examples" / "digits_demo.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(folder, done.stdout)


@contextmanager
def serving(command: Sequence[str | Path], log: Path) -> Iterator[str]:
    """A serving command while the block runs; yields HOST:PORT. It must end well on SIGTERM."""
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, cwd=log.parent, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"listening on (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1]
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
