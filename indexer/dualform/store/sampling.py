"""Which of training's rows a recording keeps, and how many it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dualform.store.fields import Fields, wrong

REASONS = ("every", "rows", "sample", "zero")
"""Why a row is not recorded, the first that holds: its step is none of every N; annotate(rows=...)
leaves it out; its example is not in the sample; its value is exactly zero."""


@dataclass(frozen=True)
class Sampling:
    """Which rows a recorder keeps, masks apart.

    Attributes:
        every: Of steps 0, N, 2 N, ... alone.
        sample: Of so large a part of the examples, drawn anew at each step.
        seed: Of these draws; they depend on it and the step's number alone.
        zero_rows: Those whose value is exactly zero too.
    """

    every: int = 1
    sample: float = 1.0
    seed: int = 0
    zero_rows: bool = True

    @property
    def whole(self) -> bool:
        """Nothing is left out."""
        return self.every == 1 and self.sample == 1.0 and self.zero_rows

    @property
    def options(self) -> str:
        """As a recorder was given them: "every=10, sample=0.25, seed=3"; empty where all is
        kept."""
        found = [] if self.every == 1 else [f"every={self.every}"]
        found += [] if self.sample == 1.0 else [f"sample={self.sample:g}, seed={self.seed}"]
        found += [] if self.zero_rows else ["zero_rows=False"]
        return ", ".join(found)

    def to_json(self) -> dict[str, Any]:
        """As a manifest's "sampling"."""
        return asdict(self)

    @classmethod
    def read(cls, data: Fields) -> Sampling:
        """A manifest's "sampling"; without one all is kept.

        Raises:
            ValueError: A field is wrong; it says which.
        """
        if not data.has("sampling"):
            return ALL_ROWS
        fields = data.object("sampling")
        sample = fields.number("sample")
        if not 0 < sample <= 1:
            raise wrong(fields.called("sample"), sample, "above 0 and at most 1")
        return cls(
            fields.integer("every", 1), sample, fields.integer("seed"), fields.boolean("zero_rows")
        )


ALL_ROWS = Sampling()
"""Nothing is left out."""


class DroppedRows(NamedTuple):
    """Rows of one layer that a step had, and that are not recorded for one reason."""

    step: int
    layer: str
    reason: str
    rows: int


def dropped_columns(
    dropped: Sequence[DroppedRows], layers: Sequence[str]
) -> dict[str, list[int | str]]:
    """A segment's dropped rows as JSON has them: a column for each field."""
    index = {name: i for i, name in enumerate(layers)}
    return {
        "step": [item.step for item in dropped],
        "layer": [index[item.layer] for item in dropped],
        "reason": [item.reason for item in dropped],
        "rows": [item.rows for item in dropped],
    }


def read_dropped(data: Fields, layers: Sequence[str], steps: range) -> list[DroppedRows]:
    """What `dropped_columns` wrote; nothing where a segment has no such entry.

    Raises:
        ValueError: A field is wrong; it says which.
    """
    if not data.has("dropped"):
        return []
    columns = data.object("dropped")
    count = len(columns.items("step"))
    found = []
    items = {name: columns.items(name) for name in DroppedRows._fields}
    for name, column in items.items():
        if len(column) != count:
            raise wrong(columns.called(name), f"{len(column):,} long", f"{count:,}, as its steps")
    for i in range(count):
        fields = Fields({name: column[i] for name, column in items.items()}, f"dropped[{i}]")
        found.append(
            DroppedRows(
                fields.integer("step", steps.start, steps.stop - 1),
                layers[fields.integer("layer", 0, len(layers) - 1)],
                _reason(fields),
                fields.integer("rows", 1),
            )
        )
    return found


def counted(dropped: Sequence[DroppedRows], layer: str) -> dict[str, int]:
    """How many rows of a layer were dropped, by reason; without those for which there is none."""
    counts = dict.fromkeys(REASONS, 0)
    for item in dropped:
        if item.layer == layer:
            counts[item.reason] += item.rows
    return {reason: rows for reason, rows in counts.items() if rows}


def read_counts(data: Fields) -> Mapping[str, int]:
    """An index layer's "dropped": rows by reason.

    Raises:
        ValueError: It is something else.
    """
    if not data.has("dropped"):
        return {}
    fields = data.object("dropped")
    return {reason: fields.integer(reason, 1) for reason in REASONS if fields.has(reason)}


def _reason(fields: Fields) -> str:
    reason = fields.text("reason")
    if reason not in REASONS:
        raise wrong(fields.called("reason"), reason, f"one of {', '.join(REASONS)}")
    return reason
