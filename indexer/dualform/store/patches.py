"""Patches: keys of a convolution, cut from its input when they are read.

A key is what the kernel sees in one place. Neighbouring places see nearly the same numbers, so a
recording holds the input once, with its geometry, where that is smaller
(docs/format-recording.md, *Inputs of convolutions*). What is cut is copied, never computed: keys
are those that the layer multiplied, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dualform.store.fields import Fields, integer, pair, wrong

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
"""How an input may be padded: torch's `padding_mode`, and what NumPy calls it."""

_MOST_PADDED = 64
"""Padding makes an input at most so many times as large; more is not cut from inputs, so that a few
bytes never ask for much memory."""

_INDEX_BYTES = 1 << 20
"""Of places in an input that are looked up at a time: they stay in the processor's cache."""

_PADDED_BYTES = 8 << 20
"""Of inputs that are padded at a time, or one."""


class Patches(NamedTuple):
    """How keys are cut from inputs, [channels, *size]. Axes are those of `size`.

    An input has a row for each group and place, groups first and places row-major; a row is a
    patch of its group's channels, [channels / groups, *kernel], flattened.

    Attributes:
        channels: Of an input.
        size: How long its axes are.
        kernel: How many numbers a patch has along each axis.
        stride: From one place to the next.
        dilation: From one number of a patch to the next.
        padding: Numbers before and behind each axis that the input is padded with.
        mode: How; one of `MODES`.
        groups: Of channels.
    """

    channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str
    groups: int

    @property
    def numbers(self) -> int:
        """Of an input."""
        return self.channels * math.prod(self.size)

    @property
    def padded(self) -> tuple[int, ...]:
        """The axes of a padded input."""
        pairs = zip(self.size, self.padding, strict=True)
        return tuple(size + before + behind for size, (before, behind) in pairs)

    @property
    def places(self) -> tuple[int, ...]:
        """How many there are along each axis; 0 or less where the kernel does not fit."""
        return _places(self)

    @property
    def rows(self) -> int:
        """Of an input."""
        return self.groups * math.prod(self.places)

    @property
    def d_in(self) -> int:
        """Numbers of a row."""
        return self.channels // self.groups * math.prod(self.kernel)

    @property
    def pays(self) -> bool:
        """Whether an input is smaller than its rows, and may be stored in their place."""
        return self.numbers < self.rows * self.d_in and self._why_not() is None

    def cut(self, inputs: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
        """Rows of inputs, one input's after the other's: [rows, d_in], contiguous.

        Beside them, memory is taken for a few padded inputs.

        Args:
            inputs: [n, numbers], contiguous, of any dtype.
            rows: Which of the n * `rows` there are; its step is 1.
        """
        start, stop, _ = rows.indices(len(inputs) * self.rows)
        found = np.empty((max(0, stop - start), self.d_in), inputs.dtype)
        if not len(found):
            return found
        first, last = start // self.rows, -(-stop // self.rows)
        nbytes = self.channels * math.prod(self.padded) * inputs.itemsize
        at_once = max(1, _PADDED_BYTES // nbytes)
        for number in range(first, last, at_once):
            some = self._pad(inputs[number : min(number + at_once, last)])
            self._take(some, found, start - number * self.rows)
        return found

    def _take(self, inputs: np.ndarray, found: np.ndarray, start: int) -> None:
        """Fill rows with those of some padded inputs.

        Args:
            inputs: [few, numbers].
            found: [rows, d_in].
            start: Which of these inputs' rows is `found`'s first; below 0 where it has others
                before.
        """
        corners, inside = self._index()
        rows, step = self.rows, max(1, _INDEX_BYTES // inside.nbytes)
        for first in range(0, rows, step):
            index: np.ndarray | None = None  # the same for all inputs
            for number, numbers in enumerate(inputs):
                begin = number * rows + first - start
                low = max(0, begin)
                high = min(len(found), begin + min(step, rows - first))
                if low >= high:
                    continue
                if index is None:
                    index = corners[first : first + step, None] + inside
                # No place is outside: "clip" is the mode that fills `out` without a copy of it.
                np.take(
                    numbers, index[low - begin : high - begin], out=found[low:high], mode="clip"
                )

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Where in a padded input a row's first number lies, int64 [rows], and how far behind it
        all of its numbers do, int64 [d_in]."""
        padded = self.padded
        of_channel, group = math.prod(padded), self.channels // self.groups
        along = [math.prod(padded[axis + 1 :]) for axis in range(len(padded))]

        def steps(counts: Sequence[int], by: Sequence[int]) -> list[tuple[int, int]]:
            return [(n, a * b) for n, a, b in zip(counts, along, by, strict=True)]

        return (
            _sums((self.groups, group * of_channel), *steps(self.places, self.stride)),
            _sums((group, of_channel), *steps(self.kernel, self.dilation)),
        )

    def _pad(self, inputs: np.ndarray) -> np.ndarray:
        """[n, numbers] padded, [n, numbers of a padded one]."""
        if not any(map(any, self.padding)):
            return inputs
        shaped = inputs.reshape(len(inputs), self.channels, *self.size)
        if self.mode == "zeros":  # which NumPy's pad takes ten times as long for, of a few numbers
            found = np.zeros((len(inputs), self.channels, *self.padded), inputs.dtype)
            pairs = zip(self.padding, self.size, strict=True)
            inside = [slice(before, before + size) for (before, _), size in pairs]
            where = (slice(None), slice(None), *inside)
            found[where] = shaped
        else:
            padding: Any = ((0, 0), (0, 0), *self.padding)
            mode: Any = MODES[self.mode]
            found = np.pad(shaped, padding, mode)
        return found.reshape(len(inputs), -1)

    def _why_not(self) -> tuple[str, object, str] | None:
        """The field that inputs can't be cut with, what it is, and what it must be."""
        if self.channels % self.groups:
            return "groups", self.groups, f"a divisor of {self.channels:,} channels"
        if min(self.places) < 1:
            return "kernel", list(self.kernel), f"inside a padded input of {list(self.padded)}"
        if math.prod(self.padded) > _MOST_PADDED * math.prod(self.size):
            most = f"what makes an input at most {_MOST_PADDED} times as large"
            return "padding", [list(both) for both in self.padding], most
        return None

    def to_json(self) -> dict[str, Any]:
        """As a segment's table has it."""
        return self._asdict()  # JSON has tuples as lists

    @classmethod
    def read(cls, data: Fields) -> Patches:
        """What `to_json` gave.

        Raises:
            ValueError: It is something else.
        """
        most = 2**31

        def count(value: object, where: str) -> int:
            return integer(value, where, 1, most)

        def both(value: object, where: str) -> tuple[int, int]:
            before, behind = pair(value, where)
            return integer(before, where, 0, most), integer(behind, where, 0, most)

        size = data.each("size", count)
        if not 1 <= len(size) <= 3:
            raise wrong(data.called("size"), list(size), "of one to three axes")
        mode = data.text("mode")
        if mode not in MODES:
            raise wrong(data.called("mode"), mode, f"one of {', '.join(MODES)}")
        found = cls(
            channels=data.integer("channels", 1, most),
            size=size,
            kernel=data.each("kernel", count),
            stride=data.each("stride", count),
            dilation=data.each("dilation", count),
            padding=data.each("padding", both),
            mode=mode,
            groups=data.integer("groups", 1, most),
        )
        for name in ("kernel", "stride", "dilation", "padding"):
            if len(getattr(found, name)) != len(size):
                raise wrong(data.called(name), data.get(name), f"of {len(size)} axes, as size is")
        fault = found._why_not()
        if fault is not None:
            name, value, must_be = fault
            raise wrong(data.called(name), value, must_be)
        return found


@functools.lru_cache(maxsize=256)
def _places(patches: Patches) -> tuple[int, ...]:
    """See `Patches.places`, which is asked for often."""
    axes = zip(patches.padded, patches.kernel, patches.dilation, patches.stride, strict=True)
    return tuple(
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, dilation, stride in axes
    )


def _sums(*steps: tuple[int, int]) -> np.ndarray:
    """Every i_1 s_1 + i_2 s_2 + ... with 0 <= i_k < n_k, the last i fastest: int64, flat.

    Args:
        steps: (n_1, s_1), (n_2, s_2), ...
    """
    found = np.zeros(1, np.int64)
    for count, step in steps:
        found = (found[:, None] + np.arange(count) * step).reshape(-1)
    return found
