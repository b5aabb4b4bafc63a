"""Passages: the token is marked, and no text steers a terminal or a page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dualform.client import InvalidArgumentError
from dualform.plot import Passage, passages_html, passages_text, read_passages

QUERY = Passage("a fox saw ", "the", " grapes")
FOUND = [
    Passage("the crow &\nthe <b>fox</b> and ", "the", " cheese", 1234.5678, "Fables, 12"),
    Passage("it ends here.", "\n", "\x1b[2Jnext", -0.5),
]


class Reader(HTMLParser):
    """Text by the element that it is in."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.path: list[str] = []
        self.text: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop() == tag

    def handle_data(self, data: str) -> None:
        if "section" in self.path:
            self.text.append((self.path[-1], data))


def test_the_terminal_sees_the_token_marked() -> None:
    text = passages_text(FOUND, query=QUERY)
    assert text == (
        "query\na fox saw [[the]] grapes\n\n"
        "1  score 1,234.57  Fables, 12\nthe crow &\nthe <b>fox</b> and [[the]] cheese\n\n"
        "2  score -0.5\nit ends here.[[\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}]]\\x1b[2Jnext\n"
    )
    coloured = passages_text(FOUND, colour=True)
    assert "\x1b[7mthe\x1b[0m cheese" in coloured
    assert "\x1b[2J" not in coloured
    assert coloured.startswith("\x1b[1m1  score")


def test_the_page_is_well_formed_and_escaped() -> None:
    reader = Reader()
    reader.feed(passages_html(FOUND, query=QUERY, title="Aesop <1>"))
    reader.close()
    assert reader.path == []
    assert [text for tag, text in reader.text if tag == "mark"] == [
        "the",
        "the",
        "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
    ]
    paragraphs = "".join(text for tag, text in reader.text if tag in ("p", "mark"))
    assert "the crow &\nthe <b>fox</b> and the cheese" in paragraphs
    assert "Fables, 12" in [text for tag, text in reader.text if tag == "cite"]


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(
        json.dumps(
            {
                "query": {"before": QUERY.before, "token": "the", "after": QUERY.after},
                "passages": [vars(each) for each in FOUND],
            }
        )
    )
    assert read_passages(path) == (QUERY, FOUND)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON file"),
        ("[]", "is needed"),
        ('{"passages": [{"before": "a", "token": "b"}]}', r"passages\[0\]: texts before"),
        (
            '{"passages": [{"before": "a", "token": "b", "after": "", "score": "1"}]}',
            r"passages\[0\]",
        ),
        ('{"passages": [], "query": {"before": "", "token": "", "after": "", "x": 1}}', "query"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        read_passages(path)
