"""`dualform explore`: the page in the browser, on indexes or on a server's."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from dualform._install import pip_install
from dualform.cli.connection import add_server_options, token_of
from dualform.cli.errors import CommandError
from dualform.cli.interruption import load_engine
from dualform.cli.serve import named_indexes


def add_to(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "explore",
        allow_abbrev=False,
        help="look at indexes in the browser",
        description="Serves a page on this machine until Ctrl-C: which training examples made an "
        "output. Nothing it loads comes from another machine.",
    )
    parser.add_argument(
        "indexes",
        nargs="*",
        metavar="INDEX",
        help="an index, shown under its directory's name, or NAME=INDEX",
    )
    parser.add_argument("--server", metavar="HOST:PORT", help="look at a server's indexes instead")
    add_server_options(parser)
    parser.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="the trained model, for the whole network's predictions and the examples behind them: "
        "a function without arguments that returns (model, prepare), prepare making the model's "
        "input of a picture's bytes or of a text, or (model, inputs), or (model, inputs, labels)",
    )
    parser.add_argument(
        "--names",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what output units and labels are called, a line each; for the indexes whose last "
        "layer has so many units; may be given several times",
    )
    parser.add_argument("--host", default="127.0.0.1", help="of this machine (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="0 for a free one (default 8080)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    # For a server that begins it: the page ends with its standard input.
    parser.add_argument("--while-read", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    if bool(options.indexes) == (options.server is not None):
        raise CommandError("say what to look at: `dualform explore INDEX…`, or --server HOST:PORT")
    try:
        import nicegui  # noqa: F401
    except ImportError as error:
        raise CommandError(f"the page needs nicegui ({error}): {pip_install('explore')}") from None
    from dualform.explore import LocalSources, ServerSources, load_model, read_names, run

    if options.server is None:
        load_engine()  # before the user's model imports torch
    model = None if options.model is None else load_model(options.model)
    names = [read_names(path) for path in options.names]
    sources: LocalSources | ServerSources
    if options.server is None:
        paths = named_indexes(options.indexes)
        missing = [str(path) for path in paths.values() if not Path(path).is_dir()]
        if missing:
            raise CommandError(f"there is no index at {', '.join(missing)}")
        sources = LocalSources(paths)
        troubles = [each.trouble for each in asyncio.run(sources.listed())]
        if all(troubles):  # nothing to show
            raise CommandError("; ".join(troubles))
    else:
        sources = _served(options)
    if options.while_read:
        threading.Thread(target=_end_with_input, daemon=True).start()
    return run(
        sources,
        host=options.host,
        port=options.port,
        browse=options.open,
        model=model,
        names=names,
    )


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _served(options: argparse.Namespace) -> Any:
    from dualform.client import AsyncClient, Client
    from dualform.explore import ServerSources

    how: dict[str, Any] = {
        "tls": options.tls,
        "certificate": options.certificate,
        "key": options.key,
        "token": token_of(options),
    }
    client = AsyncClient(options.server, **how)
    given = {"tls": options.tls, "certificate": options.certificate, "key": options.key}
    said = {name: value if value is True else str(value) for name, value in given.items() if value}
    python = "".join(f", {name}={value!r}" for name, value in said.items())
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in said.items()]
    return ServerSources(
        client,
        f"Client({options.server!r}{python})",
        ("--server", options.server, *words),
        lambda: Client(options.server, **how),
    )
