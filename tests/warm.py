"""`dualform` as a process of its own that need not import anything: a fork of one that has.

Importing torch, FAISS, Arrow and gRPC takes seconds, the command often a hundredth of that. A process
imports them once; each command is a fork of it, with arguments, folder and standard streams of its
own. It ends, prints and fails as a fresh one does. What tests imports, signals, closed streams or
the environment starts a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence

SECONDS = 120


class Warm:
    """The process that has imported everything, and a way to ask it."""

    def __init__(self) -> None:
        self._environment = _environment()
        ours, theirs = socket.socketpair()
        with theirs:
            # Warnings at import are errors, as they are in a fresh process that runs the command.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error::DeprecationWarning", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        ours.settimeout(SECONDS)
        atexit.register(self.close)

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
        self._process.wait(10)

    def fits(self) -> bool:
        """Whether the environment is still what it was when the process began."""
        return self._environment == _environment()

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs `dualform` with these arguments to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            asked = json.dumps([os.getcwd(), *arguments]).encode()
            streams = [out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [len(asked).to_bytes(4, "big")], streams)
            self._socket.sendall(asked)
            status = int.from_bytes(_exactly(self._socket, 4), "big", signed=True)
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode())
        return subprocess.CompletedProcess(["dualform", *arguments], status, *texts)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the process that forks commands has ended")
        data += part
    return data


def _serve(connection: socket.socket) -> None:
    """The process itself: a fork for each request, one after the other."""
    from dualform.cli.interruption import load_engine

    load_engine()
    import grpc
    import matplotlib.pyplot  # noqa: F401
    import torch

    import dualform.client
    import dualform.index
    import dualform.plot
    import dualform.serve.command  # noqa: F401
    from dualform.cli.main import program

    assert grpc
    while True:
        size, streams, _, _ = socket.recv_fds(connection, 4, 2)
        if not size:
            return
        folder, *arguments = json.loads(_exactly(connection, int.from_bytes(size, "big")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: OpenBLAS stops its own before a fork
            child = os.fork()
        if child == 0:
            try:
                connection.close()
                torch.set_num_threads(1)  # the others do not survive a fork
                os.dup2(streams[0], 1)
                os.dup2(streams[1], 2)
                for stream in streams:
                    os.close(stream)
                os.chdir(folder)
                sys.argv = ["dualform", *arguments]
                program()
            finally:
                os._exit(70)
        for stream in streams:
            os.close(stream)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(status.to_bytes(4, "big", signed=True))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve(socket.socket(fileno=int(sys.argv[1])))
