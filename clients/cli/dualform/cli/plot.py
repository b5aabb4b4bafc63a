"""`dualform plot FIGURE`: the paper's figures, to PNG, SVG or PDF; passages, to HTML or here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualform.cli.attribute import add_attribute, attributed
from dualform.cli.connection import add_connection, open_client
from dualform.cli.errors import CommandError
from dualform.cli.query import read_queries

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.figure import Figure

    from dualform.client import Client

    Queries = dict[str, npt.NDArray[np.float32]]


def add_to(commands: Any) -> None:
    """Adds the commands' arguments."""
    parser = commands.add_parser(
        "plot",
        allow_abbrev=False,
        help="draw an index's answers",
        description="Draws answers about one query as PNG, SVG or PDF, by the file's ending.",
    )
    kinds = parser.add_subparsers(metavar="FIGURE", required=True)
    attention = _figure(kinds, "attention", _attention, "the largest weights of each class")
    _groups(attention)
    _weights(attention)
    attention.add_argument(
        "--per-group", type=int, default=500, metavar="N", help="rows per class (default 500)"
    )
    sums = _figure(kinds, "sums", _sums, "total attention weight per class")
    _groups(sums)
    _weights(sums)
    matches = _figure(kinds, "matches", _matches, "the training images with the largest weight")
    _weights(matches)
    matches.add_argument("-k", type=int, default=3, help="images per layer (default 3)")
    matches.add_argument("--image", type=Path, metavar="q.png", help="the query's own image")
    matches.add_argument(
        "--distinct",
        default="example",
        metavar="COLUMN",
        help="the examples' ids (default example)",
    )
    profile = _figure(kinds, "profile", _profile, "total attention weight over training steps")
    _tasks(profile)
    _weights(profile)
    profile.add_argument("--bins", type=int, default=50, help="parts of training (default 50)")
    contributions = _figure(
        kinds, "contributions", _contributions, "what each class's rows added to each output unit"
    )
    _groups(contributions)
    contributions.add_argument(
        "--units", type=_numbers, metavar="U,U,…", help="output units (default all, up to 20)"
    )
    contributions.add_argument("--at-step", type=int, metavar="S", help="the layer after S steps")
    attribute = add_attribute(kinds, _attribute)
    attribute.add_argument(
        "--number", type=int, default=0, metavar="I", help="which of the inputs (default 0)"
    )
    _out(attribute)
    _add_passages(kinds)


def _figure(
    kinds: Any,
    name: str,
    draw: Callable[[argparse.Namespace, Client, Queries], Figure],
    what: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, allow_abbrev=False, help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    add_connection(parser)
    parser.add_argument(
        "--layer",
        required=True,
        action="append",
        metavar="L",
        help="as in model.named_modules(); once per layer, each with its --query",
    )
    parser.add_argument(
        "--query",
        required=True,
        action="append",
        type=Path,
        metavar="q.npy",
        help="float32 [n, d_in]",
    )
    parser.add_argument(
        "--number", type=int, default=0, metavar="I", help="which query of the file (default 0)"
    )
    parser.add_argument("--where", metavar="EXPR", help="such as 'label = 6 and step < 3000'")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long")
    _out(parser)
    parser.set_defaults(run=_run, draw=draw, parser=parser)
    return parser


def _out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="ends in .png, .svg or .pdf"
    )


def _groups(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--group-by", default="label", metavar="COLUMN", help="the classes (default label)"
    )
    _tasks(parser)


def _tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task-by", default="task", metavar="COLUMN", help="the tasks (default task)"
    )
    parser.add_argument(
        "--tasks", type=_words, metavar="A,B,…", help="which tasks, in this order (default all)"
    )


def _weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--signed", action="store_true", help="signed weights (default: absolute, as in the paper)"
    )


def _add_passages(kinds: Any) -> None:
    parser = kinds.add_parser(
        "passages",
        allow_abbrev=False,
        help="passages of text with the matched token marked",
        description="Shows the passages of a JSON file here, or writes them as HTML.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.json", help="the query and its passages")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="HTML goes there")
    parser.set_defaults(run=_passages, parser=parser)


def _run(options: argparse.Namespace) -> int:
    _check_out(options)
    queries = _read(options)
    with open_client(options) as client:
        return _write(options, options.draw(options, client, queries))


def _attribute(options: argparse.Namespace) -> int:
    _check_out(options)
    from dualform import plot

    return _write(options, plot.attribute(attributed(options), number=options.number))


def _check_out(options: argparse.Namespace) -> None:
    # Files need no window, and a notebook's setting, which its commands inherit, names a module
    # that need not be there.
    os.environ["MPLBACKEND"] = "agg"
    from dualform.plot import format_of

    format_of(options.out)
    if not options.out.resolve().parent.is_dir():
        raise CommandError(f"{options.out}: the folder {options.out.parent} is not there")


def _write(options: argparse.Namespace, figure: Figure) -> int:
    from dualform.plot import save

    save(figure, options.out)
    print(options.out)
    return 0


def _read(options: argparse.Namespace) -> Queries:
    """The chosen query of each layer."""
    if len(options.layer) != len(options.query):
        raise CommandError(
            f"{len(options.layer)} --layer and {len(options.query)} --query: each layer needs the "
            "file with what it saw, as in --layer 0 --query q0.npy --layer 2 --query q2.npy"
        )
    if len(set(options.layer)) != len(options.layer):
        raise CommandError("a layer is named twice; a figure has one panel of each")
    queries = {}
    for layer, path in zip(options.layer, options.query, strict=True):
        read = read_queries(path)
        if not 0 <= options.number < len(read):
            raise CommandError(
                f"--number {options.number}: {path} holds queries 0 to {len(read) - 1}"
                if len(read)
                else f"{path} holds no query"
            )
        queries[layer] = read[options.number : options.number + 1]
    return queries


def _attention(options: argparse.Namespace, client: Client, queries: Queries) -> Figure:
    from dualform import plot

    return plot.attention(
        client,
        queries,
        per_group=options.per_group,
        absolute=not options.signed,
        group_by=options.group_by,
        task_by=options.task_by,
        tasks=options.tasks,
        where=options.where,
        index=options.index,
        timeout=options.timeout,
    )


def _sums(options: argparse.Namespace, client: Client, queries: Queries) -> Figure:
    from dualform import plot

    return plot.sums(
        client,
        queries,
        absolute=not options.signed,
        group_by=options.group_by,
        task_by=options.task_by,
        tasks=options.tasks,
        where=options.where,
        index=options.index,
        timeout=options.timeout,
    )


def _matches(options: argparse.Namespace, client: Client, queries: Queries) -> Figure:
    from dualform import plot

    return plot.matches(
        client,
        queries,
        image=None if options.image is None else options.image.read_bytes(),
        k=options.k,
        absolute=not options.signed,
        distinct=options.distinct,
        where=options.where,
        index=options.index,
        timeout=options.timeout,
    )


def _profile(options: argparse.Namespace, client: Client, queries: Queries) -> Figure:
    from dualform import plot

    return plot.profile(
        client,
        queries,
        bins=options.bins,
        absolute=not options.signed,
        task_by=options.task_by,
        tasks=options.tasks,
        where=options.where,
        index=options.index,
        timeout=options.timeout,
    )


def _contributions(options: argparse.Namespace, client: Client, queries: Queries) -> Figure:
    from dualform import plot

    if len(queries) > 1:
        raise CommandError("plot contributions shows one layer: name one --layer")
    ((layer, query),) = queries.items()
    return plot.contributions(
        client,
        layer,
        query,
        units=options.units,
        group_by=options.group_by,
        task_by=options.task_by,
        tasks=options.tasks,
        where=options.where,
        at_step=options.at_step,
        index=options.index,
        timeout=options.timeout,
    )


def _passages(options: argparse.Namespace) -> int:
    from dualform.plot import passages_html, passages_text, read_passages

    if options.out is not None and options.out.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"{options.out}: passages are written as .html; without --out, here")
    query, passages = read_passages(options.file)
    if options.out is None:
        print(passages_text(passages, query=query, colour=sys.stdout.isatty()), end="")
    else:
        page = passages_html(passages, query=query, title=options.file.stem)
        options.out.write_text(page, encoding="utf-8")
        print(options.out)
    return 0


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds what is no number; give output units such as 0,3,7"
        ) from None
