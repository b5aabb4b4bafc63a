"""One forward pass of one layer, and the modules that its weight's passes come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from dualform.layers import ProductKind
from dualform.record.annotations import Column
from dualform.record.buffers import Buffer
from dualform.record.selection import Tied

USE = "use"
"""The column that says of a tied layer's rows which use they come from."""


class Pass:
    """One forward pass of one layer, with its value once a backward brought it.

    Attributes:
        number: Order of the forward calls.
        annotation: What was annotated when it ran.
        leading: Shape of the keys without their last axis.
        use: What column `use` says of its rows, if anything.
        places: int64, ascending: which of the rows that `leading` has these are; None for all.
        rows: How many rows.
        key: [rows, d_in], as the product had them; None once the step has taken it.
        value: [rows, d_out], raw (-dL/dy), likewise; None until it is committed.
    """

    __slots__ = (
        "__weakref__",
        "annotation",
        "key",
        "leading",
        "number",
        "places",
        "rows",
        "use",
        "value",
    )

    def __init__(
        self,
        number: int,
        annotation: Mapping[str, Column],
        leading: tuple[int, ...],
        key: Buffer,
        use: str | None = None,
    ) -> None:
        self.number = number
        self.annotation = annotation
        self.leading = leading
        self.use = use
        self.places: np.ndarray | None = None
        self.rows = key.rows
        self.key: Buffer | None = key
        self.value: Buffer | None = None

    @property
    def keys(self) -> np.ndarray:
        """float32 [rows, d_in], while the step has not taken them."""
        assert self.key is not None
        return self.key.array

    @property
    def gone(self) -> bool:
        """The step has taken it: a backward that comes now is too late."""
        return self.key is None

    def bring(self, brought: Buffer) -> None:
        """Take what a backward brought, beside what others brought since the last zeroing."""
        self.value = brought if self.value is None else self.value.add(brought)

    def release(self) -> None:
        """Let go of both: the step has run."""
        self.key = self.value = None


class LookedUp(Pass):
    """A pass through a tied embedding, as a row of the matrix that it shares: its gradient is
    value key' with the token's id as the value, a single 1, and minus the gradient at the vector
    that was looked up as the key. So the key comes with the backward.
    """

    __slots__ = ("_ids",)

    def __init__(
        self,
        number: int,
        annotation: Mapping[str, Column],
        leading: tuple[int, ...],
        ids: Buffer,
        use: str | None = None,
    ) -> None:
        super().__init__(number, annotation, leading, ids, use)
        self.key = None
        self._ids: Buffer | None = ids

    @property
    def gone(self) -> bool:
        return self._ids is None

    def bring(self, brought: Buffer) -> None:
        self.key = brought if self.value is None or self.key is None else self.key.add(brought)
        self.value = self._ids

    def release(self) -> None:
        self.key = self.value = self._ids = None


class Watched(NamedTuple):
    """A module that uses the layer's weight.

    Attributes:
        name: In the model.
        flipped: It multiplies by the transposed matrix: an embedding tied to a linear layer.
        use: What column `use` says of its rows.
    """

    name: str
    kind: ProductKind
    module: nn.Module
    flipped: bool
    use: str | None

    @property
    def held(self) -> torch.Tensor | None:
        """The weight that it has now."""
        return self.kind.leaves(self.module)[0]


def watched_modules(
    name: str, kind: ProductKind, module: nn.Module, tied: Sequence[Tied]
) -> list[Watched]:
    """The modules that use a weight, the layer's own first. Where one looks up what the other
    multiplies by, rows say which: metadata column `use`, "output" or "input"."""
    flipped = [item.kind.one_hot != kind.one_hot for item in tied]
    uses = ("output", "input") if any(flipped) else (None, None)
    found = [Watched(name, kind, module, False, uses[False])]
    for item, is_flipped in zip(tied, flipped, strict=True):
        found.append(Watched(item.name, item.kind, item.module, is_flipped, uses[is_flipped]))
    return found
