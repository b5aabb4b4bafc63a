"""The `dualform` command: its arguments, and how it ends.

Exit status: 0 done, 1 the answer is no (`index verify`), 2 bad usage or input, 130 interrupted, 141
nobody reads the output any more, 143 terminated. Messages go to standard error; a traceback is
shown only with DUALFORM_TRACEBACK=1 in the environment.

Each command's file imports what it needs when it runs: `--help` and questions to a server load
neither torch nor FAISS.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from dualform import __version__
from dualform._errors import DualformError
from dualform._install import pip_install
from dualform.cli import admin, explore, index, plot, query, record, serve
from dualform.cli.errors import CommandError
from dualform.cli.interruption import INTERRUPTED

DONE, NO, BAD = 0, 1, 2
NOBODY_READS = 141
TRACEBACK = "DUALFORM_TRACEBACK"


def program() -> NoReturn:
    """The process that `dualform` is: runs `main` and ends with its status.

    Ends without tearing libraries down: Arrow's threads, should they just be starting, abort a
    process that does.
    """
    _prepare_streams()
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 2
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Without the program's name; None takes those of the process.

    Returns:
        The exit status. Wrong arguments leave through SystemExit(2), as argparse does.
    """
    options, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        # By the command's own parser, whose usage is the one that helps.
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = options.run(options)
        if status == DONE and isinstance(sys.stdout, _Closed) and sys.stdout.lost:
            return _complain("standard output is closed, so what this printed went nowhere")
        sys.stdout.flush()
        return status
    except CommandError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("dualform: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python would flush standard output once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        return _explain(error)


def _prepare_streams() -> None:
    """Output that can always be written: closed goes nowhere, and unknown letters are escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "wb")  # noqa: SIM115 (for good)
            setattr(sys, name, _Closed(nowhere, encoding="utf-8"))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Closed(io.TextIOWrapper):
    """In the place of a stream that was closed.

    Attributes:
        lost: Whether more was printed than what is flushed at once: what commands say while they
            work, which nobody has to hear.
    """

    lost = False

    def write(self, text: str, /) -> int:
        self.lost = True
        return super().write(text)

    def flush(self) -> None:
        self.lost = False
        super().flush()


def make_parser() -> argparse.ArgumentParser:
    """All that the command takes; docs' reference is made of it."""
    parser = argparse.ArgumentParser(
        prog="dualform",
        allow_abbrev=False,
        description="Which training rows made this output, and by how much: exactly.",
        epilog="Exit status: 0 done, 1 the answer is no, 2 bad usage or input.",
    )
    parser.add_argument("--version", action="version", version=f"dualform {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    record.add_to(commands)
    index.add_to(commands)
    serve.add_to(commands)
    admin.add_to(commands)
    query.add_to(commands)
    plot.add_to(commands)
    explore.add_to(commands)
    return parser


def _explain(error: Exception) -> int:
    if isinstance(error, DualformError):
        return _complain(str(error))
    if isinstance(error, OSError):
        if "temporary directory" in str(error):
            return _complain(f"{error.strerror}: name a folder that can be written in TMPDIR")
        where = f"{error.filename}: " if error.filename else ""
        if error.errno == errno.ENOSPC and not where:
            where = "what is written to, standard output perhaps: "
        more = {
            errno.EMFILE: ": let this process open more (ulimit -n)",
            errno.ENFILE: ": let this machine's processes open more (fs.file-max)",
        }.get(error.errno or 0, "")
        return _complain(f"{where}{error.strerror or error}{more}")
    if isinstance(error, ModuleNotFoundError):
        return _complain(f"{error}; this command needs more than the client: {pip_install('cpu')}")
    # The second is what the loader of libraries says of it.
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):
        why = f" ({error})" if str(error) else ""
        return _complain(f"there is not enough memory{why}: give it more, or a higher ulimit -v")
    if "can't start new thread" in str(error):
        return _complain(
            f"{error}: allow more of them (ulimit -u, or the container's limit of pids)"
        )
    if isinstance(error, ImportError):
        return _complain(f"{error}: a package is broken, or does not go with another; install anew")
    return _complain(
        f"internal error, please report it: {type(error).__name__}: {error} "
        f"({TRACEBACK}=1 shows where)"
    )


def _complain(message: str) -> int:
    print(f"dualform: {message}", file=sys.stderr)
    return BAD
