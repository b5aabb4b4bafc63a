"""What commands print: aligned tables, JSON, and progress."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

_LINES = 10


def print_json(data: Any) -> None:
    """One JSON document on standard output; NaN (padding) as null, infinities as text.

    In "groups" and "columns", the users' own values, null is no value, so NaN is text there too.
    """
    print(json.dumps(_plain(data), allow_nan=False))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns side by side, numbers to the right, text to the left."""
    rows = [list(row) for row in rows]
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(headers))]
    for line in [list(headers), *cells]:
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def bytes_text(size: int) -> str:
    """A size for people, such as "12.3 MiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Progress:
    """Called with (done, total): a bar on a terminal, ten plain lines elsewhere.

    Args:
        what: What is going on, such as "building".
        unit: What is counted: "B" for bytes, or a word.
    """

    def __init__(self, what: str, unit: str) -> None:
        self._what = what
        self._unit = unit
        self._bar: Any = None
        self._next = 1

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._show(done, total)
        elif total > 0 and done * _LINES >= self._next * total:
            self._next = done * _LINES // total + 1
            amounts = f"{self._amount(done)} of {self._amount(total)}"
            print(f"{self._what}: {100 * done // total} % ({amounts})", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            is_bytes = self._unit == "B"
            self._bar = tqdm(
                total=total,
                desc=self._what,
                unit=self._unit,
                unit_scale=is_bytes,
                unit_divisor=1024 if is_bytes else 1000,
            )
        self._bar.update(done - self._bar.n)

    def _amount(self, count: int) -> str:
        return bytes_text(count) if self._unit == "B" else f"{count:,} {self._unit}"


_OWN_VALUES = ("groups", "columns")


def _plain(data: Any, nan: str | None = None) -> Any:
    if hasattr(data, "tolist"):
        data = data.tolist()
    if isinstance(data, dict):
        return {
            key: _plain(value, "nan" if key in _OWN_VALUES else nan) for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [_plain(value, nan) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return nan if math.isnan(data) else str(data)
    return data


def cell(value: Any) -> str:
    """One value as a table shows it."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value)
    # Metadata is the users' own: nothing in it may steer a terminal.
    return value if value.isprintable() else repr(value)


def _is_number(value: Any) -> bool:
    plain = value.item() if hasattr(value, "item") else value
    return plain is None or (isinstance(plain, (int, float)) and not isinstance(plain, bool))
