"""What a layer's rows add up to with the trained layer's coefficients (docs/decisions/0008).

    sum c_t e_t (x) x_t    and, for the bias,    sum c'_t e_t

Rows are multiplied in float32, few at a time, and the products added in float64: contributions
cancel, so that what one long float32 sum loses is large beside the result.

Rows come shard by shard, and a sum can be gone on with where training was: with momentum or decay
c_t depends on the last step, so what is kept is the sum and its momentum buffer as they are after
the step of the shard's last row, and the ledger takes both on from there. So a sum is the same,
bit for bit, whether the steps after a shard were known when it was added or not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from dualform.index.errors import BuildError
from dualform.optimizers import Affine, Family, LayerRun, followed_bytes, layer_state
from dualform.store.index import INITIAL
from dualform.store.ledger import Ledger
from dualform.store.recording import LayerSpec

TILE_ROWS = 128
"""Rows of one float32 product; fewer passes wait for one another."""

_SCALAR_BYTES = 16
"""Of a number of a `RowSum`: itself and its momentum, in float64."""

_SCRATCH_BYTES = 12
"""Of a number of a layer, for all of its sums: a float32 product, and its multiple in float64."""


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
        return numbers * ((1 + parts) * _SCALAR_BYTES + _SCRATCH_BYTES)
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

    def begin(self, first: int, end: int) -> None:
        """Rows of steps [first, end) come next; they are followed whatever they are."""

    def go_on(self, ledger: Ledger) -> None:
        """Later steps have been taken: their ledger, which begins with what was known."""
        layer = self._layer
        self._steps = ledger.steps
        self._run.go_on(
            ledger.parameters[layer.weight],
            None if layer.bias is None else ledger.parameters[layer.bias],
        )

    def copied(self) -> FollowedSum:
        """Another that goes its own way from here."""
        other = copy.copy(self)
        other._run, other._waiting = self._run.copied(), list(self._waiting)
        return other

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
        # In torch's own memory: how numbers are aligned decides, with some libraries, in which
        # order they are added up.
        keys, values = (
            torch.from_numpy(np.concatenate([rows[which] for rows in self._waiting])).clone()
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
        layer: Whose rows.
        ledger: What the optimizer did.
        parts: How many parts are kept apart beside the whole.
    """

    def __init__(self, layer: LayerSpec, ledger: Ledger, parts: int = 0) -> None:
        scratch = _Scratch(layer)
        self._layer, self._ledger = layer, ledger
        self._at = 0
        self._whole = RowSum(layer, scratch)
        self._parts = [RowSum(layer, scratch) for _ in range(parts)]

    def begin(self, first: int, end: int) -> None:
        """Rows of steps [first, end) come next: a shard's, or some of them.

        Args:
            first: Not before the last step that rows came of.
            end: The step after the last row's.
        """
        chunk = self._chunk(first, max(end, self._at))
        for each in (self._whole, *self._parts):
            each.begin(chunk)

    def go_on(self, ledger: Ledger) -> None:
        """Later steps have been taken: their ledger, which begins with what was known."""
        self._ledger = ledger

    def copied(self) -> RowSums:
        """Another that goes its own way from here."""
        other = copy.copy(self)
        other._whole = self._whole.copied()
        other._parts = [part.copied() for part in self._parts]
        return other

    def add(
        self, step: int, keys: np.ndarray, values: np.ndarray, codes: np.ndarray | None = None
    ) -> None:
        """Take rows of one step; arguments as for `FollowedSum`."""
        self._whole.add(step, keys, values)
        for part, rows in split(codes) if codes is not None else ():
            self._parts[part].add(step, keys[rows], values[rows])

    def result(self) -> dict[str, np.ndarray] | None:
        """The whole's sums, float64 by parameter; None where one is not finite."""
        self.begin(self._ledger.steps, self._ledger.steps)
        found = self._whole.sums()
        return found if all(np.isfinite(array).all() for array in found.values()) else None

    def parts(self) -> list[dict[str, np.ndarray]]:
        """Each part's sums, float64 by parameter, finite or not, once `result` was asked for."""
        return [part.sums() for part in self._parts]

    def _chunk(self, first: int, end: int) -> Chunk:
        layer, at, self._at = self._layer, self._at, end
        weight = _way(self._ledger, layer.weight, at, first, end)
        bias = None if layer.bias is None else _way(self._ledger, layer.bias, at, first, end)
        return Chunk(first, weight, bias)


class Way(NamedTuple):
    """How a parameter's sum W and its momentum buffer m get to the end of a chunk.

    Attributes:
        carried: What W becomes of the W and m before, and what m does: W = p W + r m, and so on.
        c: float64 [steps], the factor in W of what the chunk's rows of each step add.
        d: Likewise in m.
    """

    carried: tuple[tuple[float, float], tuple[float, float]]
    c: np.ndarray
    d: np.ndarray


class Chunk(NamedTuple):
    """Rows of some steps, and the ways of weight and bias to the last of these."""

    first: int
    weight: Way
    bias: Way | None


def _way(ledger: Ledger, parameter: str, at: int, first: int, end: int) -> Way:
    """From the pair after `at` steps, with rows of steps [first, end), to that after `end`."""
    pairs = [
        (coefficients(parameter, end, at), coefficients(parameter, end, first))
        for coefficients in (ledger.coefficients, ledger.momentum_coefficients)
    ]
    (w, c), (m, d) = pairs
    return Way(((w.p, w.r), (m.p, m.r)), c.c, d.c)


class _Pair:
    """A parameter's sum, and its momentum buffer where one has anything."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.sum = np.zeros(shape)
        self.momentum: np.ndarray | None = None

    def copied(self) -> _Pair:
        other = copy.copy(self)
        other.sum = self.sum.copy()
        other.momentum = None if self.momentum is None else self.momentum.copy()
        return other

    def carry(self, way: Way) -> None:
        """Go to the end of the chunk whose rows come next."""
        ((p, r), (q, s)), momentum = way.carried, self.momentum
        if momentum is None and (q or way.d.any()):
            momentum = self.momentum = np.zeros_like(self.sum)
        if momentum is not None:
            later = q * self.sum if q else 0.0
            self.momentum = s * momentum + later
            momentum *= r
        if p != 1.0:
            self.sum *= p
        if momentum is not None and r:
            self.sum += momentum


class _Scratch:
    """Memory for products, of all sums of a layer."""

    def __init__(self, layer: LayerSpec) -> None:
        self.product = np.empty((layer.d_out, layer.d_in), np.float32)
        self.multiple = np.empty((layer.d_out, layer.d_in))


class RowSum:
    """Takes a layer's rows chunk by chunk, within a chunk in any order.

    Args:
        layer: Whose rows.
        scratch: For its products; shared with others of the same thread.
    """

    def __init__(self, layer: LayerSpec, scratch: _Scratch | None = None) -> None:
        self._layer = layer
        self._weight = _Pair((layer.d_out, layer.d_in))
        self._bias = _Pair((layer.d_out,))
        self._scratch = scratch or _Scratch(layer)
        self._chunk: Chunk | None = None
        self._waiting: list[tuple[int, np.ndarray, np.ndarray]] = []

    def begin(self, chunk: Chunk) -> None:
        """The rows of a chunk come next."""
        self._multiply()
        self._chunk = chunk
        with np.errstate(all="ignore"):
            self._weight.carry(chunk.weight)
            if chunk.bias is not None:
                self._bias.carry(chunk.bias)

    def copied(self) -> RowSum:
        """Another that goes its own way from here."""
        other = copy.copy(self)
        other._weight, other._bias = self._weight.copied(), self._bias.copied()
        other._waiting = list(self._waiting)
        return other

    def add(self, step: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Take rows of one step.

        Args:
            step: Its number, one of the chunk's.
            keys: float32 [n, d_in]; kept until a tile is full.
            values: float32 [n, d_out]; likewise.
        """
        assert self._chunk is not None
        if (bias := self._chunk.bias) is not None:
            with np.errstate(all="ignore"):  # what is not finite leaves no sum, and no word
                total, place = values.sum(axis=0, dtype=np.float64), step - self._chunk.first
                self._bias.sum += bias.c[place] * total
                if self._bias.momentum is not None:
                    self._bias.momentum += bias.d[place] * total
        for first in range(0, len(keys), TILE_ROWS):
            tile = slice(first, first + TILE_ROWS)
            if sum(len(keys) for _, keys, _ in self._waiting) + len(keys[tile]) > TILE_ROWS:
                self._multiply()
            self._waiting.append((step, keys[tile], values[tile]))

    def sums(self) -> dict[str, np.ndarray]:
        """The sums, float64, by parameter, finite or not."""
        self._multiply()
        found: dict[str, np.ndarray] = {self._layer.weight: self._weight.sum}
        if self._layer.bias is not None:
            found[self._layer.bias] = self._bias.sum
        return found

    def _multiply(self) -> None:
        if not self._waiting:
            return
        assert self._chunk is not None
        way, first = self._chunk.weight, self._chunk.first
        steps = [step - first for step, _, _ in self._waiting]
        keys, values = (
            parts[0] if len(parts) == 1 else np.concatenate(parts)
            for parts in list(zip(*self._waiting, strict=True))[1:]
        )
        counts = [len(keys) for _, keys, _ in self._waiting]
        self._waiting.clear()
        pairs = [(self._weight.sum, way.c)]
        if self._weight.momentum is not None:
            pairs.append((self._weight.momentum, way.d))
        with np.errstate(all="ignore"):
            if len(pairs) > 1 and len(set(steps)) == 1:
                self._add_multiples(keys, values, [(total, c[steps[0]]) for total, c in pairs])
                return
            for total, factors in pairs:
                of_rows = np.repeat(factors[steps].astype(np.float32), counts)
                product = self._scratch.product
                np.matmul((values * of_rows[:, None]).T, keys, out=product)
                total += product

    def _add_multiples(
        self, keys: np.ndarray, values: np.ndarray, totals: list[tuple[np.ndarray, float]]
    ) -> None:
        """Rows of one step: one product serves the sum and the momentum."""
        product, multiple = self._scratch.product, self._scratch.multiple
        np.matmul(values.T, keys, out=product)
        for total, factor in totals:
            np.multiply(product, factor, out=multiple)
            total += multiple
