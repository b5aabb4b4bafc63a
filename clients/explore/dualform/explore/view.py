"""What a person looks at: one frozen object, and the link that leads back to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

ExampleId = int | str
MOST_SHOWN = 60
"""Examples or rows per list: what a person reads, and a page holds."""


@dataclass(frozen=True)
class View:
    """Everything that decides what the page shows.

    Attributes:
        index: Its name on the page; "" for the first.
        layer: As in `model.named_modules()`; "" for the last one.
        example: The id of the training example that is asked about; None for none.
        seen: At which step the layer saw it: the key of that row is the query. None for the last.
        place: The row's position in a sequence; None for the last one.
        upload: What was uploaded instead, by its digest; "" for nothing.
        input: Which of the model's own inputs is asked about instead; None for none.
        number: Which row of an uploaded array, or place of a sequence that was uploaded or is the
            model's; None for the first row, and the last place.
        by: "example": an example's rows are added up; "row": each row for itself.
        k: How many of them.
        unit: The output unit that contributions go to; None for the largest.
        group: The metadata column whose values are the classes; "" for the usual one.
        filters: Which rows take part; all of them must hold.
        step: The layer after so many steps; None for the trained one.
        residual: As `max_residual` of outputs and contributions; None for the usual.
        after: The examples to pick from begin behind this id; None for the first.
    """

    index: str = ""
    layer: str = ""
    example: ExampleId | None = None
    seen: int | None = None
    place: int | None = None
    upload: str = ""
    input: int | None = None
    number: int | None = None
    by: str = "example"
    k: int = 6
    unit: int | None = None
    group: str = ""
    filters: tuple[str, ...] = ()
    step: int | None = None
    residual: float | None = None
    after: ExampleId | None = None

    @property
    def where(self) -> str | None:
        """The filters as one text; None for no filter."""
        if len(self.filters) == 1:
            return self.filters[0]
        return " and ".join(f"({each})" for each in self.filters) or None

    def link(self) -> str:
        """The view as an address's query, without what is as usual: "?index=mine&example=17"."""
        usual, given = View(), []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == getattr(usual, field.name):
                continue
            if field.name in ("example", "after"):
                value = json.dumps(value)  # 17 and "17" are two ids
            given += (
                [(field.name, each) for each in value]
                if field.name == "filters"
                else [(field.name, value)]
            )
        return f"?{urlencode(given)}" if given else ""


def view_of(given: Mapping[str, list[str]]) -> tuple[View, list[str]]:
    """The view of a link.

    Args:
        given: The address's parameters, each with its values.

    Returns:
        The view, and what could not be read of the link: that is as usual.
    """
    values: dict[str, Any] = {}
    wrong = []
    for name, texts in given.items():
        try:
            if name not in _READERS:
                raise ValueError(f"there is no {name!r}")
            values[name] = _READERS[name](texts)
        except ValueError as error:
            wrong.append(f"{name}={texts[-1]}: {error}")
    return View(**values), wrong


def asked_about(view: View, example: ExampleId, seen: int | None, place: int | None) -> View:
    """The same view, with a training example's row as the query."""
    return replace(
        view, example=example, seen=seen, place=place, upload="", input=None, number=None, unit=None
    )


def of_input(view: View, number: int) -> View:
    """The same view, with one of the model's own inputs as the query."""
    return replace(
        view, input=number, number=None, example=None, seen=None, place=None, upload="", unit=None
    )


def of_upload(view: View, digest: str) -> View:
    """The same view, with what was uploaded as the query."""
    return replace(of_input(view, 0), input=None, upload=digest)


def without(view: View, column: str, value: object) -> View:
    """The same view without the rows that have this value; None is that of rows without one."""
    name = quoted(column)
    if value is None:
        text = f"{name} is not null"
    else:
        text = f"{name} is null or {name} != {literal(value)}"
    return filtered(view, text)


def filtered(view: View, text: str) -> View:
    """The same view with one filter more."""
    return view if text in view.filters else replace(view, filters=(*view.filters, text))


def among(column: str, values: Sequence[object]) -> str:
    """The filter of the rows that have one of these values; None is that of rows without one."""
    some = ", ".join(literal(value) for value in values if value is not None)
    parts = [f"{quoted(column)} in ({some})"] if some else []
    if None in values:
        parts.append(f"{quoted(column)} is null")
    return " or ".join(parts)


def quoted(column: str) -> str:
    """A column's name as filters have it."""
    return column if column.isidentifier() else '"' + column.replace('"', '""') + '"'


def literal(value: object) -> str:
    """A metadata value as filters have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return "'" + str(value).replace("'", "''") + "'"


def _text(texts: list[str]) -> str:
    return texts[-1]


def _natural(texts: list[str]) -> int:
    try:
        number = int(texts[-1])
    except ValueError:
        number = -1
    if not 0 <= number < 2**63:
        raise ValueError("a whole number from 0 on is needed")
    return number


def _part(texts: list[str]) -> float:
    try:
        part = float(texts[-1])
    except ValueError:
        part = -1.0
    if not part >= 0:
        raise ValueError("a part of the output is needed, 0 or more; inf takes any")
    return part


def _few(texts: list[str]) -> int:
    number = _natural(texts)
    if not 1 <= number <= MOST_SHOWN:
        raise ValueError(f"1 to {MOST_SHOWN} are shown")
    return number


def _by(texts: list[str]) -> str:
    if texts[-1] not in ("example", "row"):
        raise ValueError("example or row is needed")
    return texts[-1]


def _id(texts: list[str]) -> ExampleId:
    try:
        value = json.loads(texts[-1])
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('an id is a whole number, or a text in double quotes such as "a1"')
    return value


_READERS: dict[str, Callable[[list[str]], Any]] = {
    "index": _text,
    "layer": _text,
    "example": _id,
    "seen": _natural,
    "place": _natural,
    "upload": _text,
    "input": _natural,
    "number": _natural,
    "by": _by,
    "k": _few,
    "unit": _natural,
    "group": _text,
    "filters": tuple,
    "step": _natural,
    "residual": _part,
    "after": _id,
}
