"""A server that is a process of its own, and what it holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CLOSED_S = 60
"""A busy machine may need a while to close what clients left; nothing closes later."""


@dataclass
class Process:
    """A server."""

    address: str
    pid: int
    versions: Path

    def anonymous_mb(self) -> float:
        """Memory that no file backs."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"^RssAnon:\s*(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024 / 1e6

    def descriptors(self) -> Counter[str]:
        """What is open: files by name, all else by its kind."""
        found: Counter[str] = Counter()
        for each in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                found[re.sub(r":\[\d+\]$", "", os.readlink(each))] += 1
        return found

    def at_rest(self) -> Counter[str]:
        """What is open while no file of an index is read: maps need none, and a sweep that looks
        for damage opens one at a time."""
        within = f"{self.versions.resolve()}/"
        end = time.monotonic() + CLOSED_S
        while True:
            found = self.descriptors()
            if not any(name.startswith(within) for name in found):
                return found
            assert time.monotonic() < end, found
            time.sleep(0.02)

    def closes_all_but(self, most: int) -> Counter[str]:
        """What is open once that is no more than this, or after CLOSED_S nevertheless."""
        end = time.monotonic() + CLOSED_S
        while (found := self.descriptors()).total() > most and time.monotonic() < end:
            time.sleep(0.1)
        return found


@contextmanager
def server(versions: Path, folder: Path) -> Iterator[Process]:
    """Serve as "i"; end in an orderly way.

    Args:
        versions: What is served: an index, or a folder of them.
        folder: For configuration and log.
    """
    config = folder / "server.yaml"
    config.write_text(f"indexes: {{i: {versions}}}\nlisten: 127.0.0.1:0\n")
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "dualform.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), (folder / "log").read_text()
            address = line.removeprefix("listening on ").strip()
            yield Process(address, process.pid, versions)
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in (folder / "log").read_text()
