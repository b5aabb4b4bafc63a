"""Filters as text: the grammar, round trips of random trees, and where errors point."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualform.client import Client, Filter, InvalidArgumentError, parse_filter
from dualform.client._filters import MAX_DEPTH, where_of
from dualform.engine.errors import InvalidArgumentError as ServerInvalidArgumentError
from dualform.engine.messages.wire import check_filter
from dualform.engine.rows.filters import evaluate
from dualform.v1 import attribution_pb2 as pb

from .memory import D_IN

SYMBOLS = {
    pb.OPERATOR_EQ: "=",
    pb.OPERATOR_NE: "!=",
    pb.OPERATOR_LT: "<",
    pb.OPERATOR_LE: "<=",
    pb.OPERATOR_GT: ">",
    pb.OPERATOR_GE: ">=",
}


def compare(column: str, operator: int, *values: object) -> Filter:
    return Filter(
        comparison=pb.Comparison(
            column=column,
            operator=operator,  # type: ignore[arg-type]
            values=[value(v) for v in values],
        )
    )


def value(v: object) -> pb.Value:
    if isinstance(v, bool):
        return pb.Value(bool_value=v)
    if isinstance(v, int):
        return pb.Value(int64_value=v)
    if isinstance(v, float):
        return pb.Value(double_value=v)
    return pb.Value(string_value=str(v))


def every(*filters: Filter) -> Filter:
    return Filter(all_of=pb.FilterList(filters=filters))


def either(*filters: Filter) -> Filter:
    return Filter(any_of=pb.FilterList(filters=filters))


def negated(inner: Filter) -> Filter:
    return Filter(negated=inner)


A = compare("a", pb.OPERATOR_EQ, 1)
B = compare("b", pb.OPERATOR_GT, 2.5)
C = compare("c", pb.OPERATOR_EQ, "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", A),
        ("a == 1", A),
        ('"a" = 1', A),
        ("((a = 1))", A),
        ("a = +1", A),
        ("a = -1", compare("a", pb.OPERATOR_EQ, -1)),
        ("a <> 'it''s'", compare("a", pb.OPERATOR_NE, "it's")),
        ("a = true", compare("a", pb.OPERATOR_EQ, True)),
        ("a = 1e3", compare("a", pb.OPERATOR_EQ, 1000.0)),
        ("a=-.5E-1", compare("a", pb.OPERATOR_EQ, -0.05)),
        ("a = - 1.", compare("a", pb.OPERATOR_EQ, -1.0)),
        ("a in ()", compare("a", pb.OPERATOR_IN)),
        ("(a=1)and(b>2.5)", every(A, B)),
        (
            "a between .5 and 1",
            every(compare("a", pb.OPERATOR_GE, 0.5), compare("a", pb.OPERATOR_LE, 1)),
        ),
        ("not not a = 1", negated(negated(A))),
        ("a\n=\t1\r\n", A),
        ("a in (1, -2, 3)", compare("a", pb.OPERATOR_IN, 1, -2, 3)),
        ("a not in ('x')", negated(compare("a", pb.OPERATOR_IN, "x"))),
        (
            "a between 1 and 2.5",
            every(compare("a", pb.OPERATOR_GE, 1), compare("a", pb.OPERATOR_LE, 2.5)),
        ),
        ("a is null", compare("a", pb.OPERATOR_IS_NULL)),
        ("A IS NOT NULL", negated(compare("A", pb.OPERATOR_IS_NULL))),
        ("a = 1 and b > 2.5 and c = 'x'", every(A, B, C)),
        ("a = 1 or b > 2.5 and c = 'x'", either(A, every(B, C))),
        ("(a = 1 or b > 2.5) and c = 'x'", every(either(A, B), C)),
        ("not a = 1 and b > 2.5", every(negated(A), B)),
        ("not (a = 1 and b > 2.5)", negated(every(A, B))),
        ("(a = 1 and b > 2.5) and c = 'x'", every(every(A, B), C)),
        (
            "a between 1 and 2 or b > 2.5",
            either(every(compare("a", pb.OPERATOR_GE, 1), compare("a", pb.OPERATOR_LE, 2)), B),
        ),
    ],
)
def test_grammar(text: str, expected: Filter) -> None:
    assert parse_filter(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("", 1, "empty"),
        ("  ", 1, "empty"),
        ("label = ", 9, "ends too early"),
        ("label = 6 extra", 11, "'extra'"),
        ("a = 1 and\nb = 2 extra", 17, "'extra'"),
        ("select 1", 8, "'1'; an operator is needed behind select"),
        ("a = 1; b = 2", 6, "';'; possible"),
        ("a = 1 --", 7, "'-'; possible"),
        ("a = 1 /* */", 7, "'/'; possible"),
        ("a = 'open", 5, "not closed"),
        ("a = 'open''", 5, "not closed"),
        ("a = ' or b = 2", 5, "not closed"),
        ('a = 1 or "open = 2', 10, "not closed"),
        ("a in", 3, "needs a list"),
        ("b = 1 or a not in", 16, "needs a list"),
        ("a between 1 2", 3, "needs two"),
        ("a not is null", 3, "is not null"),
        ("a is `", 6, "'`'"),
        ("a is 1", 3, "before null"),
        ("label", 6, "ends too early; an operator is needed behind label"),
        ("a = 1 and f(b) = 3", 12, "'('; an operator is needed behind f"),
        ("6 = label", 1, "column comes first"),
        ("(a = 1", 7, "( is not closed"),
        ("a = 1)", 6, "')'"),
        ("a = 1 and", 10, "column comes first"),
        ("()", 2, "column comes first"),
        ('a = 1 and label = "cat"', 19, "single quotes"),
        ("a = b", 5, "single quotes"),
        ("a = null", 5, "is null"),
        ("a in (1, null)", 10, "is null"),
        ("a in (select 1)", 7, "literal"),
        ("a in b", 3, "needs a list"),
        ("a in (b)", 7, "literal"),
        ("a in (1 2)", 9, "commas"),
        ("a like 'x'", 3, "'like'; an operator"),
        ("a is true", 3, "before null"),
        ("t.a = 1", 2, "'.a'"),
        ("a = 1 = 2", 7, "'='"),
        ("a = 1 + 1", 7, "'+'"),
        ("a = -'x'", 6, "literal"),
        ("a = - - 1", 7, "literal"),
        ("b = 2 and a = 'x' 'y'", 19, "\"'y'\""),
        ("in = 1", 1, 'double quotes: "in"'),
        ("a = 1 or Not = 1", 14, "column comes first"),
        ("a = 0x1F", 5, "'0x1F'"),
        ("a = 1_000", 5, "'1_000'"),
        ("a = 1.5.2", 5, "'1.5.2'"),
        ("a = 1and b = 2", 5, "'1and'"),
        ("a = \u0663", 5, "'\u0663'"),
        ("a\xa0= 1", 2, "'\\xa0'"),
        ("a in (1, , 2)", 10, "literal"),
        ("a in (1,)", 9, "literal"),
        ("a in (, 1)", 7, "literal"),
        ("a = . 5", 5, "'.'"),
        ("a = 9223372036854775808", 5, "64 bits; as a floating-point number it is written "),
        ("a < 9223372036854775808", 5, "is written 9223372036854775808.0"),
        ("a = -9223372036854775809", 6, "64 bits"),
        ("a = " + "9" * 5000, 5, "64 bits"),
    ],
)
def test_refusals_point_at_the_place(text: str, position: int, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_filter(text)
    message = str(caught.value)
    assert caught.value.field == "where"
    assert (repr(text) if len(text) <= 80 else "5,004 characters") in message
    assert f"position {position}:" in message, message
    assert says in message, message


def test_integers_of_64_bits_are_taken() -> None:
    assert parse_filter("a = -9223372036854775808").comparison.values[0].int64_value == -(2**63)
    assert parse_filter("a = 009223372036854775807").comparison.values[0].int64_value == 2**63 - 1


@pytest.mark.parametrize("column", ["noise", "label"])
def test_numbers_beyond_64_bits_are_written_with_a_point(remote: Client, column: str) -> None:
    """The server takes what the refusal says, for columns of either kind of number."""
    query = np.ones((1, D_IN), np.float32)
    with pytest.raises(InvalidArgumentError, match=r"9223372036854775808\.0$"):
        remote.top_k("fc", query, where=f"{column} < 9223372036854775808")
    known = remote.top_k("fc", query, where=f"{column} is not null").coverage.rows
    for where, rows in ((f"{column} < 9223372036854775808.0", known), (f"{column} > 1e300", 0)):
        assert remote.top_k("fc", query, where=where).coverage.rows == rows


def test_long_chains_and_deep_nests_do_not_end_the_process() -> None:
    chain = parse_filter(" or ".join(f"a = {i}" for i in range(1000)))
    assert [f.comparison.values[0].int64_value for f in chain.any_of.filters] == list(range(1000))
    with pytest.raises(InvalidArgumentError, match="nested too deeply"):
        parse_filter("(" * 5000 + "a = 1" + ")" * 5000)
    deep = MAX_DEPTH - 1
    assert parse_filter("(" * deep + "not a = 1" + ")" * deep) == negated(A)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("not " * 100 + "a=1", 1 + 4 * MAX_DEPTH),
        ("not " * MAX_DEPTH + "a=1", 1),
        ("(a=1 or " * 50 + "a=1" + ")" * 50, 1 + 8 * MAX_DEPTH),
        ("(a=1 or b=1 and " * 30 + "a=1" + ")" * 30, None),
        ("not " * (MAX_DEPTH - 2) + "a not between 1 and 2", 1),
    ],
)
def test_one_bound_of_depth_with_its_position(text: str, position: int | None) -> None:
    with pytest.raises(InvalidArgumentError, match="nested too deeply, more than 48") as caught:
        parse_filter(text)
    assert position is None or f"position {position}:" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "not " * (MAX_DEPTH - 1) + "a=1",
        "(a=1 or " * (MAX_DEPTH - 1) + "a=1" + ")" * (MAX_DEPTH - 1),
        "not " * (MAX_DEPTH - 3) + "a not between 1 and 2",
    ],
)
def test_what_the_parser_takes_the_server_takes(text: str) -> None:
    found = parse_filter(text)
    check_filter(found)
    request = pb.TopKRequest(where=found)
    assert pb.TopKRequest.FromString(request.SerializeToString()) == request
    with pytest.raises(ServerInvalidArgumentError, match="more than 48 deep"):
        check_filter(negated(found))


LONG = "x" * 3_000_000


@pytest.mark.parametrize(
    "text", [f"a = '{LONG}' b", f"{LONG} = 1 1", LONG, f"a = {LONG}", f"'{LONG}"]
)
def test_a_long_text_is_not_repeated(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="position") as caught:
        parse_filter(text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", [f"a = 1 and {LONG} = 1", f"a = 1 and label = '{LONG}'"])
def test_the_engines_refusal_of_a_long_text_is_short_and_has_its_position(text: str) -> None:
    begin = time.process_time()
    where = where_of(text)
    columns = {"a": pa.array([1]), "label": pa.array([6])}
    with pytest.raises(ServerInvalidArgumentError) as refused:
        evaluate(where.filter, columns)  # type: ignore[arg-type]
    located = where.located(InvalidArgumentError(str(refused.value), field="where"))
    assert "position 11:" in str(located)
    assert len(str(located)) < 1000
    assert time.process_time() - begin < 2


def test_what_is_no_filter_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="of type dict"):
        where_of({"label": 6})  # type: ignore[arg-type]
    assert where_of(A).filter is A
    assert where_of(None).filter is None


def test_the_servers_refusal_gets_the_position() -> None:
    where = where_of("label = 6 and (task = 'x' or label = 'y')")
    unknown = where.located(InvalidArgumentError("unknown column 'task'", field="where"))
    assert "position 16: unknown column 'task'" in str(unknown)
    wrong = where.located(InvalidArgumentError("column 'label' is int64, not 'y'", field="where"))
    assert "position 30:" in str(wrong)
    other = InvalidArgumentError("the filter is nested too deep", field="where")
    assert where.located(other) is other


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_ .\"]{0,8}", fullmatch=True)
literals = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8),
)
comparisons = st.one_of(
    st.builds(compare, names, st.sampled_from(sorted(SYMBOLS)), literals),
    st.builds(
        lambda name, values: compare(name, pb.OPERATOR_IN, *values),
        names,
        st.lists(literals, min_size=1, max_size=4),
    ),
    st.builds(lambda name: compare(name, pb.OPERATOR_IS_NULL), names),
)
trees = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: every(*parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: either(*parts)),
        inner.map(negated),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(trees)
def test_any_tree_written_as_text_parses_back(tree: Filter) -> None:
    assert parse_filter(render(tree)) == tree


def render(tree: Filter) -> str:
    kind = tree.WhichOneof("kind")
    if kind == "all_of":
        return " and ".join(f"({render(part)})" for part in tree.all_of.filters)
    if kind == "any_of":
        return " or ".join(f"({render(part)})" for part in tree.any_of.filters)
    if kind == "negated":
        return f"not ({render(tree.negated)})"
    comparison = tree.comparison
    column = '"' + comparison.column.replace('"', '""') + '"'
    values = [render_literal(v) for v in comparison.values]
    if comparison.operator == pb.OPERATOR_IN:
        return f"{column} in ({', '.join(values)})"
    if comparison.operator == pb.OPERATOR_IS_NULL:
        return f"{column} is null"
    return f"{column} {SYMBOLS[comparison.operator]} {values[0]}"


def render_literal(literal: pb.Value) -> str:
    kind = literal.WhichOneof("kind")
    if kind == "string_value":
        return "'" + literal.string_value.replace("'", "''") + "'"
    if kind == "bool_value":
        return "true" if literal.bool_value else "false"
    return repr(getattr(literal, str(kind)))


# What SQL keeps for itself and this grammar does not use.
@pytest.mark.parametrize("word", ["case", "from", "if", "IF", "select", "like", "date", "größe"])
@pytest.mark.parametrize("text", ["{} = 1", "label = 2 and {} < 3", "{} is null or label = 2"])
def test_a_column_may_be_called_like_a_word_of_sql(word: str, text: str) -> None:
    found = parse_filter(text.format(word))
    assert found == parse_filter(text.format(f'"{word}"'))
    assert word.encode() in found.SerializeToString()


@pytest.mark.parametrize(
    "word", ["and", "or", "not", "in", "between", "is", "null", "True", "false"]
)
def test_the_words_of_the_grammar_are_columns_in_double_quotes(word: str) -> None:
    assert parse_filter(f'"{word}" = 1').comparison.column == word
    with pytest.raises(InvalidArgumentError):
        parse_filter(f"{word} = 1")


@pytest.mark.parametrize(
    "text",
    [
        "a in (" + "1, " * 30_000 + "1)",
        "a = " + "1" * 300_000 + "x",
        "a = 1." + "1" * 300_000 + "x",
        "a = '" + "x" * 300_000,
        "a = '" + "''" * 150_000,
        "not " * 100_000 + "a = 1",
        "(" * 300_000,
        " " * 300_000 + ";",
    ],
    ids=["list", "digits", "fraction", "open", "quotes", "not", "parentheses", "spaces"],
)
def test_a_long_text_takes_time_by_its_length(text: str) -> None:
    begin = time.process_time()
    with contextlib.suppress(InvalidArgumentError):
        parse_filter(text)
    assert time.process_time() - begin < 5
