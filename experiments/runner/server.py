"""`dualform serve` as a subprocess on a free loopback port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.measure import StageError

DUALFORM = Path(sys.executable).with_name("dualform")
_START_SECONDS = 120.0


@contextmanager
def serving(index: Path, log: Path, config: Path | None = None) -> Iterator[tuple[str, int]]:
    """Serve one index while the block runs, then end the server with SIGTERM.

    Args:
        index: Its directory.
        log: Takes the server's output.
        config: The server's YAML file, or None for what it does by itself.

    Yields:
        The address as HOST:PORT, and the server's process id.

    Raises:
        StageError: The server did not start to listen, or did not end with status 0.
    """
    command: list[str | Path] = [DUALFORM, "serve", index, "--port", "0"]
    if config is not None:
        command += ["--config", config]
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield _address(process, log), process.pid
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=60) != 0:
            raise StageError(
                f"the server ended with status {process.returncode}:\n{log.read_text()}"
            )
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"listening on (\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.02)
    raise StageError(f"dualform serve did not start to listen:\n{log.read_text()}")
