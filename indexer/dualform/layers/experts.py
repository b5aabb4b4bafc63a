"""Experts whose weights lie in one tensor [experts, d_out, d_in], as transformers builds them.

Every expert is a linear map of its own, and a layer of its own: `<module>.gate_up_proj.3`, with the
rows of the tokens that were sent to it. A key is what the expert saw of a token, a value the
negative gradient at its product; `slot` and `position` are the token's place.

The products are found in the graph: one for each expert (`eager`), or one for all, in which the
rows of each are a stretch (`grouped_mm`).
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node

from dualform.layers.base import Forward, LayerKind, Product, ProductKind, Use

_NAMES = ("gate_up_proj", "down_proj")
_TAKES = ("hidden_states", "top_k_index", "top_k_weights")
_SEEN_IN = ("eager", "grouped_mm")
_REMEDY = "call model.set_experts_implementation('grouped_mm') or ('eager')"
_VIEWS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0")
_MOST_NODES = 10_000


class _Product(NamedTuple):
    """A product with the weights of one expert or of all.

    Attributes:
        node: Its autograd node.
        keys: [rows, d_in], what it multiplied.
        rows: Of each expert that has some.
    """

    node: Node
    keys: torch.Tensor
    rows: dict[int, slice]


class _Block:
    """What the kinds of one module's experts share.

    Attributes:
        module: The experts.
        products: What stands in the place of products, by weight and expert, in dual form.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.products: dict[tuple[str, int], Product] = {}
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._found: dict[str, list[_Product]] = {}
        self._tokens: dict[int, torch.Tensor] = {}

    def look(self, output: torch.Tensor, inputs: torch.Tensor) -> None:
        """Find the products of a call of the module, once for all of its experts."""
        if self._seen is not None and self._seen() is output:
            return
        self._found = {name: self._find(name, output, inputs) for name in _NAMES}
        self._tokens = {}
        for product in self._found[_NAMES[0]]:
            indices = _indices(product.node)
            if indices is not None:
                for expert, rows in product.rows.items():
                    self._tokens[expert] = indices[rows]

        def forget(_: object) -> None:  # nodes hold their graph
            self._found, self._tokens = {}, {}

        self._seen = weakref.ref(output, forget)

    def products_of(self, name: str, expert: int) -> Iterator[tuple[_Product, slice]]:
        """An expert's, with its rows there."""
        for product in self._found.get(name, ()):
            if expert in product.rows:
                yield product, product.rows[expert]

    def tokens(self, expert: int) -> torch.Tensor | None:
        """int64 [rows], the token of each row of an expert, where the graph tells."""
        return self._tokens.get(expert)

    def multiply(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """An expert's product."""
        product = self.products.get((name, expert))
        return F.linear(x, getattr(self.module, name)[expert]) if product is None else product(x)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """What lies between an expert's two products."""
        apply = getattr(self.module, "_apply_gate", None)
        if apply is not None:
            return apply(x)  # type: ignore[no-any-return]
        gate, up = x.chunk(2, -1)
        return self.module.act_fn(gate) * up  # type: ignore[operator,no-any-return]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The module's forward, expert by expert, in whatever implementation it has."""
        found = torch.zeros_like(hidden_states)
        for expert in range(len(getattr(self.module, _NAMES[0]))):
            tokens, places = torch.where(top_k_index == expert)
            if len(tokens):
                x = self.gate(self.multiply(_NAMES[0], expert, hidden_states[tokens]))
                x = self.multiply(_NAMES[1], expert, x) * top_k_weights[tokens, places, None]
                found.index_add_(0, tokens, x.to(found.dtype))
        return found

    def _find(self, name: str, output: torch.Tensor, inputs: torch.Tensor) -> list[_Product]:
        weight = getattr(self.module, name)
        waiting, met = deque([output.grad_fn]), {output.grad_fn, inputs.grad_fn}
        found = []
        while waiting and len(met) < _MOST_NODES:
            node = waiting.popleft()
            if node is None:
                continue
            for child, _ in node.next_functions:
                reached, expert = _expert_of(child, weight)
                if reached:
                    found.append(_product(node, expert))
                elif child is not None and child not in met:
                    met.add(child)
                    waiting.append(child)
        return found


class Expert(ProductKind):
    """One expert's product.

    Args:
        block: What it shares with the others.
        name: Of the tensor that has its weight.
        number: Which of its matrices.
    """

    kind = "expert"
    example = "MixtralExperts"

    def __init__(self, block: _Block | None = None, name: str = _NAMES[0], number: int = 0) -> None:
        self._block = block
        self._name = name
        self._number = number
        self.holder = None if block is None else block.module

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return False  # the module is several layers

    @classmethod
    def pieces(cls, module: nn.Module) -> Mapping[str, LayerKind]:
        if not _are_experts(module) or cls.why_not(module) is not None:
            return {}
        block = _Block(module)
        return {
            f"{name}.{number}": cls(block, name, number)
            for name in _NAMES
            for number in range(len(getattr(module, name)))
        }

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        if not _are_experts(module):
            return None
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        if tuple(parameters)[1:] != _TAKES:
            return (
                f"{type(module).__name__} is called otherwise than with {', '.join(_TAKES)}, so "
                "which expert sees which token is not known"
            )
        for attribute, plain, what in (
            ("has_bias", False, "experts with biases"),
            ("is_transposed", False, "experts of transposed weights"),
            ("has_gate", True, "experts without a gate"),
            ("has_post_expert_norm", False, "experts with a norm behind them"),
            ("_is_expert_parallel", False, "experts on several devices"),
        ):
            if getattr(module, attribute, plain) is not plain:
                return f"{what} in one tensor are not recorded; train the experts as nn.Linear"
        way = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if way is not None and way not in _SEEN_IN:
            return f"its experts run by {way!r}, in which no expert's rows are seen; {_REMEDY}"
        return None

    def shape(self, module: nn.Module) -> tuple[int, int]:
        _, units, d = self.weight(module).shape
        return d, units

    def weight(self, module: nn.Module) -> torch.Tensor:
        return getattr(module, self._name)  # type: ignore[no-any-return]

    def bias(self, module: nn.Module) -> torch.Tensor | None:
        return None

    def leaves(self, module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return module._parameters.get(self._name), None

    def weight_2d(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[self._number]

    def part(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[self._number]

    def uses(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> list[Use]:
        inputs = _given(module, args, kwargs)[0]
        block = self._shared
        block.look(output, inputs)
        found = []
        for product, rows in block.products_of(self._name, self._number):
            tokens = block.tokens(self._number)
            keys, among = product.keys[rows], None
            order: slice | torch.Tensor = slice(None)
            if tokens is not None:  # in the order of the tokens
                places, order = torch.sort(tokens)
                keys, among = keys[order], (tuple(inputs.shape[:-1]), places)
            found.append(Use(keys, product.node, _taker(rows, order), None, among))
        return found

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """What the expert sees, computed anew: [tokens, d_in]."""
        hidden, index, _ = _given(module, args, kwargs)
        x = hidden[torch.where(index == self._number)[0]]
        if self._name == _NAMES[0]:
            return x
        block = self._shared
        return block.gate(F.linear(x, getattr(block.module, _NAMES[0])[self._number]))

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        return None

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        block = self._shared
        block.products[self._name, self._number] = product
        return block.forward

    @property
    def _shared(self) -> _Block:
        assert self._block is not None
        return self._block


def _are_experts(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))  # a scripted module's too
    weights = [parameters.get(name) for name in _NAMES]
    return all(weight is not None and weight.dim() == 3 for weight in weights)


def _given(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Hidden states, and of each token its experts and their weights."""
    named = {**dict(zip(_TAKES, args, strict=False)), **kwargs}
    return tuple(named[name] for name in _TAKES)


def _taker(rows: slice, order: slice | torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def values(gradient: torch.Tensor) -> torch.Tensor:
        return gradient[rows][order]

    return values


def _product(node: Any, expert: int | None) -> _Product:
    """A product as its node has kept it."""
    saved = getattr(node, "_saved_self", None)
    keys = node.saved_tensors[0] if saved is None else saved
    if expert is not None:
        return _Product(node, keys, {expert: slice(0, len(keys))})
    ends = getattr(node, "_saved_offs", None)
    ends = (node.offs if ends is None else ends).tolist()
    stretches = enumerate(itertools.pairwise([0, *ends]))
    return _Product(node, keys, {i: slice(*pair) for i, pair in stretches if pair[0] < pair[1]})


def _expert_of(node: Node | None, weight: torch.Tensor) -> tuple[bool, int | None]:
    """Whether a node hands on to the weight, and to which expert's matrix alone, if so."""
    expert: int | None = None
    current: Any = node
    while current is not None:
        name = type(current).__name__
        if name == "SelectBackward0":
            expert = int(current._saved_index)
        elif name not in _VIEWS:
            break
        current = current.next_functions[0][0]
    return getattr(current, "variable", None) is weight, expert


def _indices(node: Node) -> torch.Tensor | None:
    """By which indices the rows of a product were taken out of the hidden states."""
    taken: Any = node.next_functions[0][0]
    while taken is not None and type(taken).__name__ == "ToCopyBackward0":
        taken = taken.next_functions[0][0]
    if type(taken).__name__ != "IndexBackward0":
        return None
    indices = taken._saved_indices
    return indices[0] if len(indices) == 1 else None
