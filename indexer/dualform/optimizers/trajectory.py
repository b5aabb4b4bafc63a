"""Parts of a parameter followed forwards through training; a gradient's effect, backwards.

Forwards, W_T = sum over parts W_T^p: each part takes its own gradient through the transitions of
the whole run. Backwards, `adjoint` collects what all later steps still did with a step's gradient,
so that a row's contribution is its value times a dot product under that metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dualform.optimizers.family import STILL, Factor, Family, Transition, Whole, add_, scale_

FLUSHED = 16
"""After so many steps what a part moved by in float32 is added to its weight."""

_SMALLEST = 1e-3
"""A part's weight is multiplied by its factor before that is smaller."""


class Part:
    """One part of a parameter: what some of the rows, or the initial state, made of it.

    Followed in float32, a part's moves are float32, as training's are, but add up in float64: a
    few steps' moves are small beside the weight, and so is their rounding.

    Attributes:
        momentum: The part's momentum buffer; None while there is nothing in it.
    """

    def __init__(
        self, weight: torch.Tensor, momentum: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """
        Args:
            weight: float64, to be kept; the parameter's shape.
            momentum: Of the dtype.
            dtype: float64 or float32.
        """
        self.momentum = momentum
        self._base = weight
        self._dtype = dtype
        self._moved = weight if dtype == torch.float64 else None
        # The weight is factor * (base + moved): a decay that is a number costs no pass over them.
        self._factor = 1.0
        self._steps = 0

    @property
    def weight(self) -> torch.Tensor:
        """The part's weight, float64, the parameter's shape; only to be read."""
        self._flush()
        self._settle()
        return self._base

    def move(self, transition: Transition, gradient: torch.Tensor | None) -> None:
        """Take a step.

        Args:
            transition: The whole run's.
            gradient: The part's own, of its dtype; None where it has none.
        """
        _, mw, mg, ww, wm, wg = transition
        if self.momentum is None and not (_is_zero(mw) and (gradient is None or _is_zero(mg))):
            self.momentum = torch.zeros_like(self._base, dtype=self._dtype)
        if self.momentum is not None:
            self._gather(self.momentum, transition, gradient)
        self._scale(ww)
        if self.momentum is not None:
            self._add(wm, self.momentum)
        if gradient is not None:
            self._add(wg, gradient)
        self._steps += 1
        if self._steps % FLUSHED == 0:
            self._flush()

    def _gather(
        self, momentum: torch.Tensor, transition: Transition, gradient: torch.Tensor | None
    ) -> None:
        """Take the momentum to the next step, from the weight before it."""
        mm, mw, mg = transition.mm, transition.mw, transition.mg
        averages = isinstance(mm, float) and isinstance(mg, float) and mm + mg == 1.0
        if gradient is not None and averages and _is_zero(mw):
            momentum.lerp_(gradient, mg)
            return
        scale_(momentum, mm)
        if not _is_zero(mw):
            add_(momentum, mw, self.weight.to(self._dtype))
        if gradient is not None:
            add_(momentum, mg, gradient)

    def _scale(self, factor: Factor) -> None:
        if isinstance(factor, torch.Tensor):
            self._flush()
            self._base.mul_(factor)
            return
        self._factor *= factor
        if not _SMALLEST <= self._factor <= 1 / _SMALLEST:
            self._settle()

    def _add(self, factor: Factor, other: torch.Tensor) -> None:
        if _is_zero(factor):
            return
        if self._moved is None:
            self._moved = torch.zeros_like(self._base, dtype=self._dtype)
        if isinstance(factor, torch.Tensor):
            self._moved.addcmul_(factor, other, value=1 / self._factor)
        else:
            self._moved.add_(other, alpha=factor / self._factor)

    def _flush(self) -> None:
        """Add what moved in float32 to the base."""
        if self._moved is not None and self._moved is not self._base:
            self._base.add_(self._moved)
            self._moved.zero_()

    def _settle(self) -> None:
        """Multiply by the factor."""
        if self._factor != 1.0:
            self._base.mul_(self._factor)
            if self._moved is not None and self._moved is not self._base:
                self._moved.mul_(self._factor)
            self._factor = 1.0


def _is_zero(factor: Factor) -> bool:
    return not isinstance(factor, torch.Tensor) and factor == 0.0


class Trajectory:
    """A parameter's whole preconditioner and the parts that follow it, step by step.

    Args:
        family: The optimizer's.
        state: The state to start from: "weight", and the family's buffers by name where they exist
            by then; missing ones are as the optimizer creates them.
        follow: Whether the whole's weight and momentum are needed, as `follows_whole` says of any
            step to come.
        dtype: Of the preconditioner, the momentum buffers and the moves: float64, or float32 as
            training's own; the parts' weights add up in float64.
    """

    def __init__(
        self,
        family: Family,
        state: Mapping[str, torch.Tensor],
        *,
        follow: bool,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.family = family
        self._dtype = dtype
        self._shape = weight = state["weight"]
        self._missing = [name for name in family.buffers if name not in state]
        self.whole: Whole = {
            name: self._copy(state[name]) if name in state else empty
            for name, empty in family.blank(self._zeros(weight)).items()
            if name != family.momentum or follow
        }
        self._follow: Part | None = None
        if follow:
            self._follow = self.start(state)

    def start(self, state: Mapping[str, torch.Tensor]) -> Part:
        """A part that begins with a state: the initial one, whose gradient is always None."""
        momentum = self.family.momentum
        there = None if momentum is None else state.get(momentum)
        weight = state["weight"].detach().to(torch.float64, copy=True)
        return Part(weight, None if there is None else self._copy(there), self._dtype)

    def empty(self) -> Part:
        """A part that begins with nothing."""
        zeros = torch.zeros_like(self._shape, dtype=torch.float64)
        return Part(zeros, None, self._dtype)

    def step(
        self,
        settings: Any,
        first: bool,
        gradient: torch.Tensor,
        parts: Sequence[tuple[Part, torch.Tensor | None]],
    ) -> Transition:
        """Take one step in which the parameter took part.

        Args:
            settings: The ledger's.
            first: The momentum buffer was created at this step.
            gradient: The whole's, as the optimizer found it.
            parts: Each with its own gradient, or None where it has none.

        Returns:
            The step's transition.
        """
        self._create(settings)
        if self._follow is not None:
            self.whole["weight"] = self._follow.weight.to(self._dtype)
            buffer, momentum = self.family.momentum, self._follow.momentum
            if buffer is not None:
                self.whole[buffer] = self._zeros(self._shape) if momentum is None else momentum
        transition = self.family.transition(settings, first, self.whole, gradient)
        if self._follow is not None:
            self._follow.move(transition, gradient)
        for part, gradient_of_part in parts:
            part.move(transition, gradient_of_part)
        return transition

    def run(
        self, settings: Sequence[Any], firsts: Sequence[bool], gradients: torch.Tensor
    ) -> list[Transition]:
        """Take steps one after another, without parts.

        Args:
            settings, firsts: Of each, as for `step`.
            gradients: The whole's, [steps, ...]; they may be overwritten.

        Returns:
            Their transitions.
        """
        if self._follow is not None or not settings:
            each = zip(settings, firsts, gradients, strict=True)
            return [self.step(one, first, gradient, ()) for one, first, gradient in each]
        self._create(settings[0])
        return self.family.transitions(settings, firsts, self.whole, gradients)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds of the whole run, about."""
        followed = 0 if self._follow is None else 3 * self._shape.nbytes
        return sum(t.nbytes for t in self.whole.values()) + self._shape.nbytes + followed

    def _create(self, settings: Any) -> None:
        """Before the first step: fill the buffers that are not there as the optimizer does."""
        if self._missing:
            fresh = self.family.fresh(settings)
            for name in fresh.keys() & self._missing:
                self.whole[name].fill_(fresh[name])
            self._missing = []

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._dtype, copy=True)

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self._dtype, device=like.device)


def adjoint(
    transitions: Iterable[Transition], weight: Factor = 1.0, momentum: Factor = 0.0
) -> tuple[list[Factor], Factor, Factor]:
    """How much of each step's gradient is in p W_T + r m_T, backwards through the steps.

    Args:
        transitions: Of the steps, the last one first; `STILL` where the parameter took no part.
        weight: p, what of the final weight is wanted.
        momentum: r, likewise of the momentum buffer.

    Returns:
        The factors of each step's gradient, the last step first; and those of the weight and of the
        momentum buffer before the first step.
    """
    p, r = weight, momentum
    factors: list[Factor] = []
    for t in transitions:
        if t is STILL:
            factors.append(0.0)
            continue
        later = _plus(r, _times(p, t.wm))
        factors.append(_plus(_times(p, t.wg), _times(later, t.mg)))
        p, r = _plus(_times(p, t.ww), _times(later, t.mw)), _times(later, t.mm)
    return factors, p, r


@dataclass(frozen=True)
class Later:
    """What steps to come still make of a weight and its momentum buffer, W and m: of the final
    weight they are `weight * W + decay * momentum * m`.

    Attributes:
        weight, momentum: Factors.
        decay: A number that is multiplied last.
    """

    weight: Factor = 1.0
    momentum: Factor = 0.0
    decay: float = 1.0


def gradient_factors(transitions: Sequence[Transition], shape: Sequence[int]) -> torch.Tensor:
    """How much of each step's gradient is in the final weight: float64 [steps, *shape].

    Args:
        transitions: Of the steps, the first one first; `STILL` where the parameter took no part.
        shape: The parameter's.
    """
    return factors_before(transitions, shape, Later(), by_momentum(transitions))[0]


def factors_before(
    transitions: Sequence[Transition], shape: Sequence[int], later: Later, alone: bool
) -> tuple[torch.Tensor, Later]:
    """Likewise of steps after which others come; and what all of these make of what was before.

    Args:
        transitions, shape: As for `gradient_factors`.
        later: What the steps after these make.
        alone: All steps, also those after and before these, are `by_momentum`: the same numbers
            come of one call for all steps as of several, one after another.
    """
    out = torch.zeros((len(transitions), *shape), dtype=torch.float64)
    rows = out.unbind()
    if not alone:
        factors, p, r = adjoint(reversed(transitions), later.weight, later.momentum)
        for row, factor in zip(rows, reversed(factors), strict=True):
            row.add_(factor)
        return out, Later(p, r)
    # `adjoint` where the weight moves by the momentum alone: its p is a number, and its
    # later = r + p wm a recurrence with one operation a step.
    weight, decay, after = float(later.weight), later.decay, later.momentum
    for row, (mm, _, _, ww, wm, _) in zip(reversed(rows), reversed(transitions), strict=True):
        row.add_(wm, alpha=weight)
        if isinstance(after, torch.Tensor):
            row.add_(after, alpha=decay)
        weight, decay, after = weight * float(ww), float(mm), row
    before = Later(weight, after.clone() if isinstance(after, torch.Tensor) else after, decay)
    scales = out.new_tensor([t.mg for t in transitions])
    return out.mul_(scales.reshape(-1, *[1] * len(shape))), before


def by_momentum(transitions: Sequence[Transition]) -> bool:
    """Whether gradients reach the weight through the momentum alone, and numbers do the rest."""
    return all(map(_by_momentum, transitions))


def _by_momentum(t: Transition) -> bool:
    """Whether gradients reach the weight through the momentum alone, and numbers do the rest."""
    numbers = all(not isinstance(factor, torch.Tensor) for factor in (t.mm, t.mg, t.ww))
    return numbers and _is_zero(t.mw) and _is_zero(t.wg)


def _plus(a: Factor, b: Factor) -> Factor:
    return b if _is_zero(a) else a if _is_zero(b) else a + b


def _times(a: Factor, b: Factor) -> Factor:
    return 0.0 if _is_zero(a) or _is_zero(b) else a * b
