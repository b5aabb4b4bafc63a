"""Pieces of HTML: numbers, bars, links, payloads. Whatever comes from an index is escaped here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from html import escape, unescape
from urllib.parse import urlencode

from dualform.explore.answers import Refused
from dualform.explore.payloads import MOST_LETTERS, Nothing, Payload, Picture, Row
from dualform.explore.tokens import Marked, Token
from dualform.explore.view import ExampleId, View

MINUS = "\N{MINUS SIGN}"
_LONGEST_NAME = 60
_END_OF_NAME = 24
"""Of a longer one: paths and their like differ there."""
_FEW_LETTERS = 200
"""Of more, a text may need to be scrolled, by keys too."""


def number(value: float | None) -> str:
    """Four digits, as people read them; a dash where there is none."""
    if value is None:
        return "\N{EN DASH}"
    size = abs(value)
    text = f"{value:,.0f}" if 1e4 <= size < 1e9 else f"{value:,.4g}"
    return text.replace("-", MINUS)


def named(value: object) -> str:
    """A metadata value in a line, as HTML: a long one without its middle, whole in its title."""
    text = "none" if value is None else str(value)
    if len(text) <= _LONGEST_NAME:
        return escape(text)
    begin = text[: _LONGEST_NAME - _END_OF_NAME]
    return f'<span title="{escape(text)}">{escape(begin)}…{escape(text[-_END_OF_NAME:])}</span>'


def link(
    view: View, inner: str, *, said: str = "", hint: str = "", kind: str = "", current: bool = False
) -> str:
    """A link to a view; the page follows it without being loaded anew.

    Args:
        view: Where it leads.
        inner: HTML inside.
        said: For those who don't see it, where `inner` says too little. The link is called by both,
            so that who speaks to the browser can say what is seen.
        hint: The same where `inner` says enough to be called by.
        kind: A class of the style sheet.
        current: It is the view, or part of it, that is looked at.
    """
    label = f' title="{escape(said or hint)}"' if said or hint else ""
    if said:
        seen = unescape(re.sub(r"<[^>]*>", "", inner)).strip()
        label += f' aria-label="{escape(said if seen in said else f"{seen}: {said}")}"'
    here = ' aria-current="true"' if current else ""
    style = f' class="{kind}"' if kind else ""
    return f'<a href="{escape(view.link() or "?")}" data-go{style}{label}{here}>{inner}</a>'


def bar(value: float | None, largest: float) -> str:
    """A bar to the left for what is below zero, to the right for what is above."""
    if value is None or not largest > 0:
        return '<span class="bar" aria-hidden="true"></span>'
    share = min(1.0, abs(value) / largest) * 50
    side = "minus" if value < 0 else "plus"
    inner = f'<i class="{side}" style="width:{share:.1f}%"></i>'
    return f'<span class="bar" aria-hidden="true">{inner}</span>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, caption: str, kind: str) -> str:
    """A table of HTML cells, the first of each row its head."""
    heads = "".join(f'<th scope="col">{each}</th>' if each else "<td></td>" for each in head)
    lines = []
    for cells in rows:
        first, *others = cells
        lines.append(
            f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{c}</td>" for c in others) + "</tr>"
        )
    return (
        f'<table class="{kind}"><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def refused(what: Refused, view: View) -> str:
    """Why a part is not there, and what to do where that is a link."""
    more = ""
    if what.residual:
        more = " " + link(replace(view, residual=float("inf")), "Show it all the same")
    return f'<p class="refused" role="note">{escape(what.why)}{more}</p>'


def payload(
    what: Payload, example: ExampleId | None, index: str, version: str, text: Marked | None = None
) -> str:
    """An example, to look at.

    Args:
        what: What was kept.
        example: Its id.
        index: Where it is kept, by the page's name.
        version: Of the index: another one's pictures are others.
        text: With tokens marked, of a text.
    """
    if isinstance(what, Picture):
        address = urlencode({"index": index, "id": json.dumps(example), "v": version})
        small = " small" if what.small else ""
        source = escape(what.address or f"payload?{address}")
        said = "the query" if what.address else escape(f"example {example}")
        return f'<img class="picture{small}" src="{source}" alt="{said}" loading="lazy">'
    if isinstance(what, Row):
        cells = "".join(
            f"<dt>{named(name)}</dt><dd>{escape(value)}</dd>" for name, value in what.cells
        )
        more = f"<dt>…</dt><dd>{what.more} more</dd>" if what.more else ""
        return f'<dl class="cells">{cells}{more}</dl>'
    if isinstance(what, Nothing):
        trouble = f' title="{escape(what.trouble)}"' if what.trouble else ""
        return f'<p class="nothing"{trouble}>{escape(what.why)}</p>'
    if text is not None:
        return passage(tokens(text), sum(len(each.text) for each in text.tokens))
    shown = what.text[:MOST_LETTERS]
    left = left_out(len(what.text) - len(shown) + what.more)
    return passage(escape(shown) + left, len(shown))


def passage(inner: str, letters: int) -> str:
    """A text; where it may not fit, keys can scroll it."""
    keys = ' tabindex="0"' if letters > _FEW_LETTERS else ""
    return f'<p class="text"{keys}>{inner}</p>'


def tokens(text: Marked) -> str:
    """A text whose tokens are as strong as their scores; a screen reader hears the strong ones."""
    inner = "".join(_token(each, text.strongest) for each in text.tokens)
    return left_out(text.before) + inner + left_out(text.after)


def _token(each: Token, strongest: float) -> str:
    shown = escape(each.text)
    if each.score is None or not strongest > 0:
        return shown
    share = abs(each.score) / strongest
    if share < 0.05:
        return f'<span title="{number(each.score)}">{shown}</span>'
    side = "minus" if each.score < 0 else "plus"
    strength = f"--s:{share:.2f}"
    return f'<mark class="{side}" style="{strength}" title="{number(each.score)}">{shown}</mark>'


def left_out(letters: int) -> str:
    """How much of a text is not shown."""
    return f'<span class="left-out"> … {letters:,} letters … </span>' if letters > 0 else ""
