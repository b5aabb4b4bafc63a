"""Hugging Face's `Conv1D`, of GPT-2 and its kin: a linear layer whose weight is [d_in, d_out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from dualform.layers.base import (
    Forward,
    Product,
    ProductKind,
    first_tensor,
    leaf,
    nearest_node,
)


class TransposedLinear(ProductKind):
    """`transformers.pytorch_utils.Conv1D`, told by its name and the shape of its weight.

    transformers itself is never imported: models may carry a copy of the class.
    """

    kind = "transposed_linear"
    example = "Conv1D (transformers)"

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        if not any(base.__name__ == "Conv1D" for base in type(module).__mro__):
            return False
        if "parametrizations" in module._modules:  # refused later; its weight is not to be computed
            return True
        weight, width = leaf(module, "weight"), getattr(module, "nf", None)
        return weight is not None and weight.dim() == 2 and weight.shape[1] == width

    def shape(self, module: nn.Module) -> tuple[int, int]:
        d_in, d_out = self.weight(module).shape
        return d_in, d_out

    def weight_2d(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        return first_tensor(args, kwargs, "x")

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        return nearest_node(output.grad_fn, weight, direct=True)

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            return product(x)

        return forward
