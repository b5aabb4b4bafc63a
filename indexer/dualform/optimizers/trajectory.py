"""Parts of a parameter followed forwards through training; a gradient's effect, backwards.

Forwards, W_T = sum over parts W_T^p: each part takes its own gradient through the transitions of
the whole run. Backwards, `adjoint` collects what all later steps still did with a step's gradient,
so that a row's contribution is its value times a dot product under that metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dualform.optimizers.family import STILL, Factor, Family, Transition, Whole, moved


class Part:
    """One part of a parameter: what some of the rows, or the initial state, made of it.

    Attributes:
        weight: float64, the parameter's shape.
        momentum: Likewise; None in a family without.
    """

    def __init__(self, weight: torch.Tensor, momentum: torch.Tensor | None) -> None:
        self.weight = weight
        self.momentum = momentum


class Trajectory:
    """A parameter's whole preconditioner and the parts that follow it, step by step.

    Args:
        family: The optimizer's.
        state: The state to start from: "weight", and the family's buffers by name where they exist
            by then; missing ones are as the optimizer creates them.
        follow: Whether the whole's weight and momentum are needed, as `follows_whole` says of any
            step to come.
        dtype: In which everything is computed.
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
        weight = state["weight"]
        self._missing = [name for name in family.buffers if name not in state]
        self.whole: Whole = {
            name: self._copy(state[name]) if name in state else empty
            for name, empty in family.blank(self._zeros(weight)).items()
            if name != family.momentum or follow
        }
        self._follow: Part | None = None
        if follow:
            self._follow = self.start(state)
            self.whole["weight"] = self._follow.weight
            if family.momentum is not None and self._follow.momentum is not None:
                self.whole[family.momentum] = self._follow.momentum
        self._shape = weight

    def start(self, state: Mapping[str, torch.Tensor]) -> Part:
        """A part that begins with a state: the initial one, whose gradient is always None."""
        own = self.family.momentum
        if own is None:
            return Part(self._copy(state["weight"]), None)
        there = state.get(own)
        momentum = self._zeros(state["weight"]) if there is None else self._copy(there)
        return Part(self._copy(state["weight"]), momentum)

    def empty(self) -> Part:
        """A part that begins with nothing."""
        own = self.family.momentum
        zeros = self._zeros(self._shape)
        return Part(zeros, None if own is None else torch.zeros_like(zeros))

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
        if self._missing:
            fresh = self.family.fresh(settings)
            for name in fresh.keys() & self._missing:
                self.whole[name].fill_(fresh[name])
            self._missing = []
        transition = self.family.transition(settings, first, self.whole, gradient)
        if self._follow is not None:
            moved(transition, self._follow.weight, self._follow.momentum, gradient)
        for part, own in parts:
            moved(transition, part.weight, part.momentum, own)
        return transition

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
        later = r + p * t.wm
        factors.append(p * t.wg + later * t.mg)
        p, r = p * t.ww + later * t.mw, later * t.mm
    return factors, p, r
