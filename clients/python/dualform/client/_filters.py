"""Filters as text: `label = 6 and step < 3000` to the wire's Filter message.

The grammar is a small part of SQL's conditions, read by sqlglot (imported only here, when the first
text comes): `column op literal` with `= != < <= > >=`, `in (...)`, `between a and b`, `is null`,
each with `not`, combined with `and or not ( )`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dualform.client._arrays import text as valid_text
from dualform.client._arrays import value_of
from dualform.client._calls import checked_call
from dualform.client.errors import InvalidArgumentError
from dualform.v1.attribution_pb2 import (
    OPERATOR_EQ,
    OPERATOR_GE,
    OPERATOR_GT,
    OPERATOR_IN,
    OPERATOR_IS_NULL,
    OPERATOR_LE,
    OPERATOR_LT,
    OPERATOR_NE,
    Comparison,
    Filter,
    FilterList,
    Value,
)

_COMPARISONS = {
    "EQ": OPERATOR_EQ,
    "NEQ": OPERATOR_NE,
    "LT": OPERATOR_LT,
    "LTE": OPERATOR_LE,
    "GT": OPERATOR_GT,
    "GTE": OPERATOR_GE,
}
_GRAMMAR = (
    "possible are `column op literal` with = != < <= > >=, in (...), between a and b, is null, "
    "combined with and, or, not, ( )"
)


@dataclass(frozen=True)
class Where:
    """What the user gave as `where`.

    Attributes:
        filter: As a message; None for no filter.
        text: As text, where it was text.
        marks: Column, literals and position (from 1) of each comparison in the text.
    """

    filter: Filter | None
    text: str | None = None
    marks: tuple[tuple[str, tuple[Any, ...], int], ...] = ()

    def located(self, error: InvalidArgumentError) -> InvalidArgumentError:
        """`error` with the position of the comparison that it speaks of, if this was text.

        The server sees messages, not text: it names the column and the literal at fault.
        """
        named = [mark for mark in self.marks if _mentions(error, mark[0])]
        exact = [m for m in named if any(_mentions(error, literal) for literal in m[1])]
        for _, _, position in exact or named:
            return InvalidArgumentError(
                f"where={self.text!r}, position {position}: {error}",
                reason=error.reason,
                field=error.field,
            )
        return error


def where_of(where: str | Filter | None) -> Where:
    """What the user gave as `where`, parsed if it is text.

    Raises:
        InvalidArgumentError: Text that is no filter, or neither text nor a Filter.
    """
    if where is None or isinstance(where, Filter):
        return Where(where)
    if isinstance(where, str):
        reader = _Reader(valid_text(where, "where"))
        return Where(reader.read(), where, tuple(reader.marks))
    raise InvalidArgumentError(
        f'where is of type {type(where).__name__}; a str such as "label = 6 and step < 3000", '
        "or a dualform.client.Filter, is needed",
        field="where",
    )


def filter_of(where: str | Filter | None) -> Filter | None:
    """What the user gave as `where`, as a message; raises as `where_of`."""
    return where_of(where).filter


@checked_call
def parse_filter(text: str) -> Filter:
    """Parses a filter.

    Args:
        text: Such as "label = 6 and step < 3000" or "task is not null". Text literals stand in
            single quotes, column names that are no plain words in double quotes.

    Returns:
        The message; `and` and `or` chains become one list each.

    Raises:
        InvalidArgumentError: Not a filter; the message has the position, counted from 1.

    Example:
        >>> parse_filter("label in (6, 9)").comparison.column
        'label'
    """
    return _Reader(valid_text(text, "where")).read()


def _mentions(error: Exception, value: object) -> bool:
    return re.search(rf"(?<!\w){re.escape(repr(value))}(?!\w)", str(error)) is not None


_NO_LITERAL = {"COMMA", "L_PAREN", "R_PAREN", ""}
_BEGINS_WITH_IF = re.compile(r"\s*(if)\b", re.IGNORECASE)
# What stands before an operator is meant as a column.
_LEFT_OF_OPERATOR = re.compile(
    r"(?<![\w.])([a-z_]\w*)\s*(?:[=<>!]|(?:not\s+)?(?:in|between)\b|is\b)", re.IGNORECASE
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def _words_of_sql(text: str) -> list[str]:
    """Words that are meant as columns, and that SQL keeps for itself."""
    plain = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), text)
    meant = dict.fromkeys(found[1] for found in _LEFT_OF_OPERATOR.finditer(plain))
    operators = {"and", "or", "not", "in", "is", "between", "null", "true", "false"}
    return [word for word in meant if word.lower() not in operators and not _is_column(word)]


def _is_column(word: str) -> bool:
    from sqlglot import exp
    from sqlglot.dialects.dialect import Dialect
    from sqlglot.errors import ParseError

    if word.lower() == "if":
        return False
    try:
        parsed = Dialect.get_or_raise(None).parse_into(exp.Condition, f"{word} = 1")
    except ParseError:
        return False
    return [type(node.this) for node in parsed if isinstance(node, exp.EQ)] == [exp.Column]


def _quote(words: list[str]) -> str:
    """How to name columns that are called like words of SQL."""
    quoted = ", ".join(f'"{word}"' for word in words)
    return f"a column that is called like a word of SQL stands in double quotes: {quoted}"


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self.marks: list[tuple[str, tuple[Any, ...], int]] = []
        # Offset of the column that was met last.
        self._near = 0

    def read(self) -> Filter:
        # Imported here: a client that never filters by text does not pay for it.
        from sqlglot import exp
        from sqlglot.dialects.dialect import Dialect
        from sqlglot.errors import ParseError, TokenError

        if not self._text.strip():
            self._refuse("the filter is empty; where=None takes every row", 1)
        if command := _BEGINS_WITH_IF.match(self._text):
            # sqlglot takes it for a command, and logs that to everybody.
            self._refuse(f"syntax error at {command[1]!r}; {_quote([command[1]])}", 1)
        try:
            # Not `parse_one`: it drops what stands behind a semicolon.
            sql = Dialect.get_or_raise(None)
            parts = sql.parse_into(exp.Condition, self._text)
            if len(parts) != 1 or parts[0] is None:
                remedy = self._remedy(_GRAMMAR)
                self._refuse(f"it does not parse as one condition; {remedy}", 1)
            condition = self._condition(parts[0])
            self._check_words(sql.tokenize(self._text))
            return condition
        except ParseError as error:
            self._refuse_syntax(error)
        except TokenError:
            self._refuse("a quote or comment is not closed", len(self._text))
        except RecursionError:
            self._refuse("the filter is nested too deeply; use in (...) or fewer parentheses", 1)

    def _check_words(self, tokens: Sequence[Any]) -> None:
        """Refuse what is no SQL and sqlglot takes all the same, as if a part had been written."""
        kinds = [token.token_type.name for token in tokens]
        for place, token in enumerate(tokens):
            behind = [*kinds[place + 1 : place + 4], "", "", ""]
            if kinds[place] == "IN" and behind[0] != "L_PAREN":
                self._refuse("in needs a list, as in label in (6, 9)", token.start + 1)
            if kinds[place] == "BETWEEN" and behind[1 + (behind[0] == "DASH")] != "AND":
                self._refuse("between needs two, as in step between 5 and 9", token.start + 1)
            if kinds[place] == "IS" and behind[behind[0] == "NOT"] != "NULL":
                self._refuse("is stands before null or not null alone", token.start + 1)
            if kinds[place] == "NOT" and behind[0] == "IS":
                self._refuse("not stands behind is, as in task is not null", token.start + 1)
            if kinds[place] == "COMMA" and {behind[0], kinds[place - 1]} & _NO_LITERAL:
                self._refuse("a literal is needed on both sides of a comma", token.start + 1)
            if kinds[place] == "DOT" and tokens[place + 1].start > token.end + 1:
                self._refuse("a number has no space in it, as in weight > .5", token.start + 1)

    def _condition(self, node: Any) -> Filter:
        kind = type(node).__name__
        if kind == "Paren":
            return self._condition(node.this)
        if kind == "And":
            return Filter(all_of=self._chain(node))
        if kind == "Or":
            return Filter(any_of=self._chain(node))
        if kind == "Not":
            return Filter(negated=self._condition(node.this))
        if kind in _COMPARISONS:
            return self._compare(node, _COMPARISONS[kind], [node.expression])
        if kind == "In" and not (node.args.get("query") or node.args.get("field")):
            return self._compare(node, OPERATOR_IN, node.expressions)
        if kind == "Between" and not node.args.get("symmetric"):
            low = self._compare(node, OPERATOR_GE, [node.args["low"]])
            high = self._compare(node, OPERATOR_LE, [node.args["high"]])
            return Filter(all_of=FilterList(filters=[low, high]))
        if kind == "Is" and type(node.expression).__name__ == "Null":
            return self._compare(node, OPERATOR_IS_NULL, [])
        self._refuse_node(node, self._remedy(_GRAMMAR))

    def _chain(self, node: Any) -> FilterList:
        # A loop: `a = 1 or a = 2 or ...` leans left as deep as it is long.
        kind, parts = type(node), []
        while type(node) is kind:
            parts.append(node.expression)
            node = node.this
        parts.append(node)
        return FilterList(filters=[self._condition(part) for part in reversed(parts)])

    def _compare(self, node: Any, operator: int, literals: list[Any]) -> Filter:
        column = node.this
        if type(column).__name__ != "Column" or column.args.get("table"):
            self._refuse_node(
                node, self._remedy("a metadata column comes first, then the operator")
            )
        position = self._position(column)
        self._near = position - 1
        values = [self._literal(literal) for literal in literals]
        plain = tuple(getattr(value, value.WhichOneof("kind") or "") for value in values)
        self.marks.append((column.name, plain, position))
        return Filter(
            comparison=Comparison(
                column=column.name,
                operator=operator,  # type: ignore[arg-type]
                values=values,
            )
        )

    def _literal(self, node: Any) -> Value:
        kind, sign = type(node).__name__, 1
        if kind == "Neg":
            node, sign = node.this, -1
            kind = type(node).__name__
        if kind == "Literal" and not node.is_string:
            number = node.name
            try:
                return value_of(sign * int(number), "where")
            except ValueError:
                pass
            try:
                return value_of(sign * float(number), "where")
            except ValueError:
                self._refuse_node(node, "it is no number")
        if sign == 1 and kind == "Literal":
            return value_of(node.name, "where")
        if sign == 1 and kind == "Boolean":
            return value_of(bool(node.this), "where")
        if kind == "Null":
            self._refuse_node(node, "nothing equals null; write `column is null`")
        if kind == "Column":
            self._refuse_node(
                node, "a literal is needed here; text stands in single quotes, as in task = 'mnist'"
            )
        self._refuse_node(node, "a literal is needed here: a number, 'text', true or false")

    def _refuse_syntax(self, error: Any) -> NoReturn:
        details = error.errors[0] if error.errors else {}
        token = details.get("highlight") or ""
        if not details.get("line"):
            self._refuse(f"it does not parse; {self._remedy(_GRAMMAR)}", 1)
        # sqlglot counts lines from 1 and gives the column of the token's last character.
        lines = self._text.splitlines(keepends=True)[: details["line"] - 1]
        position = sum(map(len, lines)) + max(1, details["col"] - len(token) + 1)
        self._refuse(f"syntax error at {token!r}; {self._remedy(_GRAMMAR)}", position)

    def _remedy(self, otherwise: str) -> str:
        words = _words_of_sql(self._text)
        return _quote(words) if words else otherwise

    def _refuse_node(self, node: Any, why: str) -> NoReturn:
        self._refuse(f"{node.sql()!r} is not possible; {why}", self._position(node))

    def _position(self, node: Any) -> int:
        from sqlglot import exp

        # sqlglot knows where identifiers stand; a literal is looked for behind its column.
        starts: list[int] = [
            n.meta["start"] for n in node.find_all(exp.Identifier) if "start" in n.meta
        ]
        words = re.compile(rf"(?<!\w){re.escape(node.sql())}(?!\w)", re.IGNORECASE)
        found = words.search(self._text, self._near)
        return 1 + min(starts or [found.start() if found else self._near])

    def _refuse(self, why: str, position: int) -> NoReturn:
        raise InvalidArgumentError(
            f"where={self._text!r}, position {position}: {why}",
            reason="INVALID_FILTER",
            field="where",
        ) from None
