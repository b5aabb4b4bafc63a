"""`nn.Embedding`: a product with a key that has a single 1, in the place of the token's id.

A row's attention weight is then 1 where its id is the query's and 0 elsewhere, its value the
negative gradient at the vector that was looked up, and W the transposed table, [d, ids]. Of a key
the id is kept, 4 bytes; a token at `padding_idx`, which trains nothing, has a key of zeros.
"""

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
    ShapeError,
    first_tensor,
    nearest_node,
)


class Embedding(ProductKind):
    """`nn.Embedding`, with a dense gradient that counts every token once."""

    kind = "embedding"
    example = "Embedding"
    one_hot = True

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding) and cls.why_not(module) is None

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        if isinstance(module, nn.EmbeddingBag):
            return (
                "an EmbeddingBag adds up the vectors of a bag in one kernel; use nn.Embedding and "
                "add them up outside"
            )
        if not isinstance(module, nn.Embedding):
            return None
        if type(module).forward is not nn.Embedding.forward:
            return (
                f"{type(module).__name__} has a forward of its own, so what it looks up is not "
                "known; use nn.Embedding and do the rest outside"
            )
        for name, what in (
            ("sparse", "its gradient is sparse"),
            ("max_norm", "it renormalises its table as it looks up"),
            ("scale_grad_by_freq", "its gradient is divided by how often a token comes"),
        ):
            if getattr(module, name):
                return f"nn.Embedding with {name}: {what}; leave {name} out"
        return None

    def shape(self, module: nn.Module) -> tuple[int, int]:
        ids, d = self.weight(module).shape
        return ids, d

    def bias(self, module: nn.Module) -> torch.Tensor | None:
        return None

    def weight_2d(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        assert isinstance(module, nn.Embedding)
        ids = first_tensor(args, kwargs)
        if ids is None:
            return None
        if module.padding_idx is not None:
            ids = ids.masked_fill(ids == module.padding_idx, -1)
        return ids.unsqueeze(-1)

    def queries(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor:
        return _one_hot(module, first_tensor(args, kwargs))

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        return nearest_node(output.grad_fn, weight, direct=True)

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:
            if input.is_floating_point() or input.is_complex():
                raise ShapeError(f"nn.Embedding takes integer ids, not {input.dtype}")
            ids, which = torch.unique(input, return_inverse=True)  # equal ids, equal outputs
            return product(_one_hot(module, ids))[which]

        return forward


def _one_hot(module: nn.Module, ids: torch.Tensor | None) -> torch.Tensor:
    """float32 [..., ids of the table]."""
    assert isinstance(module, nn.Embedding)
    if ids is None:
        raise ShapeError(
            "an Embedding was called without a tensor as its first argument or by name"
        )
    count = len(module.weight)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ShapeError(f"ids are {int(ids.min())} to {int(ids.max())}; the table has {count:,}")
    return nn.functional.one_hot(ids.long(), count).float()
