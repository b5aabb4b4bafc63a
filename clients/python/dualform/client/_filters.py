"""Filters as text: `label = 6 and step < 3000` to the wire's Filter message.

The grammar is a small part of SQL's conditions, in which the words may be large or small:

    filter      all ("or" all)*
    all         one ("and" one)*
    one         "not" one | "(" filter ")" | comparison
    comparison  column ("=" | "==" | "!=" | "<>" | "<" | "<=" | ">" | ">=") literal
                | column ["not"] "in" "(" [literal ("," literal)*] ")"
                | column ["not"] "between" literal "and" literal
                | column "is" ["not"] "null"
    column      a word that is none of those above, or any text in double quotes
    literal     ["+" | "-"] number | 'text' | "true" | "false"

A quote within quotes is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from dualform.client._arrays import text as valid_text
from dualform.client._arrays import value_of
from dualform.client._calls import checked_call
from dualform.client.errors import InvalidArgumentError
from dualform.questions.quoted import MOST_QUOTED, quoted, shortened
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

MAX_DEPTH = 48
"""Filters within each other, as the server takes them; parentheses and `not` likewise."""

_OPERATORS = {
    "=": OPERATOR_EQ,
    "==": OPERATOR_EQ,
    "!=": OPERATOR_NE,
    "<>": OPERATOR_NE,
    "<": OPERATOR_LT,
    "<=": OPERATOR_LE,
    ">": OPERATOR_GT,
    ">=": OPERATOR_GE,
}
_WORDS = frozenset(("and", "or", "not", "in", "between", "is", "null", "true", "false"))
_GRAMMAR = (
    "possible are `column op literal` with = != < <= > >=, in (...), between a and b, is null, "
    "combined with and, or, not, ( )"
)
# Each kind ends where the next cannot begin, so that no text is tried in more than one way.
_TOKEN = re.compile(
    r"""
    [ \t\n\r\f]*
    (?: (?P<word>    [^\W\d]\w* )
      | (?P<number>  (?: [0-9]+ (?:\.[0-9]*)? | \.[0-9]+ ) (?: [eE][+-]?[0-9]+ )? (?![\w.]) )
      | (?P<text>    ' [^']* (?: '' [^']* )* ' (?!') )
      | (?P<name>    " [^"]* (?: "" [^"]* )* " (?!") )
      | (?P<sign>    == | != | <> | <= | >= | [=<>(),+-] )
      | (?P<end>     \Z ) )
    """,
    re.VERBOSE,
)
_NO_TOKEN = re.compile(r"[ \t\n\r\f]*([\w.]+|.)", re.DOTALL)


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
            found = InvalidArgumentError(
                f"{_place(self.text or '', position - 1)}: {error}",
                reason=error.reason,
                field=error.field,
            )
            found.request_id = error.request_id
            return found
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
    """Whether the message has the value, as it quotes values, and not within a longer word."""
    message, piece = str(error), quoted(value)
    at = message.find(piece)
    while at >= 0:
        end = at + len(piece)
        if not (_in_word(message[max(at - 1, 0) : at]) or _in_word(message[end : end + 1])):
            return True
        at = message.find(piece, at + 1)
    return False


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _place(text: str, at: int) -> str:
    """The text, or of a long one what is around the offset, and the position counted from 1."""
    if len(text) <= MOST_QUOTED:
        return f"where={text!r}, position {at + 1}"
    start = max(0, min(at - MOST_QUOTED // 2, len(text) - MOST_QUOTED))
    piece = repr(text[start : start + MOST_QUOTED])
    before, after = "..." if start else "", "..." if start + MOST_QUOTED < len(text) else ""
    return f"where={before}{piece}{after} ({len(text):,} characters), position {at + 1}"


class _Token(NamedTuple):
    """A piece of the text.

    Attributes:
        kind: One of `_WORDS`, an operator or other sign; else word, number, text, name or end.
        text: As it stands there.
        start, end: Offsets.
    """

    kind: str
    text: str
    start: int
    end: int


class _Part(NamedTuple):
    """A filter that was read.

    Attributes:
        filter: As a message.
        levels: Filters within each other, this one among them.
        start: Offset at which it begins.
    """

    filter: Filter
    levels: int
    start: int


def _levels(comparison: Filter) -> int:
    """Levels of what is one comparison in the text: `not between` is a list that is negated."""
    kind = comparison.WhichOneof("kind")
    if kind == "negated":
        return 1 + _levels(comparison.negated)
    return 2 if kind == "all_of" else 1


class _Reader:
    """Recursive descent; `_token` is the first that has not been read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self.marks: list[tuple[str, tuple[Any, ...], int]] = []
        self._token = self._scan(0)

    def read(self) -> Filter:
        if self._token.kind == "end":
            self._refuse("the filter is empty; where=None takes every row", 0)
        found = self._any()
        if self._token.kind != "end":
            self._unexpected(_GRAMMAR)
        return found.filter

    def _scan(self, at: int) -> _Token:
        found = _TOKEN.match(self._text, at)
        if found is None:
            self._refuse_piece(at)
        kind = str(found.lastgroup)
        text, (start, end) = found[kind], found.span(kind)
        if kind == "sign" or (kind == "word" and text.lower() in _WORDS):
            kind = text.lower()
        return _Token(kind, text, start, end)

    def _take(self, *kinds: str) -> _Token | None:
        """The token, if it is of one of these kinds; then the next is up."""
        token = self._token
        if token.kind not in kinds:
            return None
        self._token = self._scan(token.end)
        return token

    def _any(self) -> _Part:
        return self._chain(self._all, "or")

    def _all(self) -> _Part:
        return self._chain(self._one, "and")

    def _chain(self, part: Callable[[], _Part], word: str) -> _Part:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        levels = self._wrapped(max(parts, key=lambda each: each.levels), parts[0].start)
        both = FilterList(filters=[each.filter for each in parts])
        found = Filter(all_of=both) if word == "and" else Filter(any_of=both)
        return _Part(found, levels, parts[0].start)

    def _one(self) -> _Part:
        opening = self._take("not", "(")
        if opening is None:
            start = self._token.start
            found = self._comparison()
            return _Part(found, _levels(found), start)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._too_deep(opening.start)
        if opening.kind == "not":
            inner = self._one()
            levels = self._wrapped(inner, opening.start)
            part = _Part(Filter(negated=inner.filter), levels, opening.start)
        else:
            part = self._any()._replace(start=opening.start)
            if self._take(")") is None:
                self._unexpected(f"a ( is not closed; {_GRAMMAR}")
        self._depth -= 1
        return part

    def _wrapped(self, inner: _Part, start: int) -> int:
        """The levels of a filter that begins at `start` and holds this one."""
        if inner.levels == MAX_DEPTH:
            self._too_deep(start)
        return inner.levels + 1

    def _too_deep(self, start: int) -> NoReturn:
        why = (
            f"the filter is nested too deeply, more than {MAX_DEPTH} deep; use in (...) or fewer "
            "parentheses"
        )
        self._refuse(why, start)

    def _comparison(self) -> Filter:
        column = self._take("word", "name")
        if column is None:
            self._unexpected(
                f'a column that is called like this stands in double quotes: "{self._token.text}"'
                if self._token.kind in _WORDS
                else "a metadata column comes first, then the operator"
            )
        if operator := self._take(*_OPERATORS):
            return self._compare(column, _OPERATORS[operator.kind], [self._literal()])
        negation = self._take("not")
        if negation and self._token.kind == "is":
            self._refuse("not stands behind is, as in task is not null", negation.start)
        if word := self._take("in"):
            found = self._compare(column, OPERATOR_IN, self._list(word))
        elif word := self._take("between"):
            low = self._literal()
            if self._take("and") is None:
                self._refuse("between needs two, as in step between 5 and 9", word.start)
            bounds = (OPERATOR_GE, low), (OPERATOR_LE, self._literal())
            filters = [self._compare(column, operator, [bound]) for operator, bound in bounds]
            found = Filter(all_of=FilterList(filters=filters))
        elif word := self._take("is"):
            negation = self._take("not")
            if self._take("null") is None:
                self._refuse("is stands before null or not null alone", word.start)
            found = self._compare(column, OPERATOR_IS_NULL, [])
        else:
            self._unexpected(f"an operator is needed behind {shortened(column.text)}; {_GRAMMAR}")
        return Filter(negated=found) if negation else found

    def _compare(self, column: _Token, operator: Any, values: list[Value]) -> Filter:
        name = column.text
        if column.kind == "name":
            name = name[1:-1].replace('""', '"')
        plain = tuple(getattr(value, value.WhichOneof("kind") or "") for value in values)
        self.marks.append((name, plain, column.start + 1))
        return Filter(comparison=Comparison(column=name, operator=operator, values=values))

    def _list(self, word: _Token) -> list[Value]:
        if self._take("(") is None:
            self._refuse("in needs a list, as in label in (6, 9)", word.start)
        if self._take(")"):
            return []
        values = [self._literal()]
        while self._take(","):
            values.append(self._literal())
        if self._take(")") is None:
            self._unexpected("in (...) holds literals with commas between them")
        return values

    def _literal(self) -> Value:
        sign = self._take("+", "-")
        if number := self._take("number"):
            return self._number(number, -1 if sign and sign.kind == "-" else 1)
        token = None if sign else self._take("text", "true", "false")
        if token is None:
            self._unexpected(self._missing())
        if token.kind == "text":
            return value_of(token.text[1:-1].replace("''", "'"), "where")
        return value_of(token.kind == "true", "where")

    def _number(self, token: _Token, sign: int) -> Value:
        if not token.text.isdigit():
            return value_of(sign * float(token.text), "where")
        digits = token.text.lstrip("0") or "0"
        # Python itself refuses to read thousands of digits.
        number = sign * int(digits[:20])
        if not -(2**63) <= number < 2**63:
            self._refuse(
                f"{shortened(token.text)} does not fit 64 bits; as a floating-point number it is "
                f"written {shortened(f'{token.text}.0')}",
                token.start,
            )
        return value_of(number, "where")

    def _missing(self) -> str:
        """What a literal would be, beside what stands in its place."""
        if self._token.kind == "null":
            return "nothing equals null; write `column is null`"
        if self._token.kind in ("word", "name"):
            return "a literal is needed here; text stands in single quotes, as in task = 'mnist'"
        return "a literal is needed here: a number, 'text', true or false"

    def _unexpected(self, remedy: str) -> NoReturn:
        token = self._token
        if token.kind == "end":
            self._refuse(f"the filter ends too early; {remedy}", token.start)
        self._refuse(f"syntax error at {quoted(token.text)}; {remedy}", token.start)

    def _refuse_piece(self, at: int) -> NoReturn:
        """What is no token, though something stands there."""
        found = _NO_TOKEN.match(self._text, at)
        piece, start = (found[1], found.start(1)) if found else ("", at)
        if piece in ("'", '"'):
            self._refuse(f"the quote {piece} is not closed", start)
        self._refuse(f"syntax error at {quoted(piece)}; {_GRAMMAR}", start)

    def _refuse(self, why: str, start: int) -> NoReturn:
        raise InvalidArgumentError(
            f"{_place(self._text, start)}: {why}",
            reason="INVALID_FILTER",
            field="where",
        )
