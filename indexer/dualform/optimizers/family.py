"""What every optimizer family says of itself: how a step is read, and how parts of a weight move.

An optimizer is *linear given its preconditioner*: once the tensors that depend on the whole run
(second moments, trust ratios) are fixed, its update is linear in the gradients seen so far. Then
for any split of the rows into parts, the trained weight is the sum of the parts' weights, each of
which follows the optimizer's own recursion with the part's gradient in place of the whole's
(docs/dual-form.md, *Every optimizer*).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

Factor: TypeAlias = "float | torch.Tensor"
"""A number for the whole parameter, or one for each of its elements."""

Whole: TypeAlias = "dict[str, torch.Tensor]"
"""The whole run's state of a parameter before a step: "weight", and the family's buffers by name;
"weight" and the momentum buffer only where `Family.follows_whole` asks for them."""


class Transition(NamedTuple):
    """How (W, m) of a part moves at one step, given its gradient g:

        m' = mm m + mw W + mg g        W' = ww W + wm m' + wg g

    In torch's order of operations: the momentum buffer first, then the weight from the new buffer.
    """

    mm: Factor
    mw: Factor
    mg: Factor
    ww: Factor
    wm: Factor
    wg: Factor


STILL = Transition(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
"""A step in which the parameter took no part: nothing moves."""


class Settings(Protocol):
    """A family's settings at a step: a NamedTuple of float, int and bool, the ledger's columns."""

    @property
    def lr(self) -> float: ...
    @property
    def _fields(self) -> tuple[str, ...]: ...


class Family(ABC):
    """One family of optimizers; subclasses are stateless; `registry.py` lists them.

    Attributes:
        name: As in the manifest.
        classes: Those whose `step` is this family's, by module and name: none has to be imported.
        settings_type: NamedTuple of what the ledger keeps of a step.
        buffers: The tensors that a parameter's state holds, our names to torch's keys.
        needs: Of torch's keys those that a state has in any case, once a step was taken, beside its
            count of steps.
        momentum: Which of the buffers is linear in the gradients, or None.
        scalar: Every factor of a transition is a number: rows have one coefficient for a step.
        elementwise: An element's transition depends on that element alone, so a weight may be
            followed in blocks.
        continuous: Rounding a gradient moves a weight by no more than that, so a sample of elements
            can be held to its prediction; not where a sign decides.
        single: Following in float32 is as good as training's own float32; not where a
            preconditioner is a difference that cancels.
        scalars: Numbers of a parameter's state that `read` looks at, by torch's keys.
        explains: What a row moves a weight by is known; else all that moved is the remainder.
    """

    name: ClassVar[str]
    classes: ClassVar[tuple[str, ...]] = ()
    settings_type: ClassVar[type[Any]]
    buffers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    needs: ClassVar[tuple[str, ...]] = ()
    momentum: ClassVar[str | None] = None
    scalar: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    continuous: ClassVar[bool] = True
    single: ClassVar[bool] = True
    scalars: ClassVar[tuple[str, ...]] = ()
    explains: ClassVar[bool] = True

    def why_not(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why an optimizer whose `step` is the family's can't be read all the same, or None."""
        counted = "nth" in self.settings_type._fields
        needs = (*self.needs, "step") if counted else self.needs
        for state in optimizer.state.values():
            missing = [key for key in needs if state and key not in state]
            if missing:
                return (
                    f"the state that it was given has no {' and no '.join(missing)} of a "
                    f"parameter (it has {', '.join(map(str, state))}), so where it goes on from is "
                    "not known; load a state that such an optimizer saved"
                )
        return None

    @abstractmethod
    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> Any:
        """The settings of the step that is about to run.

        Args:
            group: The parameter's group.
            nth: How many steps the parameter will have taken after it, from 1.
            dtype: The parameter's.
            state: The parameter's, empty before its first step; only `scalars` are looked at.
        """

    def blank(self, weight: torch.Tensor) -> Whole:
        """Zeros in the place of every buffer.

        Args:
            weight: Whose shape, dtype and device count.
        """
        return {name: torch.zeros_like(weight) for name in self.buffers}

    def fresh(self, settings: Any) -> Mapping[str, float]:
        """What torch fills buffers with that it creates at this step, where that is not 0."""
        return {}

    def follows_whole(self, settings: Any) -> bool:
        """Whether a step's transition depends on the whole's weight or momentum."""
        return False

    @abstractmethod
    def transition(
        self, settings: Any, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        """The factors of one step; advances the preconditioner in `whole`, in place.

        Args:
            settings: As `read` gave them.
            first: The momentum buffer is created at this step.
            whole: State of the whole run before the step. The weight and the momentum buffer are
                moved by the caller.
            gradient: The whole's, as the optimizer finds it, the parameter's shape.
        """

    def transitions(
        self,
        settings: Sequence[Any],
        firsts: Sequence[bool],
        whole: Whole,
        gradients: torch.Tensor,
    ) -> list[Transition]:
        """The factors of steps one after another, none of which `follows_whole`.

        Args:
            settings, firsts, whole: As for `transition`; of each step.
            gradients: The whole's, [steps, ...]; they may be overwritten.
        """
        each = zip(settings, firsts, gradients, strict=True)
        return [self.transition(one, first, whole, gradient) for one, first, gradient in each]


def same_names(*names: str) -> Mapping[str, str]:
    """`Family.buffers` for a family whose buffers we call as torch does."""
    return MappingProxyType({name: name for name in names})


def seen(
    gradient: torch.Tensor, maximize: bool, decay: float, whole: Whole, writable: bool = False
) -> torch.Tensor:
    """The gradient as the arithmetic sees it: its sign turned, coupled weight decay added.

    Args:
        gradient: The whole's.
        maximize: Whether the sign is turned.
        decay: 0 where there is none, or none that is coupled; "weight" is then not looked at.
        whole: The state.
        writable: The result will be changed, so it must not be the gradient itself.
    """
    if decay != 0:
        return torch.add(-gradient if maximize else gradient, whole["weight"], alpha=decay)
    if maximize:
        return -gradient
    return gradient.clone() if writable else gradient


def counts_in_float32(group: Mapping[str, Any]) -> bool:
    """Whether torch's step takes its factors from a float32 tensor that counts steps.

    So it does for CUDA graphs, `capturable`; fused kernels compute in float64 all the same.
    """
    graphs = bool(group.get("capturable")) and not group.get("fused")
    return graphs and torch.get_default_dtype() != torch.float64


def bias_correction(beta: float, nth: int, float32: bool) -> float:
    """1 - beta^n (Kingma and Ba, 2015, section 3), rounded as torch does where it
    `counts_in_float32`: of 1e-3 in the first step, that leaves five digits."""
    if float32:
        return float(1 - beta ** torch.tensor(nth, dtype=torch.float32, device="cpu"))
    return 1 - beta**nth


def number(value: Any) -> float:
    """A setting that may be a tensor, as a Python float."""
    return float(value)


def moved(
    transition: Transition,
    weight: torch.Tensor,
    momentum: torch.Tensor | None,
    gradient: torch.Tensor | None,
) -> None:
    """Move one part's weight and momentum buffer, in place.

    Args:
        transition: The step's.
        weight: Floating, the parameter's shape or a stack of it.
        momentum: Likewise, for families with one.
        gradient: The part's; None where it has none in this step.
    """
    mm, mw, mg, ww, wm, wg = transition
    if momentum is not None:
        scale_(momentum, mm)
        add_(momentum, mw, weight)
        if gradient is not None:
            add_(momentum, mg, gradient)
    scale_(weight, ww)
    if momentum is not None:
        add_(weight, wm, momentum)
    if gradient is not None:
        add_(weight, wg, gradient)


def scale_(tensor: torch.Tensor, factor: Factor) -> None:
    """tensor *= factor, skipped where that is nothing."""
    if isinstance(factor, torch.Tensor) or factor != 1.0:
        tensor.mul_(factor)


def add_(tensor: torch.Tensor, factor: Factor, other: torch.Tensor) -> None:
    """tensor += factor * other, skipped where that is nothing."""
    if isinstance(factor, torch.Tensor):
        tensor.addcmul_(factor, other)
    elif factor != 0.0:
        tensor.add_(other, alpha=factor)
