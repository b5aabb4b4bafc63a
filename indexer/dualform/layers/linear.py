"""`nn.Linear`: the key is its input, the value the negative gradient at its product with W."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dualform.layers.base import (
    Forward,
    Product,
    ProductKind,
    first_tensor,
    leads_to,
    nearest_node,
)


class Linear(ProductKind):
    """`nn.Linear` and its subclasses."""

    kind = "linear"
    example = "Linear"

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def refusal(self, module: nn.Module) -> str | None:
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return (
                "nn.MultiheadAttention multiplies by its weight without calling it, "
                "so there are no rows to see; write attention with nn.Linear of your own"
            )
        return None

    def shape(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, nn.Linear)
        return module.in_features, module.out_features

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        return first_tensor(args, kwargs)

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        """Search from the output down: views and a separate bias addition may lie above.

        A hook on the output itself would miss in-place operations on a view of the product.
        """
        top = output.grad_fn
        below = () if top is None else top.next_functions
        if below and below[-1][0] is not None and leads_to(below[-1][0], weight, direct=False):
            return top  # most often it is the topmost node
        return nearest_node(top, weight, direct=False)

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:
            return product(input)

        return forward
