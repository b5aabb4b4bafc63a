"""Filters select the rows that SQLite selects."""

from __future__ import annotations

import math
import operator
import sqlite3

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count

from dualform.engine.errors import CancelledError, InvalidArgumentError
from dualform.engine.rows import bitmaps, table
from dualform.engine.rows.bitmaps import Bitmaps
from dualform.engine.rows.filters import MAX_DEPTH, evaluate
from dualform.engine.rows.table import Table
from dualform.store.grouping import group
from dualform.v1 import attribution_pb2 as pb

VALUES = {
    "step": [0, 1, 2, 3, None, 5, 2, 1],
    "loss": [0.5, None, 1.5, 0.5, 2.5, -1.0, 0.0, 3.0],
    "task": ["a", "b", None, "a", "it's", "", "b", "ä"],
    "seen": [True, False, None, True, True, False, False, None],
}
COLUMNS = {name: pa.array(values) for name, values in VALUES.items()}
SYMBOLS = {
    pb.OPERATOR_EQ: "=",
    pb.OPERATOR_NE: "<>",
    pb.OPERATOR_LT: "<",
    pb.OPERATOR_LE: "<=",
    pb.OPERATOR_GT: ">",
    pb.OPERATOR_GE: ">=",
}


def value(literal: object) -> pb.Value:
    if isinstance(literal, bool):
        return pb.Value(bool_value=literal)
    if isinstance(literal, int):
        return pb.Value(int64_value=literal)
    if isinstance(literal, float):
        return pb.Value(double_value=literal)
    return pb.Value(string_value=str(literal))


def both(where: pb.Filter, columns: dict[str, pa.Array]) -> np.ndarray:
    """Which rows a filter selects: the same whether columns have bitmaps or not, few or many."""
    found = evaluate(where, columns)
    made = {name: Bitmaps(group(column)) for name, column in columns.items()}
    np.testing.assert_array_equal(evaluate(where, columns, made.get), found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitmaps, "MOST_VALUES", 0)
        np.testing.assert_array_equal(evaluate(where, columns, made.get), found)
    return found


def compare(column: str, operator: int, *literals: object) -> pb.Filter:
    compared = pb.Comparison(column=column, operator=operator, values=[value(x) for x in literals])
    return pb.Filter(comparison=compared)


def render(literal: object) -> str:
    if isinstance(literal, bool):
        return str(int(literal))
    return repr(literal) if not isinstance(literal, str) else "'" + literal.replace("'", "''") + "'"


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[pb.Filter, str]:
    column = draw(st.sampled_from(list(VALUES)))
    if column in ("step", "loss"):
        literals: st.SearchStrategy = st.one_of(
            st.integers(-2, 6), st.sampled_from([0.5, 1.0, 1.5, 2.0, -1.0])
        )
    else:
        literals = (
            st.sampled_from(["a", "b", "", "it's", "zz"]) if column == "task" else st.booleans()
        )
    kind = draw(st.sampled_from(["compare", "in", "null"]))
    if kind == "null":
        return compare(column, pb.OPERATOR_IS_NULL), f"{column} IS NULL"
    if kind == "in":
        chosen = draw(st.lists(literals, min_size=1, max_size=3))
        text = ", ".join(map(render, chosen))
        return compare(column, pb.OPERATOR_IN, *chosen), f"{column} IN ({text})"
    operators = list(SYMBOLS) if column != "seen" else [pb.OPERATOR_EQ, pb.OPERATOR_NE]
    operator = draw(st.sampled_from(operators))
    literal = draw(literals)
    return compare(column, operator, literal), f"{column} {SYMBOLS[operator]} {render(literal)}"


def combine(children: st.SearchStrategy) -> st.SearchStrategy:
    def join(parts: list, word: str) -> tuple[pb.Filter, str]:
        filters = pb.FilterList(filters=[part[0] for part in parts])
        text = f" {word} ".join(f"({part[1]})" for part in parts)
        return (pb.Filter(all_of=filters) if word == "AND" else pb.Filter(any_of=filters)), text

    several = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda parts: join(parts, "AND")),
        several.map(lambda parts: join(parts, "OR")),
        children.map(lambda part: (pb.Filter(negated=part[0]), f"NOT ({part[1]})")),
    )


@settings(max_examples=count(120, 20_000), deadline=None)
@given(st.recursive(comparisons(), combine, max_leaves=6))
def test_selects_what_sqlite_selects(case: tuple[pb.Filter, str]) -> None:
    where, text = case
    database = sqlite3.connect(":memory:")
    try:
        database.execute(
            "CREATE TABLE rows (id INTEGER, step INTEGER, loss REAL, task TEXT, seen INTEGER)"
        )
        rows = zip(range(8), *VALUES.values(), strict=True)
        database.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", rows)
        expected = [
            row for (row,) in database.execute(f"SELECT id FROM rows WHERE {text} ORDER BY id")
        ]
    finally:
        database.close()
    assert np.flatnonzero(both(where, COLUMNS)).tolist() == expected


def test_dictionary_columns_select_alike() -> None:
    encoded = {**COLUMNS, "task": COLUMNS["task"].dictionary_encode()}
    for where in (
        compare("task", pb.OPERATOR_EQ, "a"),
        compare("task", pb.OPERATOR_IN, "a", "b"),
        compare("task", pb.OPERATOR_LT, "b"),
    ):
        np.testing.assert_array_equal(evaluate(where, encoded), evaluate(where, COLUMNS))


def test_no_filter_selects_everything() -> None:
    assert both(pb.Filter(), COLUMNS).all()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            compare("colour", pb.OPERATOR_EQ, 1),
            "unknown column 'colour'; the columns are step, loss",
        ),
        (
            compare("step", pb.OPERATOR_EQ, "one"),
            "'step' is int64; it can't be compared with 'one'",
        ),
        (compare("task", pb.OPERATOR_EQ, 1), "'task' is string"),
        (compare("task", pb.OPERATOR_EQ, 6), "text stands in single quotes, as in '6'"),
        (compare("task", pb.OPERATOR_EQ, True), "text stands in single quotes, as in 'true'"),
        (compare("step", pb.OPERATOR_EQ, "6"), "a number stands without quotes, as in 6"),
        (compare("seen", pb.OPERATOR_EQ, "true"), "write true or false, without quotes"),
        (compare("task", pb.OPERATOR_IN, "a", 1), "'task' is string"),
        (compare("step", pb.OPERATOR_EQ, True), "can't be compared with True"),
        (compare("loss", pb.OPERATOR_LT, float("nan")), "NaN"),
        (compare("step", pb.OPERATOR_EQ), "takes one value, not 0"),
        (compare("step", pb.OPERATOR_EQ, 1, 2), "takes one value, not 2"),
        (compare("step", pb.OPERATOR_IS_NULL, 1), "takes no values"),
        (compare("step", 0, 1), "unknown operator"),
        (pb.Filter(all_of=pb.FilterList()), "holds no filters"),
        (
            pb.Filter(comparison=pb.Comparison(column="step", operator=1, values=[pb.Value()])),
            "use `step is null`",
        ),
    ],
)
def test_refuses(where: pb.Filter, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        evaluate(where, COLUMNS)
    assert words in str(caught.value)
    assert caught.value.field == "where"


def test_refuses_deep_nesting() -> None:
    where = compare("step", pb.OPERATOR_EQ, 1)
    for _ in range(MAX_DEPTH + 1):
        where = pb.Filter(negated=where)
    with pytest.raises(InvalidArgumentError, match="nested deeper"):
        evaluate(where, COLUMNS)


EXTREMES = {
    "long": [0, 2**53, 2**53 + 1, 2**62 + 1, -(2**63), 2**63 - 1, None],
    "wide": [0.0, -0.0, 2.0**53, 2.0**63, -(2.0**63), math.inf, -math.inf, math.nan, 5e-324, None],
}
EXTREME_LITERALS = [
    *(0, 2**53, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63), -(2**53) - 1),
    *(0.0, -0.0, 0.5, -0.5, 2.0**53, 2.0**62, 2.0**63, -(2.0**63), 1e300, -1e300),
    *(math.inf, -math.inf, 5e-324),
]


@pytest.mark.parametrize("column", EXTREMES)
@pytest.mark.parametrize("literal", EXTREME_LITERALS, ids=repr)
def test_numbers_compare_as_numbers_whatever_their_type(column: str, literal: float) -> None:
    """Python compares int with float exactly, as the filter must."""
    columns = {column: pa.array(EXTREMES[column])}
    same = {
        pb.OPERATOR_EQ: operator.eq,
        pb.OPERATOR_NE: operator.ne,
        pb.OPERATOR_LT: operator.lt,
        pb.OPERATOR_LE: operator.le,
        pb.OPERATOR_GT: operator.gt,
        pb.OPERATOR_GE: operator.ge,
    }
    for each, compares in same.items():
        expected = [x is not None and compares(x, literal) for x in EXTREMES[column]]
        assert both(compare(column, each, literal), columns).tolist() == expected, each
        negated = [x is not None and not compares(x, literal) for x in EXTREMES[column]]
        where = pb.Filter(negated=compare(column, each, literal))
        assert both(where, columns).tolist() == negated, each


@pytest.mark.parametrize("column", EXTREMES)
def test_in_finds_numbers_whatever_their_type(column: str) -> None:
    columns = {column: pa.array(EXTREMES[column])}
    for literal in EXTREME_LITERALS:
        expected = [x is not None and x == literal for x in EXTREMES[column]]
        where = compare(column, pb.OPERATOR_IN, literal, 12345)
        assert both(where, columns).tolist() == expected, literal
        negated = [x is not None and x != literal for x in EXTREMES[column]]
        assert both(pb.Filter(negated=where), columns).tolist() == negated, literal


def test_who_gives_up_waits_for_one_comparison_at_most() -> None:
    rows, parts = 200_000, 1000
    column = pa.array(np.arange(rows))
    values = [pb.Value(int64_value=value) for value in range(60)]
    one = pb.Comparison(column="step", operator=pb.OPERATOR_IN, values=values)
    where = pb.Filter(any_of=pb.FilterList(filters=[pb.Filter(comparison=one)] * parts))
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(CancelledError):
        evaluate(where, {"step": column}, stop=stop)
    assert asked == 4
    allocated = pa.total_allocated_bytes()
    few = pb.Filter(any_of=pb.FilterList(filters=where.any_of.filters[:100]))
    assert evaluate(few, {"step": column}).sum() == 60
    assert pa.total_allocated_bytes() - allocated < rows


def test_a_filter_that_comes_again_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = np.arange(1000)
    rows = Table(steps, steps, lambda: {"step": pa.array(steps)})
    evaluated = []

    def counted(where: pb.Filter, *rest: object) -> np.ndarray:
        evaluated.append(where)
        return evaluate(where, *rest)

    monkeypatch.setattr(table, "evaluate", counted)
    filters = [compare("step", pb.OPERATOR_LT, bound) for bound in (7, 900, 7, 900, 20)]
    for where, bound in zip(filters, (7, 900, 7, 900, 20), strict=True):
        np.testing.assert_array_equal(rows.select(where), steps < bound)
        np.testing.assert_array_equal(rows.select(where, 5), (steps < bound) & (steps < 5))
    assert len(evaluated) == 3
    with pytest.raises(ValueError, match="read-only"):
        rows.select(filters[0])[0] = False
    monkeypatch.setattr(table, "KEPT_BYTES", 2200)  # two masks of a thousand rows, and no third
    fourth = compare("step", pb.OPERATOR_LT, 33)
    for where, times in ((fourth, 4), (fourth, 4), (filters[0], 4), (filters[1], 5)):
        rows.select(where)
        assert len(evaluated) == times  # filters[1] was the oldest
