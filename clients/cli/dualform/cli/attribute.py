"""`dualform query attribute` and `dualform plot attribute`: the examples behind a prediction.

The model comes from the user's own file: a function that gives it, with the inputs in question.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualform._errors import DualformError
from dualform.cli.connection import add_connection, open_client
from dualform.cli.errors import CommandError
from dualform.cli.output import cell, print_json, print_table

if TYPE_CHECKING:
    from dualform.client import AttributionResult, Coverage

_WHAT = "the examples behind a prediction, over all layers"


def add_attribute(kinds: Any, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Adds the command; what it prints, or draws, is `run`'s business."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "attribute", allow_abbrev=False, help=_WHAT, description=f"{_WHAT[0].upper()}{_WHAT[1:]}."
    )
    parser.add_argument(
        "model",
        metavar="MODEL.py:FUNCTION",
        help="a function without arguments that returns the trained model and the inputs: "
        "(model, inputs), or (model, inputs, labels)",
    )
    add_connection(parser)
    parser.add_argument(
        "--target",
        type=_target,
        default="margin",
        metavar="margin|loss|CLASS",
        help="the number that is attributed (default margin); loss needs labels",
    )
    parser.add_argument("--token", type=int, metavar="I", help="of a sequence, whose logits")
    parser.add_argument("--together", action="store_true", help="attribute the sum over all inputs")
    parser.add_argument(
        "--by", default="example", metavar="COLUMN", help="whose values are the groups (default "
        "example)",
    )  # fmt: skip
    parser.add_argument("-k", type=int, help="groups per input (default 10)")
    parser.add_argument(
        "--layer", action="append", metavar="L", help="these layers alone; once for each"
    )
    parser.add_argument(
        "--order",
        choices=["largest", "smallest", "absolute"],
        help="by what groups are the best (default largest)",
    )
    parser.add_argument("--where", metavar="EXPR", help="such as 'label = 6 and step < 3000'")
    parser.add_argument(
        "--max-residual",
        type=float,
        metavar="SHARE",
        help="how much of an output no row may explain (default 1e-4)",
    )
    parser.add_argument(
        "--any-model", action="store_true", help="do not compare the model with the index"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_query(kinds: Any) -> None:
    """Adds `dualform query attribute`."""
    parser = add_attribute(kinds, _query)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="every group's scores go there, .npy or .parquet, in place of the best; without -k "
        "and --order",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_self_influence(kinds: Any) -> None:
    """Adds `dualform query self-influence`."""
    what = "what each training example did to its own part of the loss"
    parser = kinds.add_parser(
        "self-influence", allow_abbrev=False, help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    add_connection(parser)
    parser.add_argument(
        "--by", default="example", metavar="COLUMN", help="whose values are the groups (default "
        "example)",
    )  # fmt: skip
    parser.add_argument("-k", type=int, default=10, help="the largest so many (default 10)")
    parser.add_argument(
        "--layer", action="append", metavar="L", help="these layers alone; once for each"
    )
    parser.add_argument("--where", metavar="EXPR", help="such as 'label = 6 and step < 3000'")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_self_influence, parser=parser)


def _self_influence(options: argparse.Namespace) -> int:
    if options.k < 1:
        raise CommandError(f"-k is {options.k}; it must be at least 1")
    with open_client(options) as client:
        found = client.self_influence(
            by=options.by,
            layers=options.layer,
            where=options.where,
            index=options.index,
            timeout=options.timeout,
        )
    best = (-found.scores).argsort(kind="stable")[: options.k]
    groups = [found.groups[place] for place in best]
    if options.json:
        coverage = {name: _coverage(each) for name, each in found.coverage.items()}
        print_json(
            {
                "groups": groups,
                "scores": found.scores[best],
                "counts": found.counts[best],
                "layers": found.layers,
                "by_layer": found.by_layer[best],
                "coverage": coverage,
            }
        )
        return 0
    columns = (groups, found.counts[best], found.scores[best], *found.by_layer[best].T)
    headers = ["rank", options.by, "rows", "lowered", *found.layers]
    print_table(headers, zip(range(len(groups)), *columns, strict=True))
    return 0


def attributed(options: argparse.Namespace) -> AttributionResult:
    """The answer to the options."""
    k = 10 if options.k is None else options.k
    with open_client(options) as client:
        asked = _asked(options)
        with _users_model(options.model):
            return client.attribute(**asked, k=k, order=options.order or "largest")


@contextmanager
def _users_model(spec: str) -> Iterator[None]:
    """Makes a CommandError of what the user's model raises while it is run."""
    from torch import nn

    try:
        yield
    except DualformError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(isinstance(frame.f_locals.get("self"), nn.Module) for frame in frames):
            raise
        raise CommandError(
            f"the model of {spec} failed on its inputs: {type(error).__name__}: {error}"
        ) from error


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What all questions about a model are told alike."""
    model, inputs, labels = loaded(options.model)
    if not isinstance(options.target, str):
        labels = None  # a class is a target itself
    return {
        "model": model,
        "inputs": inputs,
        "target": options.target,
        "labels": labels,
        "token": options.token,
        "together": options.together,
        "by": options.by,
        "layers": options.layer,
        "where": options.where,
        "max_residual": options.max_residual,
        "check_model": not options.any_model,
        "index": options.index,
        "timeout": options.timeout,
    }


def loaded(spec: str) -> tuple[Any, Any, Any]:
    """Model, inputs and labels (None without) from "FILE.py:FUNCTION".

    Raises:
        InvalidArgumentError: No such file or function, or it fails.
        CommandError: It gives something else.
    """
    from dualform.client.model_file import call_function

    given = call_function(spec, gives="(model, inputs)")
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise CommandError(
            f"{spec} returned {type(given).__name__}; (model, inputs) is needed, or "
            "(model, inputs, labels)"
        )
    return given if len(given) == 3 else (*given, None)


def _query(options: argparse.Namespace) -> int:
    if options.out is not None:
        return _scores(options)
    found = attributed(options)
    if options.json:
        print_json(
            {
                "groups": found.groups,
                "scores": found.scores,
                "counts": found.counts,
                "by_layer": found.by_layer,
                "layers": list(found.layers),
                **_beside(found),
            }
        )
        return 0
    headers = ["rank", options.by, "rows", "score", *(f"layer {name}" for name in found.layers)]
    for number, target in enumerate(found.targets):
        print(f"input {number}, {_named(options.target)} {cell(float(target))}")
        there = found.counts[number] > 0
        lines = zip(
            range(int(there.sum())),
            *(part[number][there] for part in (found.groups, found.counts, found.scores)),
            *found.by_layer[number][there].T,
            strict=True,
        )
        print_table(headers, lines)
        print()
    print("of the layers' outputs along the target's gradient, in all")
    parts = {name: getattr(found, name).sum(axis=1) for name in ("initial", "rows", "residual")}
    columns = {"input": range(len(found.targets)), **parts, "unrecorded": found.unrecorded}
    print_table(list(columns), zip(*columns.values(), strict=True))
    return 0


def _scores(options: argparse.Namespace) -> int:
    if options.k is not None or options.order is not None:
        raise CommandError("--out writes every group's scores: leave out -k and --order")
    with open_client(options) as client:
        asked = _asked(options)
        with _users_model(options.model):
            found = client.scores(**asked, out=options.out)
    shape = [len(found.targets), len(found.groups)]
    if options.json:
        beside = _beside(found)
        print_json({"file": str(options.out), "shape": shape, "groups": found.groups, **beside})
    else:
        print(f"{options.out}: float64 {shape}, inputs by {options.by}")
    return 0


def _beside(found: Any) -> dict[str, Any]:
    names = ("targets", "initial", "rows", "residual", "outputs", "unrecorded")
    coverage = {name: _coverage(each) for name, each in found.coverage.items()}
    return {**{name: getattr(found, name) for name in names}, "coverage": coverage}


def _coverage(coverage: Coverage) -> dict[str, int]:
    return {"rows": coverage.rows, "total": coverage.total, "nonfinite": coverage.nonfinite,
            "dropped": coverage.dropped}  # fmt: skip


def _target(text: str) -> str | int:
    return int(text) if text.removeprefix("-").isdecimal() else text


def _named(target: str | int) -> str:
    return target if isinstance(target, str) else f"logit {target}"
