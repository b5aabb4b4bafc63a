"""Text in tokens, each as strong as its weight.

An index knows positions, not tokens. Which pieces of a kept text they are is told by their number:
as many as the text has letters, or words, one more or less for what stands at begin or end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dualform.explore.payloads import MOST_LETTERS


@dataclass(frozen=True)
class Token:
    """A piece of text.

    Attributes:
        text: With the white space behind it.
        score: What its rows add up to; None where it has none.
        place: Its position.
    """

    text: str
    score: float | None
    place: int


@dataclass(frozen=True)
class Marked:
    """A text with tokens marked, or without where they can't be told.

    Attributes:
        tokens: In order; of a long text those around the strongest.
        before: Letters left out before them.
        after: And behind them.
        strongest: The largest |score|; 0 where no token has one.
    """

    tokens: tuple[Token, ...]
    before: int = 0
    after: int = 0
    strongest: float = 0.0


def marked(text: str, scores: Mapping[int, float], positions: int) -> Marked:
    """A text with its tokens' scores.

    Args:
        text: As it was kept.
        scores: By position.
        positions: How many the example has in a step; 0 where the layer saw no sequence.
    """
    pieces = pieces_of(text, positions)
    if pieces is None:
        cut = text[:MOST_LETTERS]
        return Marked((Token(cut, None, -1),), after=len(text) - len(cut))
    known = {at: score for at, score in scores.items() if 0 <= at < len(pieces)}
    centre = max(known, key=lambda at: abs(known[at]), default=0)
    first, last = _window(pieces, centre)
    tokens = tuple(Token(pieces[at][:MOST_LETTERS], known.get(at), at) for at in range(first, last))
    before = sum(map(len, pieces[:first]))
    return Marked(
        tokens,
        before=before,
        after=sum(map(len, pieces)) - before - sum(len(each.text) for each in tokens),
        strongest=max((abs(score) for score in known.values()), default=0.0),
    )


def pieces_of(text: str, positions: int) -> Sequence[str] | None:
    """The text's letters or words, whichever there are as many of as positions; None for neither.

    A model that predicts the next token sees one token less than the text has.
    """
    if positions <= 0:
        return None
    if 0 <= len(text) - positions <= 1:
        return text
    # No more of them than would do: of a book whose beginning was read there are very many.
    words = [each[0] for each in islice(re.finditer(r"\S+\s*", text), positions + 2)]
    return words if 0 <= len(words) - positions <= 1 else None


def _window(pieces: Sequence[str], centre: int) -> tuple[int, int]:
    """The places, first and behind the last, of as much as can be shown around one of them."""
    if sum(map(len, pieces)) <= MOST_LETTERS:
        return 0, len(pieces)
    first, last = centre, centre + 1
    length = len(pieces[centre])
    while length < MOST_LETTERS and (first > 0 or last < len(pieces)):
        if first > 0:
            first -= 1
            length += len(pieces[first])
        if last < len(pieces):
            length += len(pieces[last])
            last += 1
    return first, last
