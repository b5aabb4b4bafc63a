"""Freed memory goes back to the system: glibc keeps what scans freed, for scans that may not come.

Returning it after every scan would cost the next one a page fault per 4 KiB, so a slack stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading

_SLACK = 32 << 20


class Heap:
    """The memory of this process that no file backs; thread-safe.

    Only where the C library is glibc; `give_back` does nothing elsewhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trim = None
        if sys.platform.startswith("linux"):
            self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._least = 0

    def give_back(self, always: bool = False) -> None:
        """Return what is free, once the process has grown by 32 MiB since it was smallest; or
        always."""
        if self._trim is None:
            return
        with self._lock:
            now = anonymous_bytes()
            if always or now > self._least + _SLACK:
                self._trim(0)
                self._least = anonymous_bytes()
            else:
                self._least = min(self._least, now)


def anonymous_bytes() -> int:
    """Bytes of this process in memory that no file backs (Linux)."""
    _, resident, of_files, *_ = os.pread(_statm(os.getpid()), 256, 0).split()
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _statm(pid: int) -> int:
    """Stays open: where clients have taken all descriptors, memory must be known all the more."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


heap = Heap()
