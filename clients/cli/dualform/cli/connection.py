"""Whom `dualform query` and `dualform plot` ask: a server, or an index on disk.

A token is no argument: other users of the machine see arguments, and shells keep them. It comes
from DUALFORM_TOKEN, or from a file, as secrets are handed to containers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dualform.cli.errors import CommandError
from dualform.cli.interruption import load_engine

if TYPE_CHECKING:
    from dualform.client import Client


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds `--server` or `--local`, and how a server is reached."""
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--server", metavar="HOST:PORT", help="ask a server")
    asked.add_argument("--local", type=Path, metavar="INDEX", help="ask an index on disk")
    parser.add_argument("--index", metavar="NAME", help="which one, where several are served")
    add_server_options(parser)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds how a server is reached."""
    parser.add_argument(
        "--tls",
        nargs="?",
        const=True,
        default=False,
        metavar="ca.pem",
        help="encrypt; with a file, trust the certificates in it",
    )
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="one's own (PEM)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the certificate's key (PEM)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the token (default: DUALFORM_TOKEN in the environment)",
    )


def open_client(options: argparse.Namespace) -> Client:
    """A client for `--server` or `--local`.

    Raises:
        CommandError: Options that belong to a server with `--local`, or no token in the file.
    """
    if options.local is None:
        from dualform.client import Client

        return Client(
            options.server,
            tls=options.tls,
            certificate=options.certificate,
            key=options.key,
            token=token_of(options),
        )
    for name in ("tls", "certificate", "key", "token_file"):
        if getattr(options, name):
            raise CommandError(f"--{name.replace('_', '-')} is for --server; --local asks nobody")
    load_engine()
    from dualform.client import Client

    return Client.local(options.local)


def token_of(options: argparse.Namespace) -> str | None:
    """What `--token-file` holds; None without it.

    Raises:
        CommandError: It can't be read, or holds nothing.
    """
    path: Path | None = options.token_file
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--token-file can't be read: {error}") from None
    if not token:
        raise CommandError(f"--token-file {path} is empty; the token is all that belongs into it")
    return token
