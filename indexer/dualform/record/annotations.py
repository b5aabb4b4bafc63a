"""What the user says about the rows: converted at once, checked against the rows at the step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dualform.record.buffers import host_array
from dualform.record.errors import AnnotationError
from dualform.record.nulls import filled, without_nulls
from dualform.store.row_metadata import ROW_COLUMNS

_KINDS = {"i": "int64", "u": "int64", "f": "float64", "b": "bool", "U": "string"}
ROWS = "rows"
"""Among an annotation's columns: no metadata, but which rows are recorded."""

_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


class Column(NamedTuple):
    """One annotated column: flat values (int64, float64, bool, or str objects), and their shape.

    Where some are missing: a masked array, or None among the objects.
    """

    values: np.ndarray
    shape: tuple[int, ...]


class Annotations:
    """The annotation in force, and the type that every column has had so far.

    Attributes:
        current: Of the passes that follow.
        step: One value each for all rows of the step that is under way.
    """

    def __init__(self) -> None:
        self.current: Mapping[str, Column] = {}
        self.step: dict[str, np.ndarray] = {}
        self._types: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Whether the column was ever annotated."""
        return name in self._types

    def resume(self, types: Mapping[str, str]) -> None:
        """Go on with a recording whose columns have these types."""
        self._types.update(types)

    def set(self, columns: Mapping[str, Any], rows: Any = None) -> None:
        """Replace the annotation in force.

        Args:
            columns: By name.
            rows: Which rows are recorded; None for all.

        Raises:
            AnnotationError: A reserved name, a type that cannot be stored, or another type than
                the column had before; or `rows` is no mask.
        """
        self.clear()  # a refused annotation must not leave the one before it in force
        converted: dict[str, Column] = {}
        types: dict[str, str] = {}
        for name, value in columns.items():
            if name not in self._types:
                _check_name(name)
            present, missing = without_nulls(value)
            if missing is not None and missing.all():
                continue  # as if it were not given
            kind, column = _convert(name, present)
            if missing is not None:
                column = Column(filled(column.values, missing), missing.shape)
            converted[name] = column
            if column.values.size:  # an empty batch's tell no type: NumPy's default, if any
                types[name] = self._same(name, kind, "annotate")
        if rows is not None:
            converted[ROWS] = _mask(rows)
        self._types.update(types)
        self.current = converted

    def set_step(self, columns: Mapping[str, Any]) -> None:
        """Take values for all rows of the step that is under way.

        Raises:
            AnnotationError: As `set`; or more than one value for a column.
        """
        found, types = dict(self.step), {}
        for name, value in columns.items():
            if name not in self._types:
                _check_name(name)
            try:
                kind, (values, shape) = _convert(name, value)
            except AnnotationError as error:
                said = str(error).replace("annotate(", "annotate_step(", 1)
                raise AnnotationError(said) from None
            if len(values) != 1:
                raise AnnotationError(
                    f"annotate_step({name}=...) was given shape {list(shape)}: one value for the "
                    "whole step is needed, such as loss.mean(); annotate() before the forward pass "
                    "takes one per example"
                )
            types[name] = self._same(name, kind, "annotate_step")
            found[name] = values
        self._types.update(types)
        self.step = found

    def leaves(self, name: str) -> bool:
        """Whether the recorder can fill a column of text of this name: the user has no such one."""
        return name not in self.current and self._types.setdefault(name, "string") == "string"

    def clear(self) -> None:
        """Forget the annotation in force, not the types."""
        self.current = {}

    def _same(self, name: str, kind: str, call: str) -> str:
        before = self._types.get(name, kind)
        if kind != before:
            raise AnnotationError(
                f"{call}({name}=...): got {kind} where earlier calls gave {before}; "
                "a column keeps one type for the whole recording: convert it, or use two names"
            )
        return kind


def _mask(value: Any) -> Column:
    """Which rows are recorded, as a bool column."""
    present, missing = without_nulls(value)
    kind, column = _convert(ROWS, present)
    if not column.values.size:
        return Column(column.values.astype(np.bool_), column.shape)
    if missing is not None or kind != "bool":
        given = kind if missing is None else "one with missing values"
        raise AnnotationError(
            f"annotate(rows=...) is a mask: booleans, true for the rows that are recorded, not "
            f"{given}; such as rows=attention_mask.bool() or rows=labels != -100. A column of the "
            "user's own has another name"
        )
    return column


def _check_name(name: str) -> None:
    if name in ROW_COLUMNS or name == "row":
        raise AnnotationError(
            f"annotate({name}=...): {', '.join(ROW_COLUMNS)} and row are filled by "
            "themselves; choose another name"
        )
    if not name or not is_text(name):
        raise AnnotationError(
            f"annotate: {name!r} is no name for a column; it must be Unicode text, and not empty"
        )


def is_text(text: str) -> bool:
    """Whether UTF-8 can say it; lone surrogates, as in names of odd files, it can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _convert(name: str, value: Any) -> tuple[str, Column]:
    if isinstance(value, str) and is_text(value):
        return "string", _constant(str.__str__(value))
    array = _as_numpy(name, value)
    kind = _kind(array)
    if kind is None:
        raise AnnotationError(
            f"annotate({name}=...): cannot store {_describe(array)}; allowed are integers (int64), "
            "floating-point numbers, strings and booleans, without None. Leave the column out of "
            "the call for passes that have no value; where some rows have none, give a pandas "
            "nullable, Arrow or masked array"
        )
    if name == "example" and array.size and kind not in ("int64", "string"):
        raise AnnotationError(
            f"annotate(example=...): an example id is an integer or a string, not {kind}"
        )
    if kind == "string" and not is_text("".join(array.flat)):
        bad = next(item for item in array.flat if not is_text(item))
        raise AnnotationError(
            f"annotate({name}=...): {str(bad)!r} is not valid Unicode; "
            "text.encode('utf-8', 'backslashreplace').decode() is"
        )
    # Always a copy: loops reuse their buffers.
    values = array.astype(object if kind == "string" else kind, order="C").reshape(-1)
    if array.dtype.kind == "O":  # members of text enumerations: their values
        values[:] = [str.__str__(item) for item in values]
    return kind, Column(values, array.shape)


def _kind(array: np.ndarray) -> str | None:
    """The type that stores all of these; None where there is none."""
    if array.dtype.kind == "O":
        return "string" if all(isinstance(item, str) for item in array.flat) else None
    if array.dtype.kind == "u" and array.itemsize == 8 and array.max(initial=0) >= 2**63:
        return None
    return _KINDS.get(array.dtype.kind)


@functools.lru_cache(maxsize=64)
def _constant(text: str) -> Column:
    return Column(np.array([text], object), ())


def _as_numpy(name: str, value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return _of_tensor(name, value)
    if _is_masked(value):
        raise AnnotationError(
            f"annotate({name}=...): masked values in a list cannot be stored; give one masked "
            "array, or leave the column out of the call for passes that have no value"
        )
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError) as error:  # such as of tensors that NumPy can't take
        raise AnnotationError(f"annotate({name}=...): not an array of values: {error}") from error
    except ValueError:
        raise AnnotationError(
            f"annotate({name}=...): the nested lists have different lengths; "
            "give a rectangular array"
        ) from None
    if array.dtype.kind == "U" and not isinstance(value, np.ndarray):
        if not _all_text(value):
            raise AnnotationError(f"annotate({name}=...): strings and other values are mixed")
        # As they are: NumPy's own text loses NULs at the end, and what a subclass prints differs.
        array = np.array(value, object)
    if array.dtype.kind == "f" and not isinstance(value, np.ndarray) and _all_integers(value):
        raise AnnotationError(
            f"annotate({name}=...): integers beyond 64 bits with a sign cannot be stored; give "
            "them as strings"
        )
    return array


def _of_tensor(name: str, value: torch.Tensor) -> np.ndarray:
    array = host_array(value)
    if array is not None:
        return array
    try:
        host = value.detach().cpu()
        if host.is_floating_point() and host.dtype not in _NUMPY_FLOATS:
            host = host.float()
        return np.asarray(host.resolve_conj().resolve_neg().numpy())
    except (RuntimeError, TypeError, ValueError) as error:
        raise AnnotationError(
            f"annotate({name}=...): cannot store a {value.layout} tensor of {value.dtype}; give a "
            "dense one of integers, floating-point numbers or booleans"
        ) from error


def _is_masked(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        holders = (list, tuple, np.ma.MaskedArray)
        return any(issubclass(kind, holders) for kind in kinds) and any(map(_is_masked, value))
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _all_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_all_text(item) for item in value)
    return isinstance(value, str)


def _all_integers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_all_integers(item) for item in value) and bool(value)
    return isinstance(value, int)


def _describe(array: np.ndarray) -> str:
    if array.dtype.kind != "O" or not array.size:
        return f"dtype {array.dtype}"
    kinds = sorted({type(item).__name__ for item in array.flat})
    return "values of type " + ", ".join(kinds)
