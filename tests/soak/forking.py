"""Processes to be killed, without seconds of imports each: a process that has imported, and forks.

Run as a program it reads a line of JSON for each process, [function of `workers`, arguments], and
answers with its number.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Forks:
    """The process that forks; a context manager."""

    def __enter__(self) -> Forks:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "soak.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0

    def start(self, function: str, *arguments: Any) -> int:
        """Call one of `workers`' functions in a process of its own; its number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def kill(pid: int) -> None:
    """As `kill -9` does; returns once it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.001)
    except ProcessLookupError:
        return
    raise AssertionError(f"process {pid} lives on")


def alive(pid: int) -> bool:
    """Whether it has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _main() -> None:
    from dualform.serve import policy

    policy.apply()
    from soak import workers

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        function, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)
            try:
                getattr(workers, function)(*arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    _main()
