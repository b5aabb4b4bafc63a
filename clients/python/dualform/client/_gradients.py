"""What the layers of a model see for some inputs, and where a number points at their outputs.

The hooks are the recorder's: the key is what the layer multiplies, and the gradient is taken at the
autograd node that multiplies by its weight, so that both belong to the rows of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client._apart import check_adds_up, condensed, factors_of, inputs_of, rounding_of
from dualform.client._capture import undisturbed, undone, without_fast_paths
from dualform.client.errors import FailedPreconditionError, InvalidArgumentError
from dualform.questions import AttributedLayer

if TYPE_CHECKING:
    import torch

    from dualform.layers import LayerKind, ProductKind
    from dualform.layers.base import Use

    Number = Callable[[Any], torch.Tensor]
    """Of what the model gives: one number for each input, [n]."""

_MANY_BYTES = 16 << 20
"""What one input asks of a layer is sent as it is up to this."""


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
    watch = _Watch(model, kinds)
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


@dataclass(eq=False)
class _Pass:
    """One product with a layer's weight.

    Attributes:
        number: Order of the forward calls.
        leading: Shape of the keys without their last axis.
        keys: float32 [rows, d_in]; of a looked-up token int64 [rows, 1].
        gradients: By backward, float32 [rows, d_out]; None where the backward did not come by.
        rounding: That of the gradient's format, as it came.
    """

    number: int
    leading: tuple[int, ...]
    keys: npt.NDArray[Any]
    gradients: dict[object, npt.NDArray[np.float32]] = field(default_factory=dict)
    last: torch.Tensor | None = None
    rounding: float = 0.0

    def take(self, run: object) -> None:
        """Keep what the last backward brought."""
        if self.last is not None:
            self.gradients[run] = self.last.numpy()
        self.last = None

    def of(self, run: object) -> npt.NDArray[np.float32]:
        """What it brought; zeros where it did not come by."""
        found = self.gradients.get(run)
        return np.zeros_like(self.gradients["whole"]) if found is None else found


@dataclass(frozen=True, eq=False)
class _Use:
    """A module that uses a layer's weight; `flipped` where it looks up what that multiplies."""

    kind: ProductKind
    module: torch.nn.Module
    flipped: bool
    passes: list[_Pass] = field(default_factory=list)


class _Watch:
    """The hooks on some layers of a model.

    Attributes:
        covered: Ids of the parameters that the layers have.
        weights: The weights among them, to go back to.
    """

    def __init__(self, model: torch.nn.Module, kinds: Mapping[str, LayerKind]) -> None:
        from dualform.layers import ProductKind, layers_of, module_of

        every = {
            name: (kind, module_of(model, name, kind))
            for name, kind in layers_of(model).items()
            if isinstance(kind, ProductKind)
        }
        self._kinds = kinds
        self._modules = {name: module_of(model, name, kind) for name, kind in kinds.items()}
        self._uses: dict[str, list[_Use]] = {}
        self._numbers = count()
        self.covered: set[int] = set()
        self.weights: list[torch.Tensor] = []
        for name, kind in kinds.items():
            module = self._modules[name]
            if not isinstance(kind, ProductKind):
                parts = [module.get_submodule(part) for part in kind.parts]
                self._uses[name] = [_Use(_product_kind(part), part, False) for part in parts]
            else:
                weight = kind.weight(module)
                tied = [
                    _Use(other, place, other.one_hot != kind.one_hot)
                    for where, (other, place) in every.items()
                    if where != name and other.weight(place) is weight and other.holder is None
                ]
                self._uses[name] = [_Use(kind, module, False), *tied]
            for use in self._uses[name]:
                weight, bias = use.kind.weight(use.module), use.kind.bias(use.module)
                self.covered |= {id(weight), id(bias)}
                self.weights.append(weight)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, every product is seen; frozen weights take gradients."""
        frozen = [weight for weight in self.weights if not weight.requires_grad]
        handles: list[Any] = []

        def undo() -> None:
            for handle in handles:
                handle.remove()
            for weight in frozen:
                weight.requires_grad_(False)

        with undone(undo):
            for weight in frozen:
                weight.requires_grad_(True)
            for uses in self._uses.values():
                for use in uses:
                    called = use.kind.host or use.module
                    hook = self._hook(use)
                    handles.append(called.register_forward_hook(hook, with_kwargs=True))
            yield

    def _hook(self, use: _Use) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            import torch

            output = use.kind.tensor(output)
            if not (torch.is_grad_enabled() and output.requires_grad):
                return
            weight = use.kind.weight(use.module)
            for each in use.kind.uses(use.module, args, kwargs, output, weight, None):
                if each.node is None:
                    continue
                keys = each.keys.detach()
                if keys.dtype == torch.float64:
                    raise FailedPreconditionError(
                        "a layer sees float64; keys and queries are float32: run the model with "
                        "model.float()",
                        field="model",
                    )
                wanted = torch.int64 if use.kind.one_hot else torch.float32
                flat = keys.reshape(-1, keys.shape[-1]).to("cpu", wanted, copy=True)
                among = each.among
                leading = tuple(keys.shape[:-1]) if among is None else among[0]
                seen = _Pass(next(self._numbers), leading, _among(flat, among).numpy())
                use.passes.append(seen)
                each.node.register_prehook(_taker(seen, use, each))

        return hook

    def check_ran(self) -> None:
        """Refuse layers of which nothing was seen."""
        silent = [
            name
            for name, uses in self._uses.items()
            # No token may have been sent to an expert.
            if not all(use.passes for use in uses if not use.flipped and use.kind.holder is None)
        ]
        if silent:
            raise FailedPreconditionError(
                f"these layers did not run with gradients: {', '.join(silent)}; leave them out of "
                "layers=, or see whether the model's forward turns gradients off, is compiled, or "
                "uses their weights without calling them",
                field="layers",
            )

    def check_complete(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Refuse weights that are used outside their modules' forwards, which no row tells of.

        Args:
            gradients: What the first backward brought at `weights`.
        """
        brought = iter(gradients)
        for name, uses in self._uses.items():
            found = [next(brought) for _ in uses]
            tied = all(use.kind.weight(use.module) is self._weight_of(name) for use in uses)
            # The parts of a layer have a weight each; tied modules one together.
            together = [uses] if tied else [[use] for use in uses]
            for some, gradient in zip(together, found, strict=False):
                first = some[0]
                if gradient is None or not first.kind.weight(first.module).is_leaf:
                    continue
                matrix = first.kind.weight_2d(gradient.detach())
                rows = [
                    (seen.keys, seen.of("whole"), use.kind.one_hot, use.flipped)
                    for use in some
                    for seen in use.passes
                    if "whole" in seen.gradients
                ]
                coarse = [seen.rounding for use in some for seen in use.passes]
                check_adds_up(name, matrix, rows, max([rounding_of(gradient), *coarse]))

    def _weight_of(self, name: str) -> torch.Tensor:
        first = self._uses[name][0]
        return first.kind.weight(first.module)

    def take(self, run: object) -> None:
        """Keep what a backward brought."""
        for uses in self._uses.values():
            for use in uses:
                for seen in use.passes:
                    seen.take(run)

    def layer(self, name: str, n: int, factors: npt.NDArray[np.float64]) -> AttributedLayer:
        """What a layer saw, by input.

        Args:
            name: Which.
            n: How many inputs.
            factors: Of the backwards after the first, [passes, n].
        """
        kind, uses = self._kinds[name], self._uses[name]
        blocks = []
        for use, keys, seen in _rows(kind, uses):
            if "whole" not in seen.gradients:
                continue
            whole = seen.of("whole")
            _check_finite(name, whole)
            probes = [seen.of(place) for place in range(len(factors))]
            # Not by the whole alone: there inputs that share a row may cancel.
            used = np.flatnonzero(np.any([part.any(axis=1) for part in (whole, *probes)], axis=0))
            some = [probe[used] for probe in probes]
            inputs = inputs_of(name, whole[used], some, factors, seen.rounding)
            blocks.append((inputs, *_pair(use, keys[used], whole[used])))
        blocks = [block for block in blocks if len(block[0])]
        if not blocks:  # nothing of the target goes through it
            d_in, d_out = kind.shape(self._modules[name])
            zeros = np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32)
            return AttributedLayer(name, *zeros, np.zeros(1, np.int64))
        inputs, queries, directions = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        order = np.argsort(inputs, kind="stable")
        if n == 1 and queries.nbytes + directions.nbytes > _MANY_BYTES:
            queries, directions = condensed(queries, directions)
            return AttributedLayer(name, queries, directions, np.zeros(len(queries), np.int64))
        single = np.array_equal(inputs[order], np.arange(n))
        return AttributedLayer(
            name, queries[order], directions[order], None if single else inputs[order]
        )


def _product_kind(module: torch.nn.Module) -> ProductKind:
    from dualform.layers import LayerKind, ProductKind

    kind = LayerKind.of(module)
    assert isinstance(kind, ProductKind)
    return kind


def _among(rows: torch.Tensor, among: tuple[tuple[int, ...], torch.Tensor] | None) -> torch.Tensor:
    """Rows in their places of a larger shape, the others being zeros, which add nothing."""
    if among is None:
        return rows
    shape, places = among
    whole = rows.new_zeros(math.prod(shape), rows.shape[-1])
    whole[places.cpu()] = rows
    return whole


def _taker(seen: _Pass, use: _Use, each: Use) -> Any:
    """The node's pre-hook: the gradient in the order of the keys."""
    # Not the use itself, whose node would hold a hook that holds the node.
    values, units, among = each.values, each.units, each.among

    def take(gradients: Sequence[torch.Tensor | None]) -> None:
        import torch

        if gradients[0] is None:
            return
        seen.rounding = rounding_of(gradients[0])
        found = values(gradients[0].detach())
        found = found.reshape(-1, found.shape[-1]).to("cpu", torch.float32, copy=True)
        if units is not None:
            whole = found.new_zeros(len(found), use.kind.shape(use.module)[1])
            whole[:, units] = found
            found = whole
        found = _among(found, among)
        seen.last = found if seen.last is None else seen.last + found

    return take


def _rows(kind: LayerKind, uses: Sequence[_Use]) -> Iterator[tuple[_Use, npt.NDArray[Any], _Pass]]:
    """The passes of a layer with their keys; of several products in one layer, joined."""
    from dualform.layers import JoinedKind

    if not isinstance(kind, JoinedKind):
        for use in uses:
            for seen in use.passes:
                yield use, seen.keys, seen
        return
    joined = kind.join([use.passes for use in uses])
    if joined is None:
        raise FailedPreconditionError(
            f"the products of a {kind.example} did not see the same calls", field="model"
        )
    for seen, fill in joined:
        width = sum(use.passes[0].keys.shape[1] for use in uses)
        keys = np.empty((len(seen.keys), width), np.float32)
        fill(keys)
        yield uses[-1], keys, seen


def _pair(
    use: _Use, keys: npt.NDArray[Any], gradient: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Queries and directions of some rows.

    A token that a tied embedding looked up is a row of the matrix that it shares: its gradient
    there is the one at the token's id times that at the vector.
    """
    if not use.kind.one_hot:
        return keys, gradient
    places = keys[:, 0]
    ones = np.zeros((len(places), use.kind.shape(use.module)[0]), np.float32)
    known = places >= 0
    ones[np.flatnonzero(known), places[known]] = 1
    return (gradient, ones) if use.flipped else (ones, gradient)


def _check_finite(name: str, gradient: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(gradient).all():
        raise InvalidArgumentError(
            f"the target's gradient at layer {name!r} is not finite; is the model's output?",
            field="target",
        )
