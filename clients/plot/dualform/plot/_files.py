"""Figures as files: the format is the ending."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from dualform.client import InvalidArgumentError
from dualform.plot import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def format_of(path: str | Path) -> str:
    """The format that a file's ending names: "png", "svg" or "pdf".

    Raises:
        InvalidArgumentError: Another ending, or none.
    """
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise InvalidArgumentError(
            f"{path}: a figure's file ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
            field="path",
        )
    return ending[1:]


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure, over what was there; nothing is written before it is drawn.

    Args:
        figure: From one of this package's functions.
        path: Ends in .png (200 dots per inch), .svg or .pdf.

    Raises:
        InvalidArgumentError: Another ending.
        OSError: The file can't be written.
    """
    kind = format_of(path)
    drawn = io.BytesIO()
    # No date: the same figure gives the same bytes.
    dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with style.look():
        figure.savefig(drawn, format=kind, metadata=dateless)
    Path(path).write_bytes(drawn.getvalue())
