"""Which of a step's rows are recorded, and which are not, and why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dualform.record.annotations import ROWS, Column
from dualform.record.errors import OptionError
from dualform.record.fitting import Shape, spread
from dualform.record.passes import Pass
from dualform.store.sampling import DroppedRows, Sampling


class Choice(NamedTuple):
    """Of one pass of one layer.

    Attributes:
        kept: int64, ascending: which rows are recorded; None for all.
        dropped: How many are not, by reason.
        told: One of those has a value that is not zero: the rest of its layer's memory does not
            add up to the layer.
    """

    kept: np.ndarray | None
    dropped: Mapping[str, int]
    told: bool


_ALL = Choice(None, {}, False)


class StepChoice:
    """Chooses among one step's rows: the same for all layers that saw the same passes, but for the
    rows whose value is zero.

    Args:
        sampling: What the recorder was told.
        step: Its number.
    """

    def __init__(self, sampling: Sampling, step: int) -> None:
        self._sampling = sampling
        self._whole = step % sampling.every == 0
        self._step = step
        self._random: np.random.Generator | None = None
        self._drawn: dict[tuple[int, Shape], np.ndarray] = {}

    def draw(self, annotation: Mapping[str, Column], shapes: Sequence[Shape]) -> None:
        """Draw the examples of the passes that an annotation holds for."""
        if self._sampling.sample == 1.0 or not self._whole:
            return
        like = next((column.shape for column in annotation.values() if column.shape), None)
        drawn: dict[Shape, np.ndarray | None] = dict.fromkeys(shapes)
        if like is not None:
            drawn = spread(Column(self._draw(like[0]), like[:1]), shapes, like)
        by_size: dict[int, np.ndarray] = {}
        for shape, kept in drawn.items():
            if kept is None:  # by the places of its first axis, for lack of anything better
                size = shape[0] if shape else 1
                if size not in by_size:
                    by_size[size] = self._draw(size)
                kept = by_size[size]
            self._drawn[id(annotation), shape] = kept

    def choose(self, item: Pass, columns: Mapping[str, np.ndarray]) -> Choice:
        """Choose among a pass's rows.

        Args:
            item: The pass.
            columns: What its annotation says of its rows, `rows` among it.
        """
        assert item.value is not None
        if self._whole and not self._drawn and self._sampling.zero_rows and ROWS not in columns:
            return _ALL  # as nearly always
        kept = np.full(item.rows, self._whole)
        dropped = {"every": 0 if self._whole else item.rows}
        masks = {
            "rows": columns.get(ROWS),
            "sample": self._drawn.get((id(item.annotation), item.leading)),
        }
        for reason, mask in masks.items():
            if mask is not None:
                before = np.count_nonzero(kept)
                kept &= of_pass(mask, item)
                dropped[reason] = int(before - np.count_nonzero(kept))
        told = False
        if not kept.all() or not self._sampling.zero_rows:
            moved = item.value.any_nonzero()
            told = bool((moved & ~kept).any())
            if not self._sampling.zero_rows:
                dropped["zero"] = int(np.count_nonzero(kept & ~moved))
                kept &= moved
        rows_kept = None if kept.all() else np.flatnonzero(kept)
        return Choice(rows_kept, {reason: n for reason, n in dropped.items() if n}, told)

    def _draw(self, size: int) -> np.ndarray:
        if self._random is None:
            self._random = np.random.default_rng([self._sampling.seed, self._step])
        return self._random.random(size) < self._sampling.sample


def each(values: np.ndarray, rows: int) -> np.ndarray:
    """A block's column, one value for all rows, one per leading index or per row, for each row."""
    return values if len(values) == rows else np.repeat(values, rows // len(values))


def of_pass(values: np.ndarray, item: Pass) -> np.ndarray:
    """A column of a pass's shape, for each of its rows."""
    if item.places is None:
        return each(values, item.rows)
    return np.asarray(each(values, math.prod(item.leading))[item.places])


def sampling_of(every: Any, sample: Any, seed: Any, zero_rows: Any) -> Sampling:
    """A recorder's options.

    Raises:
        OptionError: One has no such value.
    """
    if not _is_integer(every) or every < 1:
        raise OptionError(
            f"every={every!r}: it is a whole number from 1 on; every=10 records steps 0, 10, 20 "
            "and so on"
        )
    if isinstance(sample, bool) or not isinstance(sample, (int, float, np.floating)):
        raise OptionError(f"sample={sample!r}: it is a number above 0 and at most 1")
    if not 0 < sample <= 1:
        hint = "" if sample else "; to record nothing, make no recorder"
        raise OptionError(
            f"sample={sample!r}: the part of the examples that is recorded is above 0 and at most "
            f"1, as 0.1 is{hint}"
        )
    if not _is_integer(seed) or not 0 <= seed < 2**53:
        raise OptionError(f"seed={seed!r}: it is a whole number from 0 on, below 2^53")
    if not isinstance(zero_rows, bool):
        raise OptionError(
            f"zero_rows={zero_rows!r}: False leaves rows out whose value is exactly zero, True "
            "keeps them"
        )
    return Sampling(int(every), float(sample), int(seed), zero_rows)


def check_values_and_steps(values: Any, steps: Any) -> None:
    """Refuse a recorder's `values` that is neither true nor false, and `steps` that is no number.

    Raises:
        OptionError: One is.
    """
    if not isinstance(values, bool):
        raise OptionError(f"values={values!r}: True records keys and values, False keys alone")
    if steps is not None and (not _is_integer(steps) or steps < 0):
        raise OptionError(f"steps={steps!r}: how many steps are planned, a whole number, or None")


def reason_of(sampling: Sampling, dropped: Sequence[DroppedRows], follows: str | None) -> str:
    """Why a layer's rows no longer add up to it, for its mark.

    Args:
        sampling: What the recorder was told.
        dropped: Rows of it that were dropped in the step at which that began.
        follows: The optimizer's name, where rows are followed under what all of them made of its
            state.
    """
    masks = "annotate(rows=...)" if any(item.reason == "rows" for item in dropped) else ""
    what = ", ".join(filter(None, (sampling.options, masks)))
    reckoned = (
        "" if follows is None else f"; what became of the others is {follows}'s on them alone"
    )
    return f"{LEFT_OUT}{what}: what those rows added is in the remainder{reckoned}"


LEFT_OUT = "rows are left out by "
"""How such marks begin."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
