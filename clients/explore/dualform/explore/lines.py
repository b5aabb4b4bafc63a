"""The lines that give the page's answers elsewhere: in Python, and as commands."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from dualform.explore.asking import GROUPS_SHOWN
from dualform.explore.model import Model
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


@dataclass(frozen=True)
class Whole:
    """What the whole network was asked.

    Attributes:
        model: Whose it is.
        made: What makes its input, in Python.
        target: As for `Client.attribute`.
        token: Likewise.
        column: Of the classes that were asked for too; "" where none were.
        unit: Whose logit they are parts of.
    """

    model: Model
    made: str
    target: int | str
    token: int | None
    column: str = ""
    unit: int = 0

    @property
    def asked(self) -> list[dict[str, Any]]:
        """What each question was told: of the examples, and of the classes."""
        some: list[dict[str, Any]] = [{"target": self.target, "token": self.token}]
        if self.column:
            some.append({"target": self.unit, "token": self.token, "by": self.column})
            some[-1] |= {"k": GROUPS_SHOWN, "order": "absolute"}
        return some


def lines_of(
    source: Source,
    view: View,
    unit: int | None,
    column: str,
    whole: Whole | None = None,
    *,
    many: bool = False,
) -> Lines:
    """What is to be typed for the answers of a view; the query is in `QUERY_FILE`.

    Args:
        source: Whom to ask.
        view: With index and layer.
        unit: That contributions go to; None for none.
        column: That classes are made of; "" for none.
        whole: What the whole network was asked; None where it was not.
        many: There are more classes than are shown: the largest are asked for.
    """
    before = None if view.step is None else f"step < {view.step}"
    weights = _both(view, before)
    name = "top_k"
    given: dict[str, Any] = {"k": view.k}
    if view.by == "example":
        name, given = "top_groups", {"by": "example", "k": view.k}
    asked = [(name, {**given, "where": weights})]
    output = {"where": view.where, "at_step": view.step, "max_residual": view.residual}
    added = {"rank_by": "contribution", "unit": unit, **output}
    if unit is not None:
        asked.append((name, {**given, **added}))
    classes = {"by": column, "k": GROUPS_SHOWN, "order": "absolute"}
    if many:
        asked.append(("top_groups", {**classes, "where": weights}))
    elif column:
        asked.append(("sums", {"group_by": column, "where": weights}))
    if unit is not None:
        asked.append(("dual_output", output))
        if many:
            asked.append(("top_groups", {**classes, **added}))
        elif column:
            asked.append(("dual_output", {**output, "group_by": column}))
    python, commands = _python(source, view, asked), _commands(source, view, asked)
    if whole is not None:
        python += _attributed(source, view, whole)
        commands += _attribute(source, view, whole)
    return Lines(python, commands)


def _attributed(source: Source, view: View, whole: Whole) -> str:
    spec = _literal(whole.model.spec)
    made, gives = "inputs, *_", "(model, inputs)"
    if whole.model.prepare is not None:
        made, gives = "prepare", "(model, prepare)"
    beside = {"where": view.where, "max_residual": view.residual, "index": source.index}
    lines = [
        "\nfrom dualform.client.model_file import call_function\n",
        f"model, {made} = call_function({spec}, gives={_literal(gives)})",
    ]
    for asked in whole.asked:
        given = {"k": view.k, **asked, **beside}
        told = "".join(f", {key}={_literal(v)}" for key, v in given.items() if v is not None)
        lines.append(f"print(client.attribute(model, {whole.made}{told}).to_pandas())")
    return "\n".join(lines) + "\n"


def _attribute(source: Source, view: View, whole: Whole) -> str:
    """The command takes the function's own inputs, all of them, and asks about their labels."""
    if whole.model.prepare is not None:
        return ""
    lines = []
    for asked in whole.asked:
        if whole.model.labels is not None and asked["target"] == "margin":
            continue
        words = ["dualform", "query", "attribute", whole.model.spec, *source.command]
        given = {"k": view.k, **asked, "where": view.where, "max_residual": view.residual}
        words += _options(given)
        lines.append(shlex.join(words) + "\n")
    return "".join(lines)


def _options(given: dict[str, Any]) -> list[str]:
    words = []
    for key, value in given.items():
        if value is not None:
            words += ["-k" if key == "k" else f"--{key.replace('_', '-')}", str(value)]
    return words


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
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return 'float("inf")' if value == float("inf") else repr(value)


def _commands(source: Source, view: View, asked: list[tuple[str, dict[str, Any]]]) -> str:
    lines = []
    for name, given in asked:
        kind = {"top_k": "top-k", "top_groups": "top-groups", "dual_output": "output"}.get(
            name, name
        )
        words = ["dualform", "query", kind, *source.command, "--layer", view.layer]
        words += ["--query", QUERY_FILE]
        lines.append(shlex.join([*words, *_options(given)]))
    return "\n".join(lines) + "\n"
