"""`dualform serve`: the server on one or more indexes."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualform.cli.errors import CommandError
from dualform.cli.interruption import load_engine


def add_to(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="answer questions over gRPC",
        description="Serves indexes until SIGTERM or SIGINT, then finishes what is being answered.",
    )
    parser.add_argument(
        "indexes",
        nargs="*",
        metavar="INDEX",
        help="an index, served under its directory's name, or NAME=INDEX",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="server.yaml")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for a free one (default 50051)")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="open shards in actors of the Ray cluster at ADDRESS (auto: the one that this machine "
        "belongs to), or local for processes on this machine",
    )
    parser.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help="so many (default: one on each node; of local, one for each core)",
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="say whether all of it could be served, and end: exit status 0 if so, 2 if not",
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    from dualform.serve import check, run

    config = _config(options)
    load_engine()
    if options.check_config:
        return check(config)
    return run(config, lambda: _config(options))


def _config(options: argparse.Namespace) -> Any:
    """A ServerConfig: the file's, with what the arguments say instead or in addition."""
    from dualform.serve import RayActors, ServerConfig

    config = ServerConfig.load(options.config) if options.config else ServerConfig()
    host = config.host if options.host is None else options.host
    port = config.port if options.port is None else options.port
    indexes = dict(config.indexes)
    for name, path in named_indexes(options.indexes).items():
        if name in indexes:
            raise CommandError(
                f"{name!r} is in {options.config} already; say OTHERNAME={path} to serve both"
            )
        indexes[name] = path
    if not indexes:
        raise CommandError("no index to serve: say `dualform serve INDEX`, or name one in --config")
    ray = config.ray
    if options.ray is not None:
        ray = RayActors(options.ray, options.actors)
    elif options.actors is not None:
        if ray is None:
            raise CommandError("--actors goes with --ray ADDRESS, or --ray local")
        ray = replace(ray, actors=options.actors)
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return replace(config, indexes=indexes, listen=listen, ray=ray)


def named_indexes(arguments: Sequence[str]) -> dict[str, Path]:
    """`INDEX` or `NAME=INDEX` arguments, by name.

    Raises:
        CommandError: The same name twice.
    """
    indexes: dict[str, Path] = {}
    for argument in arguments:
        match = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)=(.+)", argument)
        path = Path(match[2] if match else argument)
        # As the user wrote it: a symlink is served under its own name.
        name = match[1] if match else Path(os.path.abspath(path)).name
        if name in indexes:
            raise CommandError(
                f"two indexes are called {name!r}: {indexes[name]} and {path}; say NAME={path}"
            )
        indexes[name] = path
    return indexes
