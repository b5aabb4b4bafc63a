"""One writer at a time: a lock of the operating system's beside what is written.

The system releases it when the process ends, in whatever way; a lock file that stays behind holds
nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from dualform.store.errors import BusyError

_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB


class WriterLock:
    """Held from the call until `release`, or the end of the process.

    Args:
        target: What is going to be written; its folder must be there. The lock is the file
            `.NAME.lock` beside it.

    Raises:
        BusyError: Another process, or another writer of this one, holds it.
        OSError: The file can't be made.
    """

    def __init__(self, target: Path) -> None:
        target = Path(os.path.realpath(target))
        self._path = target.with_name(f".{target.name}.lock")
        self._fd: int | None = None
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, _AT_ONCE)
                # Whoever held it may have removed the file between the two calls above.
                if self._path.exists() and os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    self._fd, fd = fd, -1
                    with contextlib.suppress(OSError):  # on a full disk it holds without a name
                        os.ftruncate(self._fd, 0)
                        os.pwrite(self._fd, json.dumps(_this_process()).encode(), 0)
            except BlockingIOError:
                raise BusyError(target, _holder(fd)) from None
            except FileNotFoundError:
                pass
            except BaseException:  # Ctrl-C between these calls
                with contextlib.suppress(OSError):  # another's stays
                    fcntl.flock(fd if self._fd is None else self._fd, _AT_ONCE)
                    self._path.unlink()
                raise
            finally:
                if fd >= 0:
                    os.close(fd)
        _held.add(self)

    def release(self) -> None:
        """Let others write. Twice does no harm."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)  # while it is ours
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self._close()


def holder_of(target: Path) -> str | None:
    """Who holds the lock on a target, such as "process 4711 on node3"; None where nobody does."""
    target = Path(os.path.realpath(target))
    try:
        fd = os.open(target.with_name(f".{target.name}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd)
    finally:
        os.close(fd)
    return None


def _this_process() -> dict[str, int | str]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        if holder == _this_process():
            return f"this process ({holder['pid']}) itself, whose other writer was not closed"
        return f"process {int(holder['pid'])} on {holder['host']}"
    except (ValueError, KeyError, TypeError, OSError):  # not written yet
        return "another process"


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _forget() -> None:
    """In a forked child, such as a data loader's worker: the lock is the parent's alone."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget)
