"""`dualform index pack|unpack`: the same index from fewer bytes, and back."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from dualform.cli.errors import CommandError
from dualform.cli.interruption import Interruption, load_engine
from dualform.cli.output import Progress, bytes_text


def add_to(actions: Any) -> None:
    """Adds the commands' arguments."""
    for name, what, says in (
        (
            "pack",
            "the same index from fewer bytes",
            "Publishes an index once more, with keys and values packed where that pays: every "
            "answer stays the same, and those that read rows take longer. What else it has is "
            "shared by hard links.",
        ),
        (
            "unpack",
            "a packed index as files that FAISS and NumPy open",
            "Publishes a packed index once more, as a build without --pack makes it, file by file. "
            "What else it has is shared by hard links.",
        ),
    ):
        action = actions.add_parser(name, allow_abbrev=False, help=what, description=says)
        action.add_argument("index", type=Path, metavar="INDEX", help="it stays as it is")
        action.add_argument("target", type=Path, metavar="TARGET", help="the directory to create")
        action.set_defaults(run=_repack, parser=action, pack=name == "pack")


def _repack(options: argparse.Namespace) -> int:
    started = time.monotonic()
    what = "packing" if options.pack else "unpacking"
    with Interruption() as interruption, Progress(what, "B") as progress:
        load_engine()
        from dualform.index import pack_index, unpack_index

        def show(done: int, total: int) -> None:
            interruption.check()
            progress(done, total)

        try:
            (pack_index if options.pack else unpack_index)(options.index, options.target, show)
        except ValueError as error:
            raise CommandError(str(error)) from error
    made(options.target, started)
    return 0


def made(path: Path, started: float) -> None:
    """Say what an index that was just published takes.

    Args:
        path: Where it is.
        started: When its making began, by `time.monotonic`.
    """
    from dualform.store import IndexManifest

    manifest = IndexManifest.load(path)
    sizes = [manifest.row_bytes(name) for name in manifest.layers]
    lie, unpacked = (sum(each) for each in zip(*sizes, strict=True))
    if lie < unpacked:
        print(
            f"keys and values: {bytes_text(lie)} packed, {lie / unpacked:.2f} of the "
            f"{bytes_text(unpacked)} that they take otherwise"
        )
    print(
        f"{path}: {bytes_text(size_of(path))} in {time.monotonic() - started:.1f} s; "
        f"next: dualform index verify {path}"
    )


def size_of(directory: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
