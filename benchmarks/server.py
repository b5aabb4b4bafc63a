"""A server of its own process for benchmarks, on a free loopback port."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """Where it listens, HOST:PORT, and its process id."""

    address: str
    pid: int


@contextmanager
def serving(index: Path, settings: str = "") -> Iterator[Server]:
    """Serve an index, once every file of it has been read and checked.

    Args:
        index: Served as "i".
        settings: Lines of the configuration beside it.
    """
    with tempfile.NamedTemporaryFile("w+") as log, tempfile.NamedTemporaryFile("w+") as config:
        config.write(f"indexes: {{i: {index.absolute()}}}\n{settings}")
        config.flush()
        command = [sys.executable, "-m", "dualform.cli", "serve", "--config", config.name]
        command += ["--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                raise SystemExit(f"the server did not start: {Path(log.name).read_text()}")
            while "all files are as written" not in Path(log.name).read_text():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {Path(log.name).read_text()}")
                time.sleep(0.1)
            yield Server(line.removeprefix("listening on ").strip(), process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=60)
