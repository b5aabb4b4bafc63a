"""Processes of their own that need not import anything: forks of one that has.

Importing torch, FAISS, Arrow and gRPC takes seconds, what a test wants of a process often a
hundredth of that. One process imports them; each that is asked for is a fork of it, with arguments,
folder and standard streams of its own, and one thread for torch. It prints, ends and is killed as a
fresh one. What tests imports, closed streams or an environment, or measures memory, starts a fresh
one by `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import IO, Any

SECONDS = 120
_LIVES_ON = {"PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"}


class Process:
    """One that has been started; the part of `subprocess.Popen` that tests use.

    Attributes:
        pid: Its number.
        stdout: What it prints, as text.
        returncode: None until it has been waited for.
    """

    def __init__(self, origin: Origin, task: Sequence[str], errors: IO[Any] | None) -> None:
        reading, writing = os.pipe()
        self._errors = errors or tempfile.TemporaryFile()  # noqa: SIM115 (closed with the rest)
        self._end, theirs = socket.socketpair()
        self._end.settimeout(SECONDS)
        self.returncode: int | None = None
        with theirs:
            origin.ask(task, [writing, self._errors.fileno(), theirs.fileno()])
        os.close(writing)
        self.stdout: IO[str] = open(reading, encoding="utf-8")  # noqa: SIM115 (so it is)
        self.pid = _number(self._end)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._end.setblocking(False)
            try:
                self.returncode = _number(self._end)
            except BlockingIOError:
                return None
            finally:
                self._end.settimeout(SECONDS)
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                self.returncode = _number(self._end)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a fork", timeout) from None
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """What is left of its output, and its errors, once it has ended."""
        out = self.stdout.read()
        self.wait(timeout)
        errors = self.errors()
        self.close()
        return out, errors

    def errors(self) -> str:
        """What it has written to standard error so far."""
        number = self._errors.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode()

    def close(self) -> None:
        self.stdout.close()
        self._errors.close()
        self._end.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self.wait()
        self.close()


class Origin:
    """The process that has imported everything."""

    def __init__(self) -> None:
        self.environment = _environment()
        self._socket, theirs = socket.socketpair()
        with theirs:
            # Warnings at import are errors, as they are in a fresh process that runs the command.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error::DeprecationWarning", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)

    def ask(self, task: Sequence[str], streams: list[int]) -> None:
        """For a fork with these as standard output, standard error, and where its end is told."""
        data = json.dumps([os.getcwd(), *task]).encode()
        socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], streams)
        self._socket.sendall(data)


@lru_cache(maxsize=1)
def _origin() -> Origin:
    return Origin()


def fits() -> bool:
    """Whether the environment is still what it was when the process began."""
    return _origin().environment == _environment()


def start(task: str, *arguments: object, errors: IO[Any] | None = None) -> Process:
    """Starts a process.

    Args:
        task: "dualform", or a program's text.
        arguments: What is in its sys.argv[1:].
        errors: A file opened for reading and writing that takes standard error; closed with it.
    """
    assert fits(), "the environment has changed: start a fresh process"
    return Process(_origin(), [task, *map(str, arguments)], errors)


def run(task: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As `start`, to its end."""
    process = start(task, *arguments)
    out, errors = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess([*map(str, arguments)], process.returncode, out, errors)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _LIVES_ON}


def _number(connection: socket.socket) -> int:
    return int.from_bytes(_exactly(connection, 4), "big", signed=True)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the process that forks has ended")
        data += part
    return data


def _serve(connection: socket.socket) -> Callable[[], object]:
    """In the process itself: what is to be done, in each fork of it."""
    from dualform.cli.interruption import load_engine

    load_engine()
    import matplotlib.pyplot  # noqa: F401
    import torch

    import dualform.client
    import dualform.index
    import dualform.plot
    import dualform.record
    import dualform.serve.command  # noqa: F401
    from dualform.cli.main import program

    gc.collect()
    gc.freeze()  # so that no collection in a fork touches, and copies, all that was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        size, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if not size:
            os._exit(0)
        folder, task, *arguments = json.loads(_exactly(connection, int.from_bytes(size, "big")))
        if not _fork():
            connection.close()
            _wait_for_a_fork(*streams)
            torch.set_num_threads(1)  # the others do not survive a fork
            os.chdir(folder)
            if task == "dualform":
                sys.argv = ["dualform", *arguments]
                return program
            sys.argv = ["-c", *arguments]
            warnings.simplefilter("ignore")
            code = compile(task, "<string>", "exec")
            # As a program finds its own names: globals of `__main__`.
            space = sys.modules["__main__"].__dict__
            return lambda: exec(code, space)
        for stream in streams:
            os.close(stream)


def _wait_for_a_fork(out: int, errors: int, end: int) -> None:
    """Returns in a fork of this process, which itself tells how that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = _fork()
    if not child:
        os.close(end)
        for stream, number in ((out, 1), (errors, 2)):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (for good)
        sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        return
    os.close(out)
    os.close(errors)
    with socket.socket(fileno=end) as told:
        told.sendall(child.to_bytes(4, "big", signed=True))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: OpenBLAS stops its own before a fork
        return os.fork()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))()
