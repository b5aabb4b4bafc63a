"""A view and its link are the same; tokens, payloads and lines, without anybody asked."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import parse_qs

import pytest

from dualform.client import parse_filter
from dualform.explore import View
from dualform.explore.payloads import MOST_LETTERS, Nothing, Picture, Row, Text, payload_of
from dualform.explore.tokens import marked, pieces_of
from dualform.explore.view import filtered, view_of, without

from .memory import png

VIEWS = [
    View(),
    View(index="a b", layer="model.0/x", example=17, seen=3, place=0),
    View(example="17", after="", group="task", by="row", k=60, unit=0),
    View(upload="abc", number=2, step=0, filters=("label = 3", "task = 'é&#' or label is null")),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_link_leads_back(view: View) -> None:
    assert view_of(parse_qs(view.link().removeprefix("?"), keep_blank_values=True)) == (view, [])


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("k=0", "1 to 60"),
        ("k=61", "1 to 60"),
        ("step=-1", "whole number"),
        ("step=9223372036854775808", "whole number"),
        ("unit=x", "whole number"),
        ("example=true", "an id is"),
        ("example=a", "an id is"),
        ("by=all", "example or row"),
        ("colour=red", "there is no 'colour'"),
    ],
)
def test_what_a_link_can_not_say_is_as_usual(link: str, message: str) -> None:
    view, wrong = view_of(parse_qs(f"index=mine&{link}"))
    assert view == View(index="mine")
    assert len(wrong) == 1
    assert message in wrong[0]


@pytest.mark.parametrize("value", [3, -1.5, True, None, "it's", 'a"b'])
@pytest.mark.parametrize("column", ["label", "of case", 'x"y'])
def test_a_value_left_out_is_a_filter(column: str, value: object) -> None:
    view = without(View(filters=("step < 3",)), column, value)
    assert view.where is not None
    parse_filter(view.where)
    assert without(view, column, value) == view
    assert filtered(View(), "a = 1").where == "a = 1"


def test_payloads_are_what_they_look_like() -> None:
    import numpy as np

    small, large = np.zeros((8, 8), np.uint8), np.zeros((65, 8), np.uint8)
    assert payload_of(png(small)) == Picture("image/png", True)
    assert payload_of(png(large)) == Picture("image/png", False)
    assert payload_of(b"\xff\xd8\xff\xe0 and so on") == Picture("image/jpeg", False)
    assert payload_of(b"RIFF\0\0\0\0WEBPVP8 ") == Picture("image/webp", False)
    assert payload_of(b"<svg onload=alert(1)>") == Nothing("21 bytes that are no picture")
    assert payload_of(None) == Nothing("nothing was kept of it")
    assert payload_of("{ so it goes") == Text("{ so it goes")
    row = payload_of(json.dumps({"age": 41, "name": "x" * 300, "more": [1]}))
    assert isinstance(row, Row)
    assert row.cells == (("age", "41"), ("name", "x" * 200 + "…"), ("more", "[1]"))
    wide = payload_of(json.dumps({str(each): each for each in range(1000)}))
    assert isinstance(wide, Row)
    assert (len(wide.cells), wide.more) == (40, 960)


@pytest.mark.parametrize(
    ("text", "positions", "pieces"),
    [
        ("abc", 3, ["a", "b", "c"]),
        ("abc", 2, ["a", "b", "c"]),
        ("a bc\nd", 3, ["a ", "bc\n", "d"]),
        ("a bc d", 2, ["a ", "bc ", "d"]),
        ("abc", 4, None),
        ("abc", 0, None),
    ],
)
def test_tokens_are_told_by_their_number(
    text: str, positions: int, pieces: list[str] | None
) -> None:
    found = pieces_of(text, positions)
    assert (None if found is None else list(found)) == pieces


def test_of_a_long_text_what_matters_is_shown() -> None:
    text = "x" * 4_999_999 + "!" + "y" * 5_000_000
    found = marked(text, {4_999_999: -2.0, 10: 1.0, 99_999_999: 7.0}, len(text))
    shown = "".join(each.text for each in found.tokens)
    assert len(shown) <= MOST_LETTERS + 1
    assert "x!y" in shown
    assert found.before + len(shown) + found.after == len(text)
    assert found.strongest == 2.0
    assert next(each for each in found.tokens if each.text == "!").score == -2.0
    whole = marked(text, {}, 0)
    assert len(whole.tokens[0].text) + whole.after == len(text)
    words = marked("a " + "b" * 3000 + " c", {1: 1.0}, 3)
    shown = "".join(each.text for each in words.tokens)
    assert words.before + len(shown) + words.after == 3004


def test_the_same_filter_counts_once() -> None:
    view = filtered(filtered(View(), "label = 1"), "label = 1")
    assert view.filters == ("label = 1",)
    assert (
        replace(view, filters=("a = 1", "b = 2 or c = 3")).where == "(a = 1) and (b = 2 or c = 3)"
    )
