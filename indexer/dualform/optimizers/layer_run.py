"""A layer followed through its training: the whole's preconditioner, and the parts of its weights.

Rows are handed over step by step, in the order of the steps; steps between without rows are taken
with a gradient of zero, or not at all where the ledger says that the parameter took no part.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dualform.optimizers.family import Family
from dualform.optimizers.trajectory import Part, Trajectory

PRODUCT_ROWS = 2048
"""Rows of one float32 product of values and keys: training's own products are as long."""


class Row(Protocol):
    """What is read of a ledger's row."""

    @property
    def settings(self) -> Any: ...
    @property
    def scale(self) -> float: ...
    @property
    def took_part(self) -> bool: ...
    @property
    def first(self) -> bool: ...


@dataclass(frozen=True)
class Affine:
    """A part of a layer: what it adds to an output is `weight @ x + bias`.

    Attributes:
        weight: float64 [d_out, d_in].
        bias: float64 [d_out]; None for a layer without.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class ParameterRun:
    """One parameter's trajectory from some step on, and its parts.

    Args:
        family: The optimizer's.
        rows: The parameter's ledger, one row a step, from step 0.
        state: "weight" and the buffers at the start.
        start: After how many steps that was.
        parts: How many parts gather rows.
        dtype: As for `Trajectory`.
    """

    def __init__(
        self,
        family: Family,
        rows: Sequence[Row],
        state: Mapping[str, torch.Tensor],
        start: int,
        parts: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        later = rows[start:]
        follow = any(family.follows_whole(row.settings) for row in later if row.took_part)
        self._rows = rows
        self._step = start
        self._trajectory = Trajectory(family, state, follow=follow, dtype=dtype)
        self._dtype = dtype
        self._zeros = torch.zeros((), dtype=dtype).expand(state["weight"].shape)
        self.initial = self._trajectory.start(state)
        self.parts = [self._trajectory.empty() for _ in range(parts)]

    def add_part(self) -> None:
        """One more part, which had no rows so far."""
        self.parts.append(self._trajectory.empty())

    def go_on(self, rows: Sequence[Row]) -> None:
        """Later steps have been taken: the parameter's ledger, which begins with what it was."""
        self._rows = rows

    def copied(self) -> ParameterRun:
        """Another that goes its own way from here."""
        shared = (self._rows, self._trajectory.family)
        return copy.deepcopy(self, {id(each): each for each in shared})

    @property
    def scale(self) -> float:
        """What products of values and keys are multiplied with to be the next step's gradient; 0
        where the parameter takes no part in that step."""
        row = self._rows[self._step]
        return -row.scale if row.took_part else 0.0

    def advance(self, step: int) -> None:
        """Take all steps before this one, in which no rows came, with gradients of zero."""
        while self._step < step:
            self.take(self._zeros, [None] * len(self.parts))

    def take(self, gradient: torch.Tensor, of_parts: Sequence[torch.Tensor | None]) -> None:
        """Take the next step.

        Args:
            gradient: What all rows of the step add up to, times `scale`: floating.
            of_parts: Likewise of each part's rows; None where it has none.
        """
        row = self._rows[self._step]
        self._step += 1
        if not row.took_part:
            return
        whole = gradient.to(self._dtype)
        parts: list[tuple[Part, torch.Tensor | None]] = [(self.initial, None)]
        for part, of_part in zip(self.parts, of_parts, strict=True):
            if of_part is not None:
                of_part = whole if of_part is gradient else of_part.to(self._dtype)
            parts.append((part, of_part))
        self._trajectory.step(row.settings, row.first, whole, parts)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The whole's preconditioner as it is now."""
        return self._trajectory.whole


class LayerRun:
    """A layer's weight and bias, followed together.

    Args:
        family: The optimizer's.
        weight: The weight's ledger, from step 0.
        bias: The bias's; None for a layer without.
        state: Of both, by "weight" and "bias": "weight" (the parameter) and buffers of each.
        start: After how many steps that was.
        parts: How many parts gather rows.
    """

    def __init__(
        self,
        family: Family,
        weight: Sequence[Row],
        bias: Sequence[Row] | None,
        state: Mapping[str, Mapping[str, torch.Tensor]],
        start: int,
        parts: int,
    ) -> None:
        self._family, self._numbers = family, state["weight"]["weight"].numel()
        # Training's own precision: a weight's moves are float32 there too, and it takes a third of
        # the time. A bias costs nothing.
        dtype = torch.float32 if family.single else torch.float64
        self._weight = ParameterRun(family, weight, state["weight"], start, parts, dtype)
        self._bias = None
        if bias is not None:
            self._bias = ParameterRun(family, bias, state["bias"], start, parts)

    def take(
        self,
        step: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        parts: Sequence[slice | torch.Tensor | None],
    ) -> None:
        """Take a step with all of its rows.

        Args:
            step: Its number, larger than any before.
            keys: float32 [n, d_in].
            values: float32 [n, d_out].
            parts: Which of the rows each part has, as an index into them; None for none.
        """
        self.advance(step)
        self._weight.take(*_gradients(keys, values, parts, self._weight.scale))
        if self._bias is not None:
            scaled = values.double() * self._bias.scale
            total = scaled.sum(0)
            sums = [None if p is None else _rows(scaled, p).sum(0) for p in parts]
            self._bias.take(total, sums)

    def advance(self, step: int) -> None:
        """Take all steps before this one, in which no rows came."""
        self._weight.advance(step)
        if self._bias is not None:
            self._bias.advance(step)

    def bytes_with(self, parts: int) -> int:
        """Memory that it takes with so many parts."""
        return followed_bytes(self._family, self._numbers, parts)

    def go_on(self, weight: Sequence[Row], bias: Sequence[Row] | None) -> None:
        """Later steps have been taken: the ledgers, which begin with what they were. They must ask
        for nothing of the run that those did not (`follows_whole`)."""
        self._weight.go_on(weight)
        if self._bias is not None and bias is not None:
            self._bias.go_on(bias)

    def copied(self) -> LayerRun:
        """Another that goes its own way from here."""
        other = copy.copy(self)
        other._weight = self._weight.copied()
        other._bias = None if self._bias is None else self._bias.copied()
        return other

    def add_part(self) -> None:
        """One more part, which had no rows so far; parts are numbered as they come."""
        self._weight.add_part()
        if self._bias is not None:
            self._bias.add_part()

    def initial(self) -> Affine:
        """What the state at the start became."""
        return Affine(
            self._weight.initial.weight, None if self._bias is None else self._bias.initial.weight
        )

    def part(self, number: int) -> Affine:
        """What a part's rows became."""
        bias = None if self._bias is None else self._bias.parts[number].weight
        return Affine(self._weight.parts[number].weight, bias)


def followed_bytes(family: Family, numbers: int, parts: int) -> int:
    """Memory that following a parameter takes.

    Args:
        family: The optimizer's.
        numbers: How many elements the parameter has.
        parts: How many parts gather rows.
    """
    size = 4 if family.single else 8
    # The whole's buffers, the initial part's moves, the gradients of the whole and of a part, a
    # factor; and float64 weights of every part, with their moves and their momentum.
    whole = 8 + (len(family.buffers) + 4) * size
    return numbers * (whole + parts * (8 + 2 * size))


def products(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum e (x) x over rows: float32 products as training's, many rows' added up in float64.

    float32 as a gradient is: a sum that is too small for it is zero there too.

    Args:
        keys: float32 [n, d_in].
        values: float32 [n, d_out].

    Returns:
        float32 [d_out, d_in].
    """
    first = values[:PRODUCT_ROWS].T @ keys[:PRODUCT_ROWS]
    if len(keys) <= PRODUCT_ROWS:
        return first
    total = first.double()
    for start in range(PRODUCT_ROWS, len(keys), PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        total += values[rows].T @ keys[rows]
    return total.float()


def _gradients(
    keys: torch.Tensor,
    values: torch.Tensor,
    parts: Sequence[slice | torch.Tensor | None],
    scale: float,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The gradient of all rows of a step, and of those of each part; arguments as for `take`."""
    scaled = values * scale
    whole = products(keys, scaled)

    def of_part(part: slice | torch.Tensor) -> torch.Tensor:
        if _is_all(part, len(keys)):
            return whole
        if not isinstance(part, torch.Tensor) or 2 * len(part) <= len(keys):
            return products(_rows(keys, part), _rows(scaled, part))
        left_out = torch.ones(len(keys), dtype=torch.bool)
        left_out[part] = False
        others = left_out.nonzero()[:, 0]
        rest = products(_rows(keys, others), _rows(scaled, others))
        return torch.sub(whole, rest, out=rest)

    return whole, [None if part is None else of_part(part) for part in parts]


def _rows(tensor: torch.Tensor, which: slice | torch.Tensor) -> torch.Tensor:
    """Some of the rows of a matrix."""
    return tensor[which] if isinstance(which, slice) else torch.index_select(tensor, 0, which)


def _is_all(part: slice | torch.Tensor, rows: int) -> bool:
    return isinstance(part, slice) and part.indices(rows) == (0, rows, 1)


def layer_state(
    state: Mapping[str, Any], family: Family, weight: str, bias: str | None
) -> dict[str, dict[str, torch.Tensor]]:
    """A stored state as `LayerRun` takes it.

    Args:
        state: Tensors or arrays by name: parameters, and "<buffer>:<parameter>".
        family: Whose buffers.
        weight, bias: Names of the parameters.
    """

    def of_parameter(parameter: str) -> dict[str, torch.Tensor]:
        found = {"weight": _tensor(state[parameter])}
        for buffer in family.buffers:
            if f"{buffer}:{parameter}" in state:
                found[buffer] = _tensor(state[f"{buffer}:{parameter}"])
        return found

    return {
        "weight": of_parameter(weight),
        **({} if bias is None else {"bias": of_parameter(bias)}),
    }


def _tensor(value: Any) -> torch.Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
