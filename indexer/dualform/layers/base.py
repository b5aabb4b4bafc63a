"""What a kind of layer must say of itself. A subclass with a `kind` registers itself.

A kind is a `ProductKind` where the module multiplies once by one weight, and a `JoinedKind` where
several products, each recorded by a kind of its own, make one layer with one key and one value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import Node

from dualform._errors import DualformError

Product = Callable[[torch.Tensor], torch.Tensor]
"""W x + b, [..., d_out], of queries [..., d_in]; no gradient flows through it."""

Forward = Callable[..., Any]
"""What may stand in the place of a module's forward."""


class Windows(NamedTuple):
    """What a convolution's kernel sees in each place of its input; tuples are of its axes.

    Attributes:
        kernel, stride, dilation, groups: As the module has them.
        padding: Numbers before and behind each axis.
        mode: How it is padded, as `nn.Conv2d`'s `padding_mode`.
        batched: The call's input had an axis for the examples.
        cut: The patches, [batch, groups * places, d_in], of the input.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[tuple[int, int], ...]
    mode: str
    batched: bool
    cut: Callable[[torch.Tensor], torch.Tensor]


class Use(NamedTuple):
    """One product with a layer's weight, in a call that is being recorded.

    Attributes:
        given: The keys, or of a convolution the input, [batch, channels, *size], that `windows`
            cuts them from.
        node: The autograd node that multiplies: its gradient is the product's. None where there is
            none to be found.
        values: Its gradient as [..., d_out] in the order of the keys; of `units`, where given.
        units: The output units that the product gives; the others' values are zero. None for all.
        among: Where the keys are some of the rows of a larger shape: the leading axes that give a
            row its place, and which of those rows, int64 ascending. None where `keys` has them.
        windows: What cuts a convolution's keys from its input.
    """

    given: torch.Tensor
    node: Node | None
    values: Callable[[torch.Tensor], torch.Tensor]
    units: slice | None = None
    among: tuple[tuple[int, ...], torch.Tensor] | None = None
    windows: Windows | None = None

    @property
    def keys(self) -> torch.Tensor:
        """[..., d_in], the leading axes being the row's place: slot, position. Of a `one_hot` kind
        integers [..., 1], the places of the ones, or -1 for a key of zeros."""
        if self.windows is None:
            return self.given
        patches = self.windows.cut(self.given)
        return patches if self.windows.batched else patches[0]


class ShapeError(DualformError, ValueError):
    """A layer was called with a tensor of a shape that it does not take."""


class UnsupportedModuleError(DualformError, ValueError):
    """A module can't be taken over as one of ours; the message says what can."""


class LayerKind(ABC):
    """How one type of module is recognised, recorded, and run in dual form. Stateless.

    Attributes:
        kind: The name in the manifest.
        example: What modules of this kind are called, for messages.
        parts: Names of the submodules that it consists of, in the order of their columns in W;
            they are recorded as this layer, not as layers of their own.
        host: The module that multiplies by the weight without calling the layer's own, if one does.
        holder: The module that holds the weight, where it is several layers and none is called so.
        weight_name: What the module calls its weight.
        bias_name: What it calls its bias, if it can have one.
        one_hot: Keys have a single 1: where, is what is kept of them.
    """

    kind: ClassVar[str] = ""
    example: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[list[type[LayerKind]]] = []
    host: nn.Module | None = None
    holder: nn.Module | None = None
    weight_name: ClassVar[str] = "weight"
    bias_name: ClassVar[str] = "bias"
    one_hot: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if cls.kind:
            LayerKind.registry.append(cls)

    @classmethod
    def of(cls, module: nn.Module) -> LayerKind | None:
        """The kind of a module, or None."""
        return next((kind() for kind in cls.registry if kind.recognises(module)), None)

    @classmethod
    @abstractmethod
    def recognises(cls, module: nn.Module) -> bool:
        """Whether a module is of this kind."""

    @classmethod
    def inside(cls, module: nn.Module) -> Mapping[str, LayerKind]:
        """Kinds of submodules, by their names in a module that multiplies by their weights without
        calling them."""
        return {}

    @classmethod
    def pieces(cls, module: nn.Module) -> Mapping[str, LayerKind]:
        """The kinds of the layers that a module is, where it is several, by their names in it."""
        return {}

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a module that looks like one of this kind is none, and the remedy."""
        return None

    def refusal(self, module: nn.Module) -> str | None:
        """Why a module of this kind can't be recorded where it stands, or None."""
        return None

    @abstractmethod
    def shape(self, module: nn.Module) -> tuple[int, int]:
        """d_in, the length of a key, and d_out, the length of a value."""

    @abstractmethod
    def matrix(self, module: nn.Module) -> torch.Tensor:
        """The weight as the matrix W [d_out, d_in] of the dual form."""

    @abstractmethod
    def bias(self, module: nn.Module) -> torch.Tensor | None:
        """The bias [d_out] of the dual form, where there is one."""

    @abstractmethod
    def queries(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor:
        """What W multiplied in a call of the module that gave this output, [..., d_in]."""

    @abstractmethod
    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        """The module's forward with the product replaced; takes and gives what the module does.

        It raises a ShapeError for what can't be cut into queries.
        """

    def host_forward(self) -> Forward:
        """The host's forward, calling the layer's module; of a kind that has a host."""
        raise NotImplementedError(
            f"{type(self).__name__}: a kind whose layers have a host overrides host_forward, "
            "which calls the layer's module; one without a host is never asked for it"
        )


class ProductKind(LayerKind):
    """A kind of module that multiplies by its weight, and may add a bias."""

    def weight(self, module: nn.Module) -> torch.Tensor:
        """The weight; a leaf, unless the module is parametrised."""
        return getattr(module, self.weight_name)  # type: ignore[no-any-return]

    def bias(self, module: nn.Module) -> torch.Tensor | None:
        """The bias, where there is one."""
        return getattr(module, self.bias_name, None)

    def leaves(self, module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weight and bias as the module holds them now: None for one that it has not, or computes.

        Never computes anything: a parametrisation may change its state when it is asked.
        """
        return leaf(module, self.weight_name), leaf(module, self.bias_name)

    def weight_2d(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, or its gradient or a buffer of its shape, as [d_out, d_in]; a view where that
        is possible, and the tensor itself where it is so already."""
        return weight

    def part(self, weight: torch.Tensor) -> torch.Tensor:
        """What of a weight, or of its gradient, is this layer's: all of it, nearly always."""
        return weight

    def matrix(self, module: nn.Module) -> torch.Tensor:
        """The weight as the matrix W [d_out, d_in]."""
        return self.weight_2d(self.weight(module))

    def tensor(self, output: Any) -> torch.Tensor:
        """The tensor that a call of the module, or of its host, gave."""
        return output  # type: ignore[no-any-return]

    def uses(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Sequence[Use]:
        """The products of a call of the module, or of its host.

        Args:
            module, args, kwargs: The layer's module, and the call.
            output: The call's `tensor`.
            weight: The layer's, a leaf.
            bias: Given while the weight is frozen: the node is then the one that adds this.

        Raises:
            ShapeError: The call has no tensor where the keys should be.
        """
        keys = self._keys_of(module, args, kwargs)
        node = self.node(output, weight) if bias is None else self.bias_node(output, bias)
        return (Use(keys, node, partial(self.values, module)),)

    @abstractmethod
    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """The keys of a call of the module, as in `Use`; None where it has no such argument."""

    def values(self, module: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient at the node, or at the output, in the order of the keys: [..., d_out]."""
        return gradient

    @abstractmethod
    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        """The autograd node that multiplies by the weight: its gradient is the product's."""

    def bias_node(self, output: torch.Tensor, bias: torch.Tensor) -> Node | None:
        """The node that adds the bias: where to hook while the weight is frozen. None where this
        kind of layer can't tell; the bias's training is then not explained."""
        return nearest_node(output.grad_fn, bias, direct=True)

    def queries(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor:
        """The keys of the call."""
        return self._keys_of(module, args, kwargs)

    def _keys_of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        found = self.keys(module, args, kwargs)
        if found is None:
            raise ShapeError(
                f"{self.example} was called without a tensor as its first argument or by name"
            )
        return found


class Rows(Protocol):
    """What a joined kind looks at in a part's pass.

    Attributes:
        number: Order of the forward calls.
        leading: Shape of the input without its last axis.
    """

    number: int
    leading: tuple[int, ...]

    @property
    def keys(self) -> np.ndarray:
        """float32 [rows, d_in]."""


PassRows = TypeVar("PassRows", bound=Rows)

FillKeys = Callable[[np.ndarray], None]
"""Writes the joined keys into float32 [rows, d_in]."""


class JoinedKind(LayerKind):
    """Several products as one layer: W = [W_1, W_2, ...] of its parts, b the sum of their biases.

    Exact where the parts are trained by the same settings (docs/decisions/0012-lstm.md). Parts may
    run several times in a call of the whole.
    """

    @abstractmethod
    def join(self, passes: Sequence[Sequence[PassRows]]) -> list[tuple[PassRows, FillKeys]] | None:
        """The passes of the whole at one step, in the order in which it was called.

        Args:
            passes: Of each part, in the order of `parts` and of the forward calls.

        Returns:
            For each call the part's pass that has the whole's rows, values and place, and what
            fills its keys. None where the parts did not see the same calls.
        """


def bare(model: nn.Module) -> nn.Module:
    """The model that torch.compile, DataParallel and DistributedDataParallel wrap: layers are
    called as in it."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, wrappers):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def layers_of(model: nn.Module) -> dict[str, LayerKind]:
    """The layers of a model by name, without those that are parts of another."""
    found: dict[str, LayerKind] = {}
    inside: dict[str, LayerKind] = {}
    for name, module in model.named_modules():
        for which in LayerKind.registry:
            kinds = which.inside(module)
            inside.update({part_name(name, part): kind for part, kind in kinds.items()})
            pieces = which.pieces(module)
            found.update({part_name(name, piece): kind for piece, kind in pieces.items()})
        kind = inside.get(name) or LayerKind.of(module)
        if kind is not None:
            found[name] = kind
    parts = {part_name(name, part) for name, kind in found.items() for part in kind.parts}
    return {name: kind for name, kind in found.items() if name not in parts}


def module_of(model: nn.Module, name: str, kind: LayerKind) -> nn.Module:
    """The module that holds a layer's weight."""
    return model.get_submodule(name) if kind.holder is None else kind.holder


def part_name(name: str, part: str) -> str:
    """What a submodule of a module is called in the model."""
    return f"{name}.{part}" if name else part


def why_not(module: nn.Module) -> str | None:
    """Why a module that has weights of its own is of no kind, where that is known."""
    return next((why for kind in LayerKind.registry if (why := kind.why_not(module))), None)


def leaf(module: nn.Module, name: str) -> torch.Tensor | None:
    """A module's own parameter of this name; None where it is absent, or computed from others."""
    parameters = module._parameters
    if name in parameters:
        return parameters[name]
    computed = module._modules.get("parametrizations")
    if isinstance(computed, nn.ModuleDict) and name in computed:
        return None
    found = getattr(module, name, None)  # a property of the user's, which hands one on
    return found if isinstance(found, nn.Parameter) else None


def first_tensor(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = "input"
) -> torch.Tensor | None:
    """The first argument of a call, by place or by name, if it is a tensor."""
    given = args[0] if args else kwargs.get(name)
    return given if isinstance(given, torch.Tensor) else None


# What may lie between a product and a parameter: W.t(), and autocast's copy of W.
_VIEWS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0")
_MAX_DEPTH = 5


def nearest_node(top: Node | None, parameter: torch.Tensor, direct: bool) -> Node | None:
    """The nearest node from the top down that takes a parameter.

    Args:
        top: Where to begin: an output's node.
        parameter: The weight or the bias.
        direct: The node may take it as it is, not only through a view.
    """
    waiting = deque([(top, 0)])
    while waiting:
        node, depth = waiting.popleft()
        if node is None or type(node).__name__ in _VIEWS:
            continue
        below = [edge[0] for edge in node.next_functions if edge[0] is not None]
        # The weight is the last argument of every product that linear layers use.
        if any(leads_to(child, parameter, direct) for child in reversed(below)):
            return node
        if depth < _MAX_DEPTH:
            waiting.extend((child, depth + 1) for child in below)
    return None


def leads_to(node: Node, parameter: torch.Tensor, direct: bool) -> bool:
    """Whether the node hands on to the parameter, through a view or, if allowed, directly."""
    passed = direct
    current: Node | None = node
    while current is not None and type(current).__name__ in _VIEWS:
        passed = True
        current = current.next_functions[0][0]
    return passed and getattr(current, "variable", None) is parameter
