"""Do the rows between two stored states lead from one to the other? All of them in one pass.

From the pair (W, m) of one state, the rows up to the next must rebuild its W and its m, in float64.
Weights and their buffers are compared by their products with random directions, the same for both
sides: |D V| estimates |D| in the Frobenius norm (exactly where keys are no longer than there are
directions), and costs a small part of a product with whole keys. Biases are compared whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from dualform.engine.totals.coefficients import left_behind
from dualform.store.ledger import Coefficients, Ledger

if TYPE_CHECKING:
    from dualform.engine.memory.layer import Layer
    from dualform.engine.memory.tiles import Tile


class HasStates(Protocol):
    """An opened index, as far as intervals need it."""

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    @property
    def ledger(self) -> Ledger:
        """What the optimizer did."""

    def state(
        self, layer: str, which: Literal["initial", "final", "rebuilt"] | int
    ) -> dict[str, np.ndarray] | None:
        """A layer's stored tensors."""


DIRECTIONS = 32
"""With so many, the estimate is within a fifth of the norm most of the time, whatever D."""

_FLOAT32_UNIT = 2.0**-24

State = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BadInterval:
    """Steps whose rows do not lead from one stored state to the next.

    Attributes:
        first, last: After so many steps the two states were.
        what: The weight, bias or momentum buffer that differs.
        error: The difference, relative to the way between the two states, for a momentum buffer to
            the larger of the two; or to the root of the terms' squares where that is larger.
    """

    first: int
    last: int
    what: str
    error: float


class IntervalCheck:
    """Takes a layer's rows in order of their steps, tile by tile, and checks every stored state.

    Memory: two states, and little for the intervals that one shard has rows of.

    Args:
        index: Which has the states and the ledger.
        layer: Whose rows.
        final: Check the state after the last step too.
        up_to: States after more steps are left alone.
        tolerance: Relative error that training's float32 may leave.

    Attributes:
        last_step: Rows of this step and of later ones are not looked at.
        bad: The first interval that does not add up, once `finish` was called; None if all do.
    """

    def __init__(
        self, index: HasStates, layer: Layer, *, final: bool, up_to: int, tolerance: float
    ) -> None:
        self._index, self._layer, self._tolerance = index, layer, tolerance
        manifest = layer.manifest
        self._states: list[tuple[int, Literal["initial", "final"] | int]] = [(0, "initial")]
        self._states += [(step, step) for step, _ in manifest.states if step <= up_to]
        if final and self._states[-1][0] < index.steps:
            self._states.append((index.steps, "final"))
        self._bounds = np.array([step for step, _ in self._states])
        self.last_step = int(self._bounds[-1])
        self.bad: BadInterval | None = None
        self._directions = _directions(manifest.d_in)
        self._sums: dict[int, list[_Sum]] = {}
        self._next = 0
        self._before: State | None = None
        self._shard = -1

    def add(self, tile: Tile) -> None:
        """Take a tile with values; tiles come shard by shard."""
        space = self._layer.space
        shard = int(np.searchsorted(space.starts, tile.positions[0], side="right")) - 1
        if shard != self._shard:
            self._shard = shard
            earliest = space.steps[space.starts[shard] : space.starts[shard + 1]].min()
            self._finish_before(int(earliest))
        assert tile.values is not None
        keys = tile.keys.double() @ self._directions
        values = tile.values.double()
        steps = space.steps[tile.positions]
        place = np.searchsorted(self._bounds, steps, side="right") - 1
        for number in np.unique(place[place < len(self._bounds) - 1]).tolist():
            inside = np.flatnonzero(place == number)
            which = torch.from_numpy(inside)
            offsets = steps[inside] - self._bounds[number]
            for total in self._sums_of(number):
                total.add(keys[which], values[which], offsets)

    def finish(self) -> None:
        """Check what is left; `bad` is known after."""
        self._finish_before(self._index.steps)

    def _finish_before(self, step: int) -> None:
        """Check the intervals that have no rows from this step on."""
        while self._next < len(self._states) - 1 and self._bounds[self._next + 1] <= step:
            number = self._next
            self._next += 1
            sums = self._sums_of(number)
            del self._sums[number]
            if self.bad is None:
                self._compare(number, sums)

    def _compare(self, number: int, sums: list[_Sum]) -> None:
        before = self._before or self._state(number)
        after = self._before = self._state(number + 1)
        first, last = int(self._bounds[number]), int(self._bounds[number + 1])
        rounding = (last - first) * _FLOAT32_UNIT
        for total in sums:
            weight, buffer = total.parameter, f"momentum:{total.parameter}"
            none = np.zeros_like(before[weight])
            name = buffer if total.momentum else weight
            a, b = (state.get(name, none).astype(np.float64) for state in (before, after))
            size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
            # The way may be short because terms cancel: errors are relative to the terms, then.
            m = float(np.linalg.norm(before.get(buffer, none).astype(np.float64)))
            terms = math.hypot(total.coefficients.r * m, math.sqrt(total.squares))
            way = max(size if total.momentum else float(np.linalg.norm(b - a)), terms)
            rest = torch.from_numpy(left_behind(before, weight, total.coefficients) - b)
            if rest.ndim == 2:
                rest = rest @ self._directions
            difference = float(torch.linalg.vector_norm(rest + total.sum))
            if not difference <= self._tolerance * way + rounding * size:
                error = difference / way if way > 0 else float("inf")
                self.bad = BadInterval(first, last, name, error)
                return

    def _state(self, number: int) -> State:
        state = self._index.state(self._layer.name, self._states[number][1])
        assert state is not None
        return state

    def _sums_of(self, number: int) -> list[_Sum]:
        """The interval's sums: of the weight and the bias, and of their momentum buffers."""
        if number not in self._sums:
            manifest, ledger = self._layer.manifest, self._index.ledger
            first, last = int(self._bounds[number]), int(self._bounds[number + 1])
            width = self._directions.shape[1]
            sums = []
            for parameter, shape in (
                (manifest.weight, (manifest.d_out, width)),
                (manifest.bias, (manifest.d_out,)),
            ):
                if parameter is not None:
                    plain = ledger.coefficients(parameter, last, first)
                    buffer = ledger.momentum_coefficients(parameter, last, first)
                    sums.append(_Sum(parameter, False, plain, shape))
                    sums.append(_Sum(parameter, True, buffer, shape))
            self._sums[number] = sums
        return self._sums[number]


class _Sum:
    """sum c_t E_t V of one parameter, or sum c_t e_t of a bias."""

    def __init__(
        self, parameter: str, momentum: bool, coefficients: Coefficients, shape: tuple[int, ...]
    ) -> None:
        self.parameter = parameter
        self.momentum = momentum
        self.coefficients = coefficients
        self.sum = torch.zeros(shape, dtype=torch.float64)
        self.squares = 0.0  # of the terms' lengths, row by row
        self._none = not coefficients.c.any()

    def add(self, keys: torch.Tensor, values: torch.Tensor, offsets: np.ndarray) -> None:
        if self._none:
            return
        c = torch.from_numpy(self.coefficients.c[offsets])
        lengths = torch.linalg.vector_norm(values, dim=1) * c
        if self.sum.ndim == 2:
            lengths *= torch.linalg.vector_norm(keys, dim=1)
        self.squares += float(lengths @ lengths)
        if self.sum.ndim == 1:
            self.sum.addmv_(values.T, c)
        else:
            self.sum.addmm_(values.T, keys * c[:, None])


def _directions(d_in: int) -> torch.Tensor:
    """float64 [d_in, m], the same every time, so that reports are."""
    if d_in <= DIRECTIONS:
        return torch.eye(d_in, dtype=torch.float64)
    random = np.random.default_rng(0)
    return torch.from_numpy(random.standard_normal((d_in, DIRECTIONS)) / DIRECTIONS**0.5)
