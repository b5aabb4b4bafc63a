"""The hooks on a model's layers: what each sees, and where a number points at its outputs.

They are the recorder's: the key is what the layer multiplies, and the gradient is taken at the
autograd node that multiplies by its weight, so that both belong to the rows of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client._apart import check_adds_up, condensed, inputs_of, rounding_of
from dualform.client._capture import undone
from dualform.client.errors import FailedPreconditionError, InvalidArgumentError
from dualform.questions import AttributedLayer

if TYPE_CHECKING:
    import torch

    from dualform.layers import LayerKind, ProductKind
    from dualform.layers.base import Use

_MANY_BYTES = 16 << 20
"""What one input asks of a layer is sent as it is up to this."""


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


class Watch:
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
            f"the products of {kind.example} did not see the same calls", field="model"
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
