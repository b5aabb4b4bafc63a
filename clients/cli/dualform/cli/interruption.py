"""Ctrl-C and SIGTERM during long work: it ends at once, cleans up after itself, and says so.

While torch is imported nothing is there yet to be cleaned up, and an exception in the middle of its
C++ code aborts the process: then a signal ends it outright.

An exception that a signal raises may come up anywhere: inside an import, which makes an ImportError
of it, or inside a callback of C code, which drops it. So the signal is noted as well, and what was
dropped is raised at the next `check`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED, TERMINATED = 128 + int(signal.SIGINT), 128 + int(signal.SIGTERM)


def load_engine() -> None:
    """Imports what computes, torch and FAISS among it, under the thread policy of a whole process.

    Ctrl-C and SIGTERM meanwhile end the process with the status and the message that they have
    later; nothing may have been begun before.
    """
    from dualform.serve import policy

    policy.apply()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # Where the parent wants it ignored (nohup, a shell's background), it stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, _end)
    try:
        import dualform.engine  # noqa: F401
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def _end(number: int, frame: FrameType | None) -> None:
    word = "interrupted" if number == signal.SIGINT else "terminated"
    os.write(2, f"dualform: {word}\n".encode())
    os._exit(128 + number)


class Interruption:
    """While it is entered, the first SIGINT or SIGTERM is an exception; others do nothing more.

    Leaving it raises KeyboardInterrupt or SystemExit(143), whatever came of the first exception;
    work that ended well in spite of a signal is done. In other threads than the main one, nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._signal: int | None = None

    def check(self) -> None:
        """Raise what a signal asked for, unless there was none."""
        if self._signal is not None:
            raise KeyboardInterrupt

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None or self._signal is None:
            return
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        print("dualform: terminated", file=sys.stderr)
        raise SystemExit(TERMINATED) from None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = number
            raise KeyboardInterrupt
