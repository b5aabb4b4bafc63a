"""What a layer's rows add up to with the trained layer's coefficients (docs/decisions/0008).

    sum c_t e_t (x) x_t    and, for the bias,    sum c'_t e_t

Rows are multiplied in float32, few at a time, and the products added in float64: contributions
cancel, so that what one long float32 sum loses is large beside the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from dualform.index.errors import BuildError
from dualform.optimizers import Affine, Family, LayerRun, followed_bytes, layer_state
from dualform.store.index import INITIAL
from dualform.store.ledger import Coefficients, Ledger
from dualform.store.recording import LayerSpec

TILE_ROWS = 128
"""Rows of one float32 product; fewer passes wait for one another."""

_SCALAR_BYTES = 12
"""Of a number of a `RowSum`: itself in float64, and the float32 product."""


MOST_MEMORY = 4 << 30
"""Bytes that the sums of all layers that are made at once may take."""


def at_once(
    layers: Mapping[str, LayerSpec], family: Family, parts: Mapping[str, int]
) -> frozenset[str]:
    """Which layers' rows are added up while their files are written; of the others one layer after
    another is, once that is done: together they would take too much memory.

    Args:
        layers: By name.
        family: The optimizer's.
        parts: How many parts each layer's sum is kept apart in beside the whole.

    Raises:
        BuildError: A layer takes too much memory by itself.
    """
    found, left = [], MOST_MEMORY
    for name, layer in layers.items():
        numbers = layer.d_out * (layer.d_in + (layer.bias is not None))
        needed = _bytes(family, numbers, parts[name])
        if needed > MOST_MEMORY:
            columns = f" in {parts[name]:,} parts" if parts[name] else ""
            remedy = (
                "name fewer columns with --parts, or ones with fewer values"
                if _bytes(family, numbers, 0) <= MOST_MEMORY
                else "record without it (layers=), or build without values (--no-values)"
            )
            raise BuildError(
                f"adding up what the rows of layer {name!r} became{columns} takes "
                f"{needed / 1e9:,.1f} GB of memory, more than the {MOST_MEMORY / 1e9:.1f} GB that "
                f"a build allows itself; {remedy}"
            )
        if needed <= left:
            found.append(name)
            left -= needed
    return frozenset(found)


def _bytes(family: Family, numbers: int, parts: int) -> int:
    """Of a sum, whole and in parts."""
    if family.scalar:
        return (1 + parts) * numbers * _SCALAR_BYTES
    return followed_bytes(family, numbers, 1 + parts)


class FollowedSum:
    """What a layer's rows add up to where they have no coefficients: they are followed.

    Args:
        layer: Whose rows.
        ledger: What the optimizer did.
        initial: The state before the first step.
        parts: How many parts are kept apart beside the whole.
    """

    def __init__(
        self, layer: LayerSpec, ledger: Ledger, initial: Mapping[str, np.ndarray], parts: int = 0
    ) -> None:
        self._layer = layer
        self._steps = ledger.steps
        self._run = LayerRun(
            ledger.family,
            ledger.parameters[layer.weight],
            None if layer.bias is None else ledger.parameters[layer.bias],
            layer_state(initial, ledger.family, layer.weight, layer.bias),
            0,
            1 + parts,
        )
        self._parts = parts
        self._step = -1
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(
        self, step: int, keys: np.ndarray, values: np.ndarray, codes: np.ndarray | None = None
    ) -> None:
        """Take rows in the order of their steps.

        Args:
            step: Their number.
            keys: float32 [n, d_in]; kept until the step is complete.
            values: float32 [n, d_out].
            codes: int32 [columns, n], parts that each row belongs to.
        """
        if step != self._step:
            self._take()
            self._step = step
        if codes is None:
            codes = np.empty((0, len(keys)), np.int32)
        self._waiting.append((keys, values.copy(), codes))

    def result(self) -> dict[str, np.ndarray] | None:
        """The sums and the initial part, float64; None where one is not finite."""
        self._take()
        self._run.advance(self._steps)
        found = self._named(self._run.part(0))
        found |= {INITIAL + name: array for name, array in self._named(self._run.initial()).items()}
        return found if all(np.isfinite(array).all() for array in found.values()) else None

    def parts(self) -> list[dict[str, np.ndarray]]:
        """What each part's rows became, float64 by parameter, once `result` was asked for."""
        return [self._named(self._run.part(1 + number)) for number in range(self._parts)]

    def _named(self, affine: Affine) -> dict[str, np.ndarray]:
        found = {self._layer.weight: affine.weight.numpy()}
        if self._layer.bias is not None and affine.bias is not None:
            found[self._layer.bias] = affine.bias.numpy()
        return found

    def _take(self) -> None:
        if not self._waiting:
            return
        keys, values = (
            torch.from_numpy(np.concatenate([rows[which] for rows in self._waiting]))
            for which in (0, 1)
        )
        codes = np.concatenate([codes for _, _, codes in self._waiting], axis=1)
        self._waiting.clear()
        which: list[slice | torch.Tensor | None] = [slice(None)] + [None] * self._parts
        for part, rows in split(codes):
            which[1 + part] = slice(None) if len(rows) == len(keys) else torch.from_numpy(rows)
        with torch.no_grad():
            self._run.take(self._step, keys, values, which)


def split(codes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The parts that some rows belong to.

    Args:
        codes: int32 [columns, rows].

    Returns:
        A part's number, and places of its rows, int64 and ascending.
    """
    for column in codes:
        for code in np.unique(column).tolist():
            yield code, np.flatnonzero(column == code)


class RowSums:
    """What a layer's rows add up to by their coefficients, whole and in parts.

    Args:
        layer, weight, bias: As for `RowSum`.
        parts: How many parts are kept apart beside the whole.
    """

    def __init__(
        self, layer: LayerSpec, weight: Coefficients, bias: Coefficients | None, parts: int = 0
    ) -> None:
        self._layer = layer
        self._whole = RowSum(layer, weight, bias)
        self._parts = [RowSum(layer, weight, bias) for _ in range(parts)]

    def add(
        self, step: int, keys: np.ndarray, values: np.ndarray, codes: np.ndarray | None = None
    ) -> None:
        """Take rows of one step; arguments as for `FollowedSum`."""
        self._whole.add(step, keys, values)
        for part, rows in split(codes) if codes is not None else ():
            self._parts[part].add(step, keys[rows], values[rows])

    def result(self) -> dict[str, np.ndarray] | None:
        """The whole's sums, float64 by parameter; None where one is not finite."""
        return self._whole.result()

    def parts(self) -> list[dict[str, np.ndarray]]:
        """Each part's sums, float64 by parameter, finite or not."""
        return [part.sums() for part in self._parts]


class RowSum:
    """Takes a layer's rows in any order; memory is three weights' in float32.

    Args:
        layer: Whose rows.
        weight: Of every step, for the layer after the last.
        bias: Likewise; None without a bias.
    """

    def __init__(self, layer: LayerSpec, weight: Coefficients, bias: Coefficients | None) -> None:
        self._layer = layer
        self._of_weight, self._of_bias = weight.c, None if bias is None else bias.c
        self._weight = np.zeros((layer.d_out, layer.d_in))
        self._bias = np.zeros(layer.d_out)
        self._product = np.empty((layer.d_out, layer.d_in), np.float32)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, step: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Take rows of one step.

        Args:
            step: Its number.
            keys: float32 [n, d_in]; kept until a tile is full.
            values: float32 [n, d_out].
        """
        with np.errstate(all="ignore"):  # what is not finite leaves no sum, and no word
            if self._of_bias is not None:
                self._bias += self._of_bias[step] * values.sum(axis=0, dtype=np.float64)
            scaled = values * np.float32(self._of_weight[step])
        for first in range(0, len(keys), TILE_ROWS):
            tile = slice(first, first + TILE_ROWS)
            if sum(len(keys) for keys, _ in self._waiting) + len(keys[tile]) > TILE_ROWS:
                self._multiply()
            self._waiting.append((keys[tile], scaled[tile]))

    def result(self) -> dict[str, np.ndarray] | None:
        """The sums, float64, by parameter; None where one is not finite."""
        found = self.sums()
        return found if all(np.isfinite(array).all() for array in found.values()) else None

    def sums(self) -> dict[str, np.ndarray]:
        """Likewise, finite or not."""
        self._multiply()
        found: dict[str, np.ndarray] = {self._layer.weight: self._weight}
        if self._layer.bias is not None:
            found[self._layer.bias] = self._bias
        return found

    def _multiply(self) -> None:
        if not self._waiting:
            return
        keys, values = (
            parts[0] if len(parts) == 1 else np.concatenate(parts)
            for parts in zip(*self._waiting, strict=True)
        )
        self._waiting.clear()
        with np.errstate(all="ignore"):
            np.matmul(values.T, keys, out=self._product)
            self._weight += self._product
