"""Processes of their own that need not import anything: forks of one that has.

Importing torch, FAISS, Arrow and gRPC takes seconds, what a test wants of a process often a
hundredth of that. One process imports them; each that is asked for is a fork of it, with arguments,
folder and standard streams of its own, and one thread for torch. It prints, ends and is killed as a
fresh one. What tests imports, closed streams or an environment, or how much memory a whole process
has, starts a fresh one by `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

SECONDS = 300
# What somebody reads while it is imported; other variables are the fork's own.
_READ_AT_IMPORT = ("GRPC_", "LANG", "LC_", "MPL", "OMP_", "PYTHON")
# Where a debugger begins, which is read when one is asked for; Ray sets it in its driver for good.
_READ_LATER = ("PYTHONBREAKPOINT",)


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
    """The process that has imported everything.

    Attributes:
        commands: A folder for PATH, whose `dualform` is a fork of it too, and whose `python -m
            MODULE`.
    """

    def __init__(self) -> None:
        self.commands = Path(tempfile.mkdtemp(prefix="warm-"))
        self._address = str(self.commands / "socket")
        for name in ("dualform", "python"):
            (self.commands / name).write_text(_COMMAND % (sys.executable, self._address, name))
            (self.commands / name).chmod(0o755)
        self._control, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(64)
            handed = [theirs.fileno(), listener.fileno()]
            # Warnings at import are errors, as they are in a fresh process that runs the command.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error::DeprecationWarning", __file__, *map(str, handed)],
                pass_fds=handed,
                env=_BEFORE_TESTS[0],
                cwd=Path(__file__).parent,
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)
        shutil.rmtree(self.commands)

    def ask(self, task: Sequence[str], streams: list[int]) -> None:
        """For a fork with these as standard output, standard error, and where its end is told."""
        data = json.dumps([os.getcwd(), dict(os.environ), *task]).encode()
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(self._address)
            socket.send_fds(asked, [len(data).to_bytes(4, "big")], streams)
            asked.sendall(data)


_COMMAND = """#!%s -IS
import json, os, signal, socket, sys
end, theirs = socket.socketpair()
asked = socket.socket(socket.AF_UNIX)
asked.connect(%r)
data = json.dumps([os.getcwd(), dict(os.environ), %r, *sys.argv[1:]]).encode()
socket.send_fds(asked, [len(data).to_bytes(4, "big")], [1, 2, theirs.fileno()])
asked.sendall(data)
asked.close()
theirs.close()
child = int.from_bytes(end.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(child, number))
status = int.from_bytes(end.recv(4), "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@lru_cache(maxsize=1)
def _origin() -> Origin:
    return Origin()


def fits() -> bool:
    """Whether the environment is what the process began with, as far as imports read it."""
    return _environment() == _BEFORE_TESTS[1]


def commands() -> Path:
    """A folder for PATH, whose `dualform` is such a process, and whose `python -m MODULE`."""
    return _origin().commands


def start(task: str, *arguments: object, errors: IO[Any] | None = None) -> Process:
    """Starts a process.

    Args:
        task: "dualform", or a program's text.
        arguments: What is in its sys.argv[1:].
        errors: A file opened for reading and writing that takes standard error; closed with it.
    """
    return Process(_origin(), [task, *map(str, arguments)], errors)


def run(task: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As `start`, to its end."""
    process = start(task, *arguments)
    out, errors = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess([*map(str, arguments)], process.returncode, out, errors)


def run_file(path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a program that lies in a file, whose own `dualform` are such processes too; a warning
    ends it."""
    return run(_FILE, commands() / "python", path, *arguments)


_FILE = """
import runpy, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
sys.executable = sys.argv.pop(1)  # whoever starts it, or the `dualform` beside it, gets a fork
sys.argv.pop(0)
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


# Before any test has changed it.
_BEFORE_TESTS = dict(os.environ), _environment()


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


def _serve(control: socket.socket, listener: socket.socket) -> Callable[[], object]:
    """In the process itself: what is to be done, in each fork of it."""
    from dualform.cli.interruption import load_engine

    load_engine()
    import matplotlib.pyplot  # noqa: F401
    import sklearn.datasets  # noqa: F401
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
        ready, _, _ = select.select([control, listener], [], [])
        if control in ready:
            os._exit(0)
        with listener.accept()[0] as asked:
            size, streams, _, _ = socket.recv_fds(asked, 4, 3)
            request = json.loads(_exactly(asked, int.from_bytes(size, "big")))
        if _fork():
            for stream in streams:
                os.close(stream)
            continue
        control.close()
        listener.close()
        _wait_for_a_fork(*streams)
        torch.set_num_threads(1)  # the others do not survive a fork
        torch.seed()
        folder, environment, task, *arguments = request
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if task == "dualform":
            sys.argv = ["dualform", *arguments]
            return program
        if task == "python":
            _, module, *arguments = arguments
            sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
            sys.argv = [module, *arguments]
            return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.argv = ["-c", *arguments]
        warnings.simplefilter("ignore")
        code = compile(task, "<string>", "exec")
        # As a program finds its own names: globals of `__main__`.
        space = sys.modules["__main__"].__dict__
        return lambda: exec(code, space)


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
    _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))()
