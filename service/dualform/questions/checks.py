"""What a field's value must be like: each check gives the value as questions keep it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.questions.errors import QuestionError
from dualform.v1 import attribution_pb2 as pb


@dataclass(frozen=True)
class MatrixWords:
    """What messages call one of a question's matrices, its rows, and a row's length."""

    many: str
    one: str
    width: str

    @property
    def send(self) -> str:
        """The shape to send."""
        return f"send [n, {self.width}], a single {self.one} as [1, {self.width}]"


MATRICES = {
    "queries": MatrixWords("queries", "query", "d_in"),
    "direction": MatrixWords("directions", "direction", "d_out"),
    "directions": MatrixWords("directions", "direction", "d_out"),
}
"""By the field that holds them."""


def queries(value: object, field: str = "queries") -> npt.NDArray[np.float32]:
    """float32 [n, d], C-ordered, finite, n and d at least 1: queries, or directions."""
    words = MATRICES[field]
    if not isinstance(value, np.ndarray):
        raise matrix_error(
            f"are {type(value).__name__}; a float32 array [n, {words.width}] is needed", field
        )
    if value.dtype != np.float32:
        raise matrix_error(f"are {value.dtype}; they must be float32", field)
    if value.ndim != 2:
        raise matrix_error(f"have shape {list(value.shape)}; {words.send}", field)
    if len(value) == 0:
        raise matrix_error(f"are an empty batch; send at least one {words.one}", field)
    if value.shape[1] == 0:
        raise matrix_error(
            f"have shape {list(value.shape)}; send [n, {words.width}] with n and {words.width} at "
            "least 1",
            field,
        )
    finite(value, field)
    return np.ascontiguousarray(value)


def finite(value: npt.NDArray[np.float32], field: str) -> None:
    """Refuse a matrix, [n, d], that holds NaN or Inf, and say in which row."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(value.sum()):  # needs no array of as many booleans
            return
    odd = np.flatnonzero(~np.isfinite(value).all(axis=1))
    if odd.size:
        words = MATRICES[field]
        raise QuestionError(
            f"{words.one} {odd[0]} holds NaN or Inf; {words.many} must be finite", field=field
        )


def layers(value: object) -> tuple[tuple[str, npt.NDArray[np.float32]], ...]:
    """Queries by layer, as a mapping or as pairs."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    checked = []
    for layer, matrix in pairs:
        name_of_layer(layer)
        try:
            checked.append((layer, queries(matrix)))
        except QuestionError as error:
            raise QuestionError(
                f"layer {layer!r}: {error}", field=error.field, reason=error.reason
            ) from None
    return tuple(checked)


def filter_message(value: object, field: str) -> pb.Filter:
    """A Filter."""
    if not isinstance(value, pb.Filter):
        raise QuestionError(
            f"{field} is of type {type(value).__name__}; a dualform.client.Filter is needed, which "
            "parse_filter makes of text",
            field=field,
        )
    return value


def int64(value: object, field: str) -> int:
    """An int that fits 64 bits; True and False are none."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise QuestionError(
            f"{field}={value!r} is of type {type(value).__name__}; an int is needed", field=field
        ) from None
    if not -(2**63) <= number < 2**63:
        raise QuestionError(f"{field}={number} does not fit 64 bits", field=field)
    return number


def flag(value: object, field: str) -> bool:
    """True or False, and nothing else: "no" would be true."""
    if not isinstance(value, (bool, np.bool_)):
        raise QuestionError(
            f"{field}={value!r} is of type {type(value).__name__}; True or False is needed",
            field=field,
        )
    return bool(value)


def real(value: object, field: str) -> float:
    """A number; NaN is none."""
    try:
        if isinstance(value, (bool, np.bool_, str)) or (
            isinstance(value, np.ndarray) and value.ndim > 0
        ):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise QuestionError(
            f"{field}={value!r} is of type {type(value).__name__}; a float is needed", field=field
        ) from None
    if np.isnan(number):
        raise QuestionError(f"{field} is NaN; a number is needed", field=field)
    return number


def choice(value: object, field: str, choices: Mapping[str, int]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        raise QuestionError(
            f"{field}={value!r} is none of {', '.join(map(repr, choices))}", field=field
        )
    return value


def text(value: object, field: str) -> str:
    """A str that can travel."""
    if not isinstance(value, str):
        raise QuestionError(
            f"{field}={value!r} is of type {type(value).__name__}; a str is needed", field=field
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise QuestionError(f"{field}={value!r} is not valid Unicode", field=field) from None
    return value


def name(value: object, field: str) -> str:
    """A name that could be left out, so an empty one is a mistake."""
    if not text(value, field):
        raise QuestionError(f"{field}='' is empty; leave it out or name one", field=field)
    return str(value)


def column(value: object, field: str) -> str:
    """The name of a metadata column, which can't be left out."""
    if value is None or (isinstance(value, str) and not value):
        raise QuestionError(
            f"{field}={value!r}: the name of a metadata column is needed, such as 'label'",
            field=field,
        )
    return text(value, field)


def name_of_layer(value: object) -> str:
    """The name of a layer."""
    if not isinstance(value, str):
        raise QuestionError(
            f"layer={value!r} is of type {type(value).__name__}; a name as in "
            f"model.named_modules() is needed, such as {str(value)!r}",
            field="layer",
        )
    return text(value, "layer")


def edges(value: object, field: str) -> tuple[float, ...]:
    """Bin edges as floats, at least two; what else they must be like depends on the column."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise QuestionError(
            f"{field}={value!r}: a list of ascending edges is needed, such as [0, 1000, 3000]",
            field=field,
        )
    try:
        numbers = tuple(float(edge) for edge in value)
    except (TypeError, ValueError, OverflowError) as error:
        raise QuestionError(f"{field} hold what is no number ({error})", field=field) from None
    if len(numbers) < 2:
        raise QuestionError(
            f"{field} hold {len(numbers)} edges; at least two are needed, such as [0, 1000, 3000]",
            field=field,
        )
    return numbers


def ids(value: Iterable[object], field: str) -> tuple[int | str, ...]:
    """Example ids: ints and strings."""
    return tuple(_id(entry, field) for entry in value)


def _id(value: object, field: str) -> int | str:
    if isinstance(value, str):
        return text(value, field)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int64(value, field)
    kinds = {bool: "bool", float: "double", type(None): "null"}
    given = kinds.get(type(value), type(value).__name__)
    raise QuestionError(
        f"an id is {given}; example ids are int64 or string", field=field, reason="WRONG_TYPE"
    )


def matrix_error(what: str, field: str) -> QuestionError:
    """What is wrong with queries or directions."""
    reason = "BAD_QUERIES" if field == "queries" else "BAD_DIRECTIONS"
    return QuestionError(f"{MATRICES[field].many} {what}", field=field, reason=reason)
