"""A convolution's input in the place of its keys: kept once, and patches are cut when they are
asked for.

Copying it takes a fraction of the time and memory that copying every patch does, on its way from a
GPU too; on disk it is what a recording holds (`dualform.store.patches`).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from dualform.layers.base import Use
from dualform.record.buffers import Buffer, Pool
from dualform.store.encoding import encoding
from dualform.store.patches import Patches
from dualform.store.segment_table import padded

_FEW_BYTES = 4 << 20
"""Of patches that are multiplied as others are."""


def keys_of(use: Use, pool: Pool, width: int, dtype: torch.dtype) -> tuple[Buffer, tuple[int, ...]]:
    """A copy of a use's keys, and their leading axes; of a convolution its input, where that is
    smaller."""
    windows, given, patches = use.windows, use.given, None
    leading: tuple[int, ...] = tuple(given.shape)[:-1]
    if windows is not None:
        patches = Patches(
            channels=given.shape[1],
            size=tuple(given.shape[2:]),
            kernel=windows.kernel,
            stride=windows.stride,
            dilation=windows.dilation,
            padding=windows.padding,
            mode=windows.mode,
            groups=windows.groups,
        )
        leading = (len(given), patches.rows) if windows.batched else (patches.rows,)
        if not patches.pays:
            given, patches = use.keys, None
    key: Buffer
    if patches is None:
        key = pool.take(math.prod(leading), width, dtype)
    else:
        key = InputBuffer(pool, len(given), patches, dtype)
    key.copy(given)
    key.given = not use.given.requires_grad
    return key, leading


class InputBuffer(Buffer):
    """A buffer of inputs, whose rows are patches of them.

    Args:
        pool: Gives the memory, and takes it back.
        inputs: How many.
        patches: How rows are cut from them.
        dtype: Of their numbers, one that is recorded.
    """

    __slots__ = ("_patches",)

    def __init__(self, pool: Pool, inputs: int, patches: Patches, dtype: torch.dtype) -> None:
        super().__init__(pool, pool.block(inputs, patches.numbers, dtype))
        self._patches = patches

    @property
    def patches(self) -> Patches:
        """How rows are cut from what is stored."""
        return self._patches

    @property
    def rows(self) -> int:
        """How many patches."""
        return len(self.stored) * self._patches.rows

    @property
    def width(self) -> int:
        """Numbers of a patch."""
        return self._patches.d_in

    @property
    def row_bytes(self) -> int:
        """What its rows would take, in whole pages."""
        return padded(self.rows * encoding(self.encoding).row_bytes(self.width))

    def wide(self, rows: slice) -> np.ndarray:
        """Patches, float32 [rows, width]."""
        return encoding(self.encoding).widen(self._patches.cut(self.stored, rows))

    def keep(self, rows: np.ndarray) -> Buffer:
        """Let all rows go but these: whole inputs, or where one loses some of its rows, patches of
        those that are kept.

        Args:
            rows: Their numbers, ascending.
        """
        of_each = self._patches.rows
        inputs = rows[::of_each] // of_each
        whole = inputs[:, None] * of_each + np.arange(of_each)
        if len(rows) == whole.size and np.array_equal(rows, whole.reshape(-1)):
            super().keep(inputs)
            return self
        kept = Buffer(self._pool, self._pool.block(len(rows), self.width, self.dtype))
        for number, start in enumerate(range(0, self.rows, of_each)):
            first, last = np.searchsorted(rows, (start, start + of_each))
            if first < last:
                patches = self._patches.cut(self.stored[number : number + 1])
                kept.stored[first:last] = patches[rows[first:last] - start]
        kept.given = self.given
        return kept

    def dots(self, *products: tuple[np.ndarray, slice, np.ndarray]) -> None:
        """Products of each row with vectors of all columns: a convolution with each as the kernel,
        for which no patch is made. Where they are few, patches are cut, which takes less time."""
        if self.row_bytes < _FEW_BYTES:
            super().dots(*products)
            return
        patches = self._patches
        given = self._tensor(torch.Size((len(self.stored), patches.channels, *patches.size)))
        convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            padding = [n for both in reversed(patches.padding) for n in both]
            mode = "constant" if patches.mode == "zeros" else patches.mode
            given = nn.functional.pad(given.float(), padding, mode) if any(padding) else given
            for vector, _, out in products:
                kernel = torch.from_numpy(vector)
                kernel = kernel.view(1, patches.channels // patches.groups, *patches.kernel)
                found = convolve[len(patches.size) - 1](
                    given.float(),
                    kernel.expand(patches.groups, *kernel.shape[1:]),
                    stride=patches.stride,
                    dilation=patches.dilation,
                    groups=patches.groups,
                )
                out[...] = found.reshape(-1).numpy()
