"""The fields of a JSON file, each of the type and range that it must have, before it is used.

Digests protect from accidents, not from people: a manifest may be changed and sealed again, and
then says anything. What is wrong is a ValueError that names the field: "layers[0].d_in is -3; ...".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dualform.store.files import FileEntry

Item = TypeVar("Item")

MOST = 2**53
"""No count, size or step is larger."""


class Fields:
    """A JSON object that is being read.

    Args:
        data: What was found.
        where: What it is called in messages, such as "layers[0]"; empty for a file's object.

    Raises:
        ValueError: It is no object. Every method raises it where the field is missing or wrong.
    """

    def __init__(self, data: object, where: str = "") -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {_short(data)}; it must be an object")
        self._data: dict[str, Any] = data
        self._where = where

    def called(self, name: str) -> str:
        """A field's name in messages."""
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._data.get(name) is not None

    def get(self, name: str) -> Any:
        """A field of any type."""
        if name not in self._data:
            raise ValueError(f"{self.called(name)} is missing")
        return self._data[name]

    def integer(self, name: str, least: int = 0, most: int = MOST) -> int:
        """A whole number, least <= n <= most."""
        return integer(self.get(name), self.called(name), least, most)

    def number(self, name: str) -> float:
        """A finite number that is not negative."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(self.called(name), value, "a number")
        if not 0 <= value <= sys.float_info.max:  # JSON has integers that no float can hold
            raise wrong(self.called(name), value, "finite and not negative")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise wrong(self.called(name), value, "true or false")
        return value

    def text(self, name: str) -> str:
        """Text, possibly empty."""
        return text(self.get(name), self.called(name))

    def optional_text(self, name: str) -> str | None:
        """Text, or None for null."""
        return None if self.get(name) is None else self.text(name)

    def entry(self, name: str) -> FileEntry:
        """A file entry."""
        return entry(self.get(name), self.called(name))

    def optional_entry(self, name: str) -> FileEntry | None:
        """A file entry, or None where it is null or absent."""
        return self.entry(name) if self.has(name) else None

    def object(self, name: str) -> Fields:
        """An object."""
        return Fields(self.get(name), self.called(name))

    def items(self, name: str) -> list[Any]:
        """A list's items, of any type."""
        value = self.get(name)
        if not isinstance(value, list):
            raise wrong(self.called(name), value, "a list")
        return value

    def each(self, name: str, read: Callable[[Any, str], Item]) -> tuple[Item, ...]:
        """A list's items, each read by a function that is told what it is called in messages."""
        called = self.called(name)
        return tuple(read(item, f"{called}[{i}]") for i, item in enumerate(self.items(name)))

    def objects(self, name: str, read: Callable[[Fields], Item]) -> tuple[Item, ...]:
        """A list's objects, each read by a function."""
        return self.each(name, lambda data, where: read(Fields(data, where)))


def integer(value: object, where: str, least: int = 0, most: int = MOST) -> int:
    """A whole number, least <= n <= most, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(where, value, "a whole number")
    if not least <= value <= most:
        raise wrong(where, value, f"from {least:,} to {most:,}")
    return value


def text(value: object, where: str) -> str:
    """Text, or ValueError."""
    if not isinstance(value, str):
        raise wrong(where, value, "text")
    return value


def entry(value: object, where: str) -> FileEntry:
    """A file entry, or ValueError."""
    try:
        return FileEntry.from_json(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def pair(value: object, where: str) -> Sequence[Any]:
    """A list of two, or ValueError."""
    if not isinstance(value, list) or len(value) != 2:
        raise wrong(where, value, "a list of two")
    return value


def wrong(where: str, value: object, must_be: str) -> ValueError:
    """What is said of a wrong field."""
    return ValueError(f"{where} is {_short(value)}; it must be {must_be}")


def _short(value: object) -> str:
    found = repr(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
