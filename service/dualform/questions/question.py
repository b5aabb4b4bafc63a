"""What all questions share: fields that are called like their message's, checked once, when made.

The kind of a field (a number, a word of an enum, a tensor, ...) stands in the protocol alone; which
words it may be, and whether it may be None, in its annotation alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_type_hints

from dualform.questions import checks
from dualform.questions.attributed import attributed_layers
from dualform.v1 import attribution_pb2 as pb


@dataclass(frozen=True, eq=False)
class Question:
    """Base of all questions.

    Attributes:
        message: The request message whose fields these are.

    Raises:
        QuestionError: A field is wrong in a way that needs no index to be seen.
    """

    message: ClassVar[type[Any]]

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            if value is None and field.optional:
                continue
            object.__setattr__(self, field.name, field.check(value, field.name))
        self.check()

    def check(self) -> None:
        """Refuse fields that do not go together."""


@dataclass(frozen=True)
class Field:
    """One field of a question.

    Attributes:
        name: In the class and in the message.
        kind: "tensor", "filter", "layers", "attributed", "values", "numbers", "number", "flag",
            "text", or "choice".
        optional: Whether it may be None.
        present: Whether the message can tell that it is absent.
        choices: The numbers of a choice's words.
    """

    name: str
    kind: str
    optional: bool
    present: bool
    choices: Mapping[str, int]

    def check(self, value: Any, name: str) -> Any:
        """The value as it should be, or QuestionError."""
        if self.kind == "choice":
            return checks.choice(value, name, self.choices)
        if self.kind == "text" and not self.optional:
            return checks.name_of_layer(value) if name == "layer" else checks.column(value, name)
        return _CHECKS[self.kind](value, name)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "tensor": checks.queries,
    "filter": checks.filter_message,
    "layers": lambda value, _: checks.layers(value),
    "attributed": lambda value, _: attributed_layers(value),
    "values": checks.ids,
    "numbers": checks.edges,
    "real": checks.real,
    "number": checks.int64,
    "flag": checks.flag,
    "text": checks.name,
}
_MESSAGES = {
    "Tensor": "tensor",
    "Filter": "filter",
    "ExplainLayer": "layers",
    "AttributedLayer": "attributed",
    "Value": "values",
}


_FIELDS: dict[type[Question], tuple[Field, ...]] = {}


def fields_of(kind: type[Question]) -> tuple[Field, ...]:
    """The fields of a class of questions, in the order of the class."""
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(_fields(kind))
    return _FIELDS[kind]


def _fields(kind: type[Question]) -> Iterable[Field]:
    described = kind.message.DESCRIPTOR.fields_by_name
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        sent = described[field.name]
        if sent.message_type is not None:
            what = _MESSAGES[sent.message_type.name]
        elif sent.enum_type is not None:
            what = "choice"
        elif sent.type == sent.TYPE_DOUBLE:
            what = "real" if sent.has_presence else "numbers"
        else:
            what = {sent.TYPE_STRING: "text", sent.TYPE_BOOL: "flag"}.get(sent.type, "number")
        hint, choices = hints[field.name], {}
        if sent.enum_type is not None:
            numbers = words(sent.enum_type)
            choices = {word: numbers[word] for word in get_args(hint)}
        optional = type(None) in get_args(hint)
        yield Field(field.name, what, optional, bool(sent.has_presence), choices)


# The words of which the protocol's first, UNSPECIFIED, is one; elsewhere it stands for a default.
_UNSPECIFIED = {"Strategy": "auto"}


def words(enum: Any) -> dict[str, int]:
    """The words of one of the protocol's enums, and their numbers: ORDER_LARGEST is "largest"."""
    found = {}
    first = enum.values_by_number[0].name
    prefix = first.removesuffix("UNSPECIFIED")
    for value in enum.values:
        word = value.name.removeprefix(prefix).lower()
        if value.number == 0:
            word = _UNSPECIFIED.get(enum.name, "")
        if word:
            found[word] = value.number
    return found


STRATEGIES = words(pb.DESCRIPTOR.enum_types_by_name["Strategy"])
"""How answers are found, and the protocol's numbers."""
