"""What a user gave, as messages quote it: whole where it is short."""

from __future__ import annotations

MOST_QUOTED = 80
"""Characters of a text that a message repeats at most."""


def quoted(value: object) -> str:
    """`repr` of a value, of a long text that of its beginning, and how long it is.

    Example:
        >>> quoted("x" * 1000) == repr("x" * 80) + "... (1,000 characters)"
        True
    """
    if isinstance(value, str) and len(value) > MOST_QUOTED:
        return f"{value[:MOST_QUOTED]!r}... ({len(value):,} characters)"
    return repr(value)


def shortened(text: str) -> str:
    """The same without quotes around it."""
    if len(text) > MOST_QUOTED:
        return f"{text[:MOST_QUOTED]}... ({len(text):,} characters)"
    return text


def unicode(text: str) -> str:
    """What a message can hold: names of files may have bytes that are no text.

    Example:
        >>> unicode("n\udcff")
        'n\\udcff'
    """
    return text.encode(errors="backslashreplace").decode()
