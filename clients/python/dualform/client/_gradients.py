"""Where a number that a model gives points at the outputs of its layers: one pass, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client._apart import factors_of
from dualform.client._capture import undisturbed, without_fast_paths
from dualform.client._watch import Watch
from dualform.client.errors import InvalidArgumentError
from dualform.questions import AttributedLayer

if TYPE_CHECKING:
    import torch

    from dualform.layers import LayerKind

    Number = Callable[[Any], torch.Tensor]
    """Of what the model gives: one number for each input, [n]."""


@dataclass(frozen=True)
class Gradients:
    """Of one pass of the model.

    Attributes:
        targets: float64 [n], the numbers.
        layers: Queries and directions of each layer, without places where the gradient is zero.
        unrecorded: float64 [n], the gradient times the parameters that are none of the layers'.
    """

    targets: npt.NDArray[np.float64]
    layers: tuple[AttributedLayer, ...]
    unrecorded: npt.NDArray[np.float64]


def gradients_of(
    model: torch.nn.Module,
    inputs: Any,
    number: Number,
    kinds: Mapping[str, LayerKind],
    *,
    together: bool = False,
) -> Gradients:
    """Run a model once, and back.

    The pass runs in eval mode. Afterwards flags, random state, buffers, hooks and gradients are as
    they were.

    Args:
        model: The model, not compiled.
        inputs: What its forward takes: one argument, a tuple of several, a mapping of named ones.
        number: What is attributed.
        kinds: The layers to look at, by name.
        together: Attribute the numbers' sum, as of one input.

    Raises:
        InvalidArgumentError: A gradient is not finite, or inputs have an influence on one another.
        FailedPreconditionError: A layer did not run, or in a way that hides its gradient.
    """
    import torch

    _check_recordable(model, inputs)
    watch = Watch(model, kinds)
    with ExitStack() as stack:
        for context in (undisturbed(model), without_fast_paths(), watch.attached()):
            stack.enter_context(context)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        outputs = _called(model, inputs)
        found = number(outputs)
        if together:
            found = found.sum()[None]
        watch.check_ran()
        n = len(found)
        others = [p for p in model.parameters() if id(p) not in watch.covered and p.requires_grad]
        ones = torch.ones_like(found, requires_grad=bool(others))
        back = _Back(found, watch.weights)
        first = back.run(ones, others)
        watch.take("whole")
        watch.check_complete(back.weights)
        factors = factors_of(n)
        for place, of_pass in enumerate(factors):
            back.run(torch.from_numpy(of_pass).to(found))
            watch.take(place)
        unrecorded = _unrecorded(found, ones, others, first)
    layers = tuple(watch.layer(name, n, factors) for name in kinds)
    return Gradients(found.detach().double().cpu().numpy(), layers, unrecorded)


def _check_recordable(model: torch.nn.Module, inputs: Any) -> None:
    """Refuse tensors made under torch.inference_mode, which no gradient flows through."""
    import torch

    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    parts = parts if isinstance(inputs, (Mapping, tuple)) else (inputs,)
    for field_, tensors in (("inputs", parts), ("model", model.parameters())):
        if any(isinstance(each, torch.Tensor) and each.is_inference() for each in tensors):
            raise InvalidArgumentError(
                f"{field_}: a tensor was made under torch.inference_mode(), and no gradient flows "
                "through it; make it outside, or pass its clone()",
                field=field_,
            )


def _called(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


class _Back:
    """Backwards from the numbers to the layers' weights.

    Attributes:
        weights: What the last backward brought at each; None where it did not come by.
    """

    def __init__(self, found: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        self._found = found
        self._weights = list(weights)
        self.weights: Sequence[torch.Tensor | None] = ()

    def run(
        self, factors: torch.Tensor, others: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor | None, ...]:
        """Of the sum of the numbers times factors; gives the gradients at other parameters, with
        their graph."""
        import torch

        found = torch.autograd.grad(
            (self._found * factors).sum(),
            [*self._weights, *others],
            retain_graph=True,
            create_graph=bool(others),
            allow_unused=True,
        )
        self.weights = found[: len(self._weights)]
        return found[len(self._weights) :]


def _unrecorded(
    found: torch.Tensor,
    ones: torch.Tensor,
    others: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> npt.NDArray[np.float64]:
    """Each number's gradient times the parameters that are in no layer, [n]."""
    import torch

    pairs = [(p.detach(), g) for p, g in zip(others, gradients, strict=True) if g is not None]
    if not pairs:
        return np.zeros(len(found))
    try:
        # The sum over inputs, differentiated by what each was multiplied with.
        whole = torch.stack([(p * g).sum() for p, g in pairs]).sum()
        (each,) = torch.autograd.grad(whole, ones, retain_graph=True)
    except RuntimeError:  # something in the model can't be differentiated twice
        each = torch.stack([_products(one, others) for one in found])
    return np.asarray(each.detach().double().cpu().numpy())


def _products(one: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    found = torch.autograd.grad(one, list(others), retain_graph=True, allow_unused=True)
    parts = [(p.detach() * g).sum() for p, g in zip(others, found, strict=True) if g is not None]
    return torch.stack(parts).sum() if parts else one.detach() * 0
