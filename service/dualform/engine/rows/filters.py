"""Filters: a `dualform.v1.Filter` over a sidecar's columns gives the rows that take part.

SQL's three-valued logic, computed by pyarrow: a comparison with null is neither true nor false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualform.engine.errors import CancelledError, InvalidArgumentError
from dualform.engine.rows.bitmaps import Bitmaps, unpacked
from dualform.questions.quoted import quoted, shortened
from dualform.v1 import attribution_pb2 as pb

MAX_DEPTH = 64
"""Filters nested deeper than this are refused."""

_INT64 = range(-(2**63), 2**63)

_COMPARE: dict[int, Any] = {
    pb.OPERATOR_EQ: pc.equal,
    pb.OPERATOR_NE: pc.not_equal,
    pb.OPERATOR_LT: pc.less,
    pb.OPERATOR_LE: pc.less_equal,
    pb.OPERATOR_GT: pc.greater,
    pb.OPERATOR_GE: pc.greater_equal,
}


Find = Callable[[str], Bitmaps | None]
"""The bitmaps of a column, by its name, or None for one without."""


def evaluate(
    where: pb.Filter,
    columns: Mapping[str, pa.Array],
    bitmaps: Find = lambda name: None,
    stop: Callable[[], bool] | None = None,
) -> np.ndarray:
    """Which rows a filter selects.

    Args:
        where: The filter; one without a kind selects everything.
        columns: Equally long arrays by name: int64, float64, string (also as dictionary), bool.
        bitmaps: Of columns that have any: the same answer for less.
        stop: Asked before each comparison.

    Returns:
        bool [rows].

    Raises:
        InvalidArgumentError: Unknown column, a literal of the wrong type, wrong number of values,
            nested too deeply.
        CancelledError: `stop` returned True.
    """

    def find(name: str) -> Bitmaps | None:
        if stop is not None and stop():
            raise CancelledError("the caller gave up; the filter stopped between two comparisons")
        return bitmaps(name)

    return unpacked(_evaluate(where, columns, find, 0))


def _evaluate(
    where: pb.Filter, columns: Mapping[str, pa.Array], bitmaps: Find, depth: int
) -> pa.Array:
    if depth > MAX_DEPTH:
        raise _refuse(f"the filter is nested deeper than {MAX_DEPTH} levels; flatten it")
    kind = where.WhichOneof("kind")
    if kind == "comparison":
        return _comparison(where.comparison, columns, bitmaps)
    if kind == "negated":
        return pc.invert(_evaluate(where.negated, columns, bitmaps, depth + 1))
    if kind in ("all_of", "any_of"):
        filters = getattr(where, kind).filters
        if not filters:
            raise _refuse(f"{kind} holds no filters; leave it out, or give it one")
        # One after the other: of a thousand parts two are in memory.
        parts = (_evaluate(f, columns, bitmaps, depth + 1) for f in filters)
        return reduce(pc.and_kleene if kind == "all_of" else pc.or_kleene, parts)
    rows = len(next(iter(columns.values())))
    return pa.array(np.ones(rows, bool))


def _comparison(
    comparison: pb.Comparison, columns: Mapping[str, pa.Array], bitmaps: Find
) -> pa.Array:
    name, operator = comparison.column, comparison.operator
    column = columns.get(name)
    if column is None:
        raise _refuse(unknown_column(name, columns))
    values = [_literal(value, name, column.type) for value in comparison.values]
    known = bitmaps(name)
    answer = _answer(name, operator, column if known is None else known.values, values)
    return answer if known is None else known.spread(answer)


def _answer(name: str, operator: int, column: pa.Array, values: list[Any]) -> pa.Array:
    """A comparison's answer for each of a column's values: true, false or null."""
    if operator == pb.OPERATOR_IS_NULL:
        if values:
            raise _refuse(f"{shortened(name)} IS_NULL takes no values, not {len(values)}")
        return pc.is_null(column)
    if operator == pb.OPERATOR_IN:
        return _in(column, values)
    if operator not in _COMPARE:
        raise _refuse(f"unknown operator {operator} on column {quoted(name)}")
    if len(values) != 1:
        raise _refuse(f"a comparison with {shortened(name)} takes one value, not {len(values)}")
    return _compare(operator, column, values[0])


def _compare(operator: int, column: pa.Array, literal: Any) -> pa.Array:
    """A comparison as if numbers had no types: int64 and float64 are never rounded to another."""
    kind = _plain(column.type)
    if not isinstance(literal, (int, float)) or pa.types.is_boolean(kind):
        return _COMPARE[operator](column, pa.scalar(literal))
    floor = _floor(literal, kind)
    if floor is not None and floor == literal:
        return _COMPARE[operator](column, pa.scalar(floor, kind))
    # No value of the column's type equals the literal: it lies above `floor`, or below them all.
    if operator in (pb.OPERATOR_EQ, pb.OPERATOR_NE):
        return _same(column, operator == pb.OPERATOR_NE)
    below = operator in (pb.OPERATOR_LT, pb.OPERATOR_LE)
    if floor is None:
        return _same(column, not below)
    return (pc.less_equal if below else pc.greater)(column, pa.scalar(floor, kind))


def _same(column: pa.Array, answer: bool) -> pa.Array:
    """One answer for every row, null for a null row."""
    return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), pa.scalar(answer))


def _floor(literal: int | float, kind: pa.DataType) -> int | float | None:
    """The largest number of the type that is not above the literal; None where all are above."""
    if pa.types.is_integer(kind):
        if literal < _INT64.start:
            return None
        return _INT64.stop - 1 if literal >= _INT64.stop else math.floor(literal)
    nearest = float(literal)
    return nearest if nearest <= literal else math.nextafter(nearest, -math.inf)


def _in(column: pa.Array, values: list[Any]) -> pa.Array:
    """Membership; null for a null row, as SQL has it (pyarrow's is_in says false)."""
    if not values:
        return pc.and_kleene(pc.is_null(column), pa.scalar(None, pa.bool_()))
    kind = _plain(column.type)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        floors = ((value, _floor(value, kind)) for value in values)
        values = [floor for value, floor in floors if floor == value]
    if pa.types.is_floating(kind) and 0.0 in values:
        values += [0.0, -0.0]  # equal, but is_in tells them apart
    is_in = pc.is_in(column, value_set=pa.array(values, type=kind))
    return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), is_in)


def _literal(value: pb.Value, name: str, column_type: pa.DataType) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None:
        column = shortened(name)
        raise _refuse(f"a comparison of {column} with null selects nothing; use `{column} is null`")
    literal = getattr(value, kind)
    plain = _plain(column_type)
    if pa.types.is_string(plain) or pa.types.is_large_string(plain):
        allowed: tuple[str, ...] = ("string_value",)
    elif pa.types.is_boolean(plain):
        allowed = ("bool_value",)
    else:
        allowed = ("int64_value", "double_value")
    if kind not in allowed:
        raise _refuse(
            f"column {name!r} is {plain}; it can't be compared with {quoted(literal)}, "
            f"which is {kind.removesuffix('_value')}{_other_way(literal, allowed)}"
        )
    if kind == "double_value" and math.isnan(literal):
        raise _refuse(f"column {name!r} can't be compared with NaN")
    return literal


def _other_way(literal: Any, allowed: tuple[str, ...]) -> str:
    """How the literal would be written for such a column, where that can be told."""
    if allowed == ("string_value",):
        word = str(literal).lower() if isinstance(literal, bool) else literal
        return f"; text stands in single quotes, as in '{word}'"
    if allowed == ("bool_value",):
        return "; write true or false, without quotes"
    try:
        number = isinstance(literal, str) and math.isfinite(float(literal))
    except ValueError:
        number = False
    return f"; a number stands without quotes, as in {shortened(literal)}" if number else ""


def _plain(column_type: pa.DataType) -> pa.DataType:
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def unknown_column(name: str, columns: Iterable[str]) -> str:
    """What is said of a column that rows do not have."""
    return f"unknown column {quoted(name)}; the columns are {', '.join(columns)}"


def _refuse(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, field="where", reason="INVALID_FILTER")
