"""Places in a text, with the matched token marked: for a terminal, and as HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualform.client import InvalidArgumentError
from dualform.plot import style

_REVERSE, _BOLD, _PLAIN = "\x1b[7m", "\x1b[1m", "\x1b[0m"
_SHOWN = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW}"}


@dataclass(frozen=True)
class Passage:
    """A token with the text around it.

    Attributes:
        before: Text before the token.
        token: What is marked.
        after: Text after it.
        score: Its attention weight, or a sum of them; None for a query.
        title: Where it is from; may be empty.
    """

    before: str
    token: str
    after: str
    score: float | None = None
    title: str = ""


def passages_text(
    passages: Iterable[Passage], *, query: Passage | None = None, colour: bool = False
) -> str:
    """Passages for a terminal, each below a line with rank, score and title.

    Args:
        passages: In the order to show them.
        query: Shown first.
        colour: Mark tokens by reverse video; False puts them in [[double brackets]].

    Returns:
        Text with a line break at its end. Control characters of the passages are shown as
        escapes: they steer no terminal.
    """
    blocks = []
    for head, passage in _numbered(passages, query):
        title = f"  {_safe(passage.title)}" if passage.title else ""
        line = f"{head}{title}"
        token = _safe(_token(passage))
        marked = f"{_REVERSE}{token}{_PLAIN}" if colour else f"[[{token}]]"
        body = _safe(passage.before) + marked + _safe(passage.after)
        blocks.append(f"{_BOLD}{line}{_PLAIN}\n{body}\n" if colour else f"{line}\n{body}\n")
    return "\n".join(blocks)


def passages_html(
    passages: Iterable[Passage], *, query: Passage | None = None, title: str = "Passages"
) -> str:
    """Passages as an HTML page that needs nothing else.

    Args:
        passages: In the order to show them.
        query: Shown first.
        title: Of the page.
    """
    items = []
    for head, passage in _numbered(passages, query):
        source = f" <cite>{html.escape(passage.title)}</cite>" if passage.title else ""
        text = (
            f"{html.escape(passage.before)}<mark>{html.escape(_token(passage))}</mark>"
            f"{html.escape(passage.after)}"
        )
        items.append(
            f"<section>\n<h2>{html.escape(head)}{source}</h2>\n<p>{text}</p>\n</section>\n"
        )
    name = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{name}</title>\n"
        f"<style>\n{_CSS}</style>\n</head>\n<body>\n<h1>{name}</h1>\n{''.join(items)}</body>\n"
        "</html>\n"
    )


def read_passages(path: str | Path) -> tuple[Passage | None, list[Passage]]:
    """The query (None where there is none) and passages of a JSON file.

    The file holds `{"query": PASSAGE, "passages": [PASSAGE, …]}`, `query` if there is one; a
    PASSAGE has the texts `before`, `token` and `after`, and may have `score` and `title`.

    Raises:
        InvalidArgumentError: Not such a file.
        OSError: The file can't be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON file ({error})", field="path") from None
    if not isinstance(data, dict) or not isinstance(data.get("passages"), list):
        raise InvalidArgumentError(
            f'{path}: {{"query": PASSAGE, "passages": [PASSAGE, …]}} is needed', field="path"
        )
    query = data.get("query")
    return (
        None if query is None else _passage(query, f"{path}, query"),
        [
            _passage(each, f"{path}, passages[{number}]")
            for number, each in enumerate(data["passages"])
        ],
    )


def _passage(data: object, where: str) -> Passage:
    texts = ("before", "token", "after")
    if isinstance(data, dict):
        score, title = data.get("score"), data.get("title", "")
        number = isinstance(score, int | float) and not isinstance(score, bool)
        known = set(data) <= {*texts, "score", "title"}
        if (
            known
            and all(isinstance(data.get(name), str) for name in texts)
            and (score is None or number)
            and isinstance(title, str)
        ):
            return Passage(data["before"], data["token"], data["after"], score, title)
    raise InvalidArgumentError(
        f"{where}: texts before, token and after, and if need be score (a number) and title (a "
        "text), are needed, and nothing else",
        field="path",
    )


def _numbered(passages: Iterable[Passage], query: Passage | None) -> Sequence[tuple[str, Passage]]:
    first = [] if query is None else [("query", query)]
    return first + [
        (f"{rank}" if each.score is None else f"{rank}  score {each.score:,.6g}", each)
        for rank, each in enumerate(passages, 1)
    ]


def _token(passage: Passage) -> str:
    """The token; white space that would not be seen as signs."""
    return "".join(_SHOWN.get(letter, letter) for letter in passage.token)


def _safe(text: str) -> str:
    """Nothing in a text may steer a terminal; line breaks stay."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


_CSS = f"""\
body {{ font: 16px/1.5 Georgia, serif; max-width: 42em; margin: 2em auto; padding: 0 1em; }}
h1 {{ font-size: 1.3em; }}
h2 {{ font: bold 0.8em sans-serif; color: {style.FRAME}; margin: 1.5em 0 0; }}
h2 cite {{ font-weight: normal; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.2em 0 0; }}
mark {{ background: {style.MARK}; color: black; outline: 1px solid {style.FRAME};
  font-weight: bold; }}
"""
