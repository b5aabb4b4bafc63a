"""What a process costs: wall time, and the peaks of its memory as /proc reports them (Linux)."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_INTERVAL = 0.01


@dataclass(frozen=True)
class Usage:
    """One stage's cost.

    Attributes:
        seconds: Wall time.
        peak_rss: Bytes, VmHWM: mapped files that happen to be in memory included.
        peak_anonymous: Bytes, RssAnon + RssShmem at its peak: what the kernel can't drop.
            Sampled every 10 ms, so a shorter peak can be missed.
    """

    seconds: float
    peak_rss: int
    peak_anonymous: int


class StageError(Exception):
    """A stage's process failed; the message holds the end of its output."""


class Sampler:
    """Watches a process's memory while the `with` block runs.

    Example:
        with Sampler(process.pid) as sampler:
            process.wait()
        sampler.usage().peak_anonymous
    """

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = time.perf_counter()
        self._seconds = 0.0
        self._rss = 0
        self._anonymous = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seconds = time.perf_counter() - self._start
        self._stop.set()
        self._thread.join()

    def usage(self) -> Usage:
        """The cost between entering and leaving the block."""
        return Usage(self._seconds, self._rss, self._anonymous)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._sample()
            self._stop.wait(_INTERVAL)

    def _sample(self) -> None:
        try:
            lines = self._status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return  # It ended.
        fields = dict(line.split(":", 1) for line in lines)
        if "VmHWM" in fields:  # A zombie has no memory.
            kib = {key: int(fields[key].split()[0]) for key in ("VmHWM", "RssAnon", "RssShmem")}
            self._rss = max(self._rss, kib["VmHWM"] * 1024)
            self._anonymous = max(self._anonymous, (kib["RssAnon"] + kib["RssShmem"]) * 1024)


def run(
    command: Sequence[str | Path],
    log: Path,
    env: dict[str, str] | None = None,
    output: Path | None = None,
    allowed: tuple[int, ...] = (0,),
) -> Usage:
    """Run a stage to its end.

    Args:
        log: Takes its standard error, and its standard output unless `output` does.
        allowed: Exit statuses that are no failure.

    Raises:
        StageError: It ended with another status.
    """
    with open(log, "wb") as sink, open(output or log, "ab") as out:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=sink, env=env
        )
        with Sampler(process.pid) as sampler:
            status = process.wait()
    if status not in allowed:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise StageError(f"{' '.join(map(str, command))} ended with status {status}:\n{tail}")
    return sampler.usage()


def folder_bytes(path: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
