"""`nn.Linear`: the key is its input, the value the negative gradient at its product with W."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from dualform.record.layers.base import LayerKind

# What may lie between the product and the weight: W.t(), and autocast's copy of W.
_WEIGHT_VIEWS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0")
_MAX_DEPTH = 5


class Linear(LayerKind):
    """Records `nn.Linear` and its subclasses."""

    kind = "linear"
    module_type = nn.Linear

    def shape(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, nn.Linear)
        return module.in_features, module.out_features

    def weight(self, module: nn.Module) -> torch.Tensor:
        assert isinstance(module, nn.Linear)
        return module.weight

    def bias(self, module: nn.Module) -> torch.Tensor | None:
        assert isinstance(module, nn.Linear)
        return module.bias

    def input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        given = args[0] if args else kwargs.get("input")
        return given if isinstance(given, torch.Tensor) else None

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        """Search from the output down: views and a separate bias addition may lie above.

        A hook on the output itself would miss in-place operations on a view of the product.
        """
        top = output.grad_fn
        below = () if top is None else top.next_functions
        if below and below[-1][0] is not None and _leads_to(below[-1][0], weight):
            return top  # most often it is the topmost node
        return _search(top, lambda child: _leads_to(child, weight))

    def bias_node(self, output: torch.Tensor, bias: torch.Tensor) -> Node | None:
        return _search(output.grad_fn, lambda child: _leads_to(child, bias, direct=True))


def _search(top: Node | None, wanted: Callable[[Node], bool]) -> Node | None:
    """The nearest node from the top down that takes an argument which is wanted."""
    waiting = deque([(top, 0)])
    while waiting:
        node, depth = waiting.popleft()
        if node is None or type(node).__name__ in _WEIGHT_VIEWS:
            continue
        below = [edge[0] for edge in node.next_functions if edge[0] is not None]
        # The weight is the last argument of every product that linear layers use.
        if any(wanted(child) for child in reversed(below)):
            return node
        if depth < _MAX_DEPTH:
            waiting.extend((child, depth + 1) for child in below)
    return None


def _leads_to(node: Node, parameter: torch.Tensor, direct: bool = False) -> bool:
    """Whether the node hands on to the parameter, through a view or, if allowed, directly."""
    passed = direct
    current: Node | None = node
    while current is not None and type(current).__name__ in _WEIGHT_VIEWS:
        passed = True
        current = current.next_functions[0][0]
    return passed and getattr(current, "variable", None) is parameter
