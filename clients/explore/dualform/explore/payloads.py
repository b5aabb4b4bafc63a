"""What was kept of an example, as something to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass

MOST_LETTERS = 1200
"""Of a text, so many letters are shown, around what matters."""
_MOST_CELLS = 40
_PICTURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}


@dataclass(frozen=True)
class Picture:
    """Bytes that a browser shows.

    Attributes:
        media: Their type.
        small: In few pixels, to be enlarged.
        address: Where the page has them; "" for where examples are.
    """

    media: str
    small: bool
    address: str = ""


@dataclass(frozen=True)
class Text:
    """A text.

    Attributes:
        text: Whole, or its begin.
        more: So many letters behind that.
    """

    text: str
    more: int = 0


@dataclass(frozen=True)
class Row:
    """A row of a table: names and values as text; `more` were left out."""

    cells: tuple[tuple[str, str], ...]
    more: int


@dataclass(frozen=True)
class Nothing:
    """Nothing to look at.

    Attributes:
        why: In words.
        trouble: What went wrong; "" where nothing did.
    """

    why: str
    trouble: str = ""


Payload = Picture | Text | Row | Nothing
NOT_KEPT = Nothing("nothing was kept of it")


def payload_of(kept: bytes | str | None) -> Payload:
    """What an example's payload is: a picture, a row (a JSON object), another text, or nothing."""
    if kept is None:
        return NOT_KEPT
    if isinstance(kept, bytes):
        media = media_of(kept)
        if media is None:
            return Nothing(f"{len(kept):,} bytes that are no picture")
        return Picture(media, _is_small(kept))
    if kept.lstrip()[:1] == "{" and len(kept) < 100_000:
        try:
            data = json.loads(kept)
        except ValueError:
            return Text(kept)
        if isinstance(data, dict):
            cells = [(str(name), _cell(value)) for name, value in data.items()]
            return Row(tuple(cells[:_MOST_CELLS]), max(0, len(cells) - _MOST_CELLS))
    return Text(kept)


def shortened(payload: Payload) -> Payload:
    """A payload of which no more is kept than can be shown."""
    if not isinstance(payload, Text):
        return payload
    text = payload.text[:MOST_LETTERS]
    return Text(text, payload.more + len(payload.text) - len(text))


def media_of(kept: bytes) -> str | None:
    """The media type of a picture's bytes; None where they are none that browsers show."""
    if kept[:4] == b"RIFF" and kept[8:12] == b"WEBP":
        return "image/webp"
    for magic, media in _PICTURES.items():
        if kept.startswith(magic):
            return media
    return None


def _is_small(kept: bytes) -> bool:
    """Of a PNG, whose sizes stand at its begin: up to 64 pixels wide and high."""
    png = kept.startswith(b"\x89PNG") and len(kept) >= 24
    return png and max(int.from_bytes(kept[16:20], "big"), int.from_bytes(kept[20:24], "big")) <= 64


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"
