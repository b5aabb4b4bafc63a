"""The log on standard error, written in a thread of its own.

Who reads it may be slow or stop: a full pipe blocks whoever writes to it, and the event loop that
answers everyone must not be that. So lines wait in memory, up to a bound, and beyond it they are
counted instead.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

MOST_LINES = 10_000
"""So many wait to be written; more are lost, and their number is told."""
LAST_LINES_S = 1.0
"""At the end, what still waits is waited for that long."""


def set_up_logs(style: str) -> None:
    """Let this process log to standard error.

    Args:
        style: "text" or "json"; one line each.
    """
    handler = Lines(sys.stderr.fileno())
    handler.setFormatter(
        _JsonLines()
        if style == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[handler])
    logging.getLogger("dualform").setLevel(logging.INFO)
    # It quotes what callers sent, a token among it, three times and with a traceback.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL + 1)


class Lines(logging.Handler):
    """Writes lines to a file descriptor, and never waits for it.

    Args:
        descriptor: Of the open file.
        most: Lines that wait at most.
    """

    def __init__(self, descriptor: int, most: int = MOST_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(most)
        self._lost = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have one line written, some time."""
        try:
            line = self.format(record)
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for what waits, but not for ever."""
        end = time.monotonic() + LAST_LINES_S
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            lines = [self._waiting.get(), *self._what_was_lost()]
            # Nobody can be told of a full disk, or of a reader that has gone.
            with suppress(OSError):
                self._write_out("".join(f"{line}\n" for line in lines))
            self._waiting.task_done()

    def _what_was_lost(self) -> list[str]:
        self.acquire()
        lost, self._lost = self._lost, 0
        self.release()
        if not lost:
            return []
        told = {
            "name": "dualform.serve",
            "levelname": "WARNING",
            "msg": f"{lost:,} lines of the log were lost: nobody took them in time",
        }
        return [self.format(logging.makeLogRecord(told))]

    def _write_out(self, text: str) -> None:
        # Not by sys.stderr: its lock, held at the interpreter's end, would abort that.
        data = text.encode(errors="backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares the file has asked for that
                select.select([], [self._descriptor], [])


class _JsonLines(logging.Formatter):
    """One JSON object a line; what a call's line says are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        came = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            # RFC 3339, in UTC: local time means nothing elsewhere, and comes twice in autumn.
            "time": came.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **({"message": record.getMessage()} if facts is None else facts),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
