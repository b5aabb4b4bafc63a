"""What a user gave, as messages quote it: whole where it is short."""

from __future__ import annotations

import reprlib

MOST_QUOTED = 80
"""Characters of a text that a message repeats at most."""
_FEW = reprlib.Repr()
_FEW.maxlevel = 2


def quoted(value: object) -> str:
    """`repr` of a value, of a long text that of its beginning, and how long it is; of a list the
    first entries.

    Example:
        >>> quoted("x" * 1000) == repr("x" * 80) + "... (1,000 characters)"
        True
    """
    if isinstance(value, str) and len(value) > MOST_QUOTED:
        return f"{value[:MOST_QUOTED]!r}... ({len(value):,} characters)"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    # Lists of lists of one list are small, and their text is not.
    return _FEW.repr(value)


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
