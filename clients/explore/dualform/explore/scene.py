"""What every part of the page is drawn with: the view, and what things are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dualform.client import InvalidArgumentError
from dualform.explore.view import View

LABEL = "label"
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Scene:
    """The view, and what things are called.

    Attributes:
        view: What is looked at.
        version: Of the index: another one's pictures are others.
        names: Of the last layer's units, in order, and so of labels; empty where none are given.
        last: The layer whose output is the prediction.
        model: There is a model to run.
    """

    view: View
    version: str = ""
    names: Sequence[str] = ()
    last: str = ""
    model: bool = False

    def unit(self, number: int, layer: str) -> str:
        """An output unit: "3", or "3 cat" where it has a name."""
        return self._with_name(number) if layer in (self.last, "") else str(number)

    def value(self, column: str, value: object) -> str:
        """A metadata value, a label with its name."""
        if column == LABEL and isinstance(value, int) and not isinstance(value, bool):
            return self._with_name(value)
        return "none" if value is None else str(value)

    def at(self, **changes: object) -> Scene:
        """The same about another view."""
        return replace(self, view=replace(self.view, **changes))  # type: ignore[arg-type]

    def _with_name(self, number: int) -> str:
        return f"{number} {self.names[number]}" if 0 <= number < len(self.names) else str(number)


def read_names(path: Path) -> tuple[str, ...]:
    """Names of output units: a line of a UTF-8 file each, the first of unit 0.

    Raises:
        InvalidArgumentError: The file can't be read, is larger than 16 MiB, or has no line.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidArgumentError(
                f"{path} has {path.stat().st_size:,} bytes; names take up to 16 MiB", field="names"
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"{path} can't be read ({error}); names are a UTF-8 file with a line for each unit",
            field="names",
        ) from None
    names = tuple(text.splitlines())
    if not names:
        raise InvalidArgumentError(
            f"{path} is empty; a line for each unit is needed", field="names"
        )
    return names


def names_for(units: int, given: Sequence[Sequence[str]]) -> Sequence[str]:
    """Those of as many units; none where no such names are given."""
    return next((names for names in given if len(names) == units), ())


def unused(units: Mapping[str, int], given: Sequence[Sequence[str]]) -> str:
    """Why names are not used for an index, in words; "" where they are, or none are given."""
    if not given or any(len(names) in units.values() for names in given):
        return ""
    counts = ", ".join(f"{len(names):,}" for names in given)
    have = ", ".join(f"layer {name} has {count:,} units" for name, count in units.items())
    return f"{counts} are given; {have}"
