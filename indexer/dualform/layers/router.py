"""The router of transformers' Mixtral: a product with a weight of its own, and what it chooses.

The layer is the product, as of `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from dualform.layers.base import Forward, Product, ShapeError, first_tensor, leaf
from dualform.layers.linear import Linear


class Router(Linear):
    """`MixtralTopKRouter`, told by its name, with a weight [experts, d_in].

    transformers itself is never imported: models may carry a copy of the class. Others' routers may
    multiply in their own ways, and are left out by name.
    """

    example = "MixtralTopKRouter (transformers)"

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        if not any(base.__name__ == "MixtralTopKRouter" for base in type(module).__mro__):
            return False
        weight = leaf(module, "weight")
        return weight is not None and weight.dim() == 2

    def shape(self, module: nn.Module) -> tuple[int, int]:
        d_out, d_in = self.weight(module).shape
        return d_in, d_out

    def tensor(self, output: Any) -> torch.Tensor:
        """The logits, or what was made of them first."""
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        return first_tensor(args, kwargs, "hidden_states")

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _InItsPlace(self.weight(module), product) as replaced:
                found = original(*args, **kwargs)
            if replaced.times != 1:
                raise ShapeError(
                    f"{type(module).__name__} multiplied {replaced.times} times by its weight as "
                    "it is, where it should once"
                )
            return found

        return forward


class _InItsPlace(TorchFunctionMode):
    """Gives another product wherever `F.linear` is called with a weight."""

    def __init__(self, weight: torch.Tensor, product: Product) -> None:
        super().__init__()
        self.weight, self.product, self.times = weight, product, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and len(args) > 1 and args[1] is self.weight:
            self.times += 1
            return self.product(args[0])
        return func(*args, **(kwargs or {}))
