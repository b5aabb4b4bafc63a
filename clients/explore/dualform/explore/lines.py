"""The lines that give the page's answers elsewhere: in Python, and as commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from dualform.explore.sources import Source
from dualform.explore.view import View

QUERY_FILE = "query.npy"


@dataclass(frozen=True)
class Lines:
    """To copy.

    Attributes:
        python: Whole, with its imports.
        commands: A command per line.
    """

    python: str
    commands: str


def lines_of(source: Source, view: View, unit: int | None, column: str) -> Lines:
    """What is to be typed for the answers of a view; the query is in `QUERY_FILE`.

    Args:
        source: Whom to ask.
        view: With index and layer.
        unit: That contributions go to; None for none.
        column: That classes are made of; "" for none.
    """
    before = None if view.step is None else f"step < {view.step}"
    weights = _both(view, before)
    name = "top_k"
    given: dict[str, Any] = {"k": view.k}
    if view.by == "example":
        name, given = "top_groups", {"by": "example", "k": view.k}
    asked = [(name, {**given, "where": weights})]
    added = {"rank_by": "contribution", "unit": unit, "where": view.where, "at_step": view.step}
    if unit is not None:
        asked.append((name, {**given, **added}))
    if column:
        asked.append(("sums", {"group_by": column, "where": weights}))
    if unit is not None:
        output = {"where": view.where, "at_step": view.step}
        asked.append(("dual_output", output))
        if column:
            asked.append(("dual_output", {**output, "group_by": column}))
    return Lines(_python(source, view, asked), _commands(source, view, asked))


def _both(view: View, more: str | None) -> str | None:
    if more is None:
        return view.where
    return more if view.where is None else f"({view.where}) and {more}"


def _python(source: Source, view: View, asked: list[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        "import numpy as np",
        "",
        "from dualform.client import Client",
        "",
        f"client = {source.python}",
        f'query = np.load("{QUERY_FILE}")',
    ]
    for name, given in asked:
        if source.index is not None:
            given = {**given, "index": source.index}
        told = "".join(f", {key}={_literal(v)}" for key, v in given.items() if v is not None)
        lines.append(f"print(client.{name}({_literal(view.layer)}, query{told}).to_pandas())")
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    """As Python has it, texts in double quotes."""
    if not isinstance(value, str):
        return repr(value)
    return '"' + repr("'" + value)[2:-1].replace('"', '\\"') + '"'


def _commands(source: Source, view: View, asked: list[tuple[str, dict[str, Any]]]) -> str:
    lines = []
    for name, given in asked:
        kind = {"top_k": "top-k", "top_groups": "top-groups", "dual_output": "output"}.get(
            name, name
        )
        words = ["dualform", "query", kind, *source.command, "--layer", view.layer]
        words += ["--query", QUERY_FILE]
        for key, value in given.items():
            if value is not None:
                words += ["-k" if key == "k" else f"--{key.replace('_', '-')}", str(value)]
        lines.append(shlex.join(words))
    return "\n".join(lines) + "\n"
