"""What a kind of layer must say of itself. A subclass registers itself by being defined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import Node


class LayerKind(ABC):
    """How to record one type of module: what its input is, and where its weight multiplies it.

    Attributes:
        kind: The name in the manifest.
        module_type: The modules it is for.
    """

    kind: ClassVar[str]
    module_type: ClassVar[type[nn.Module]]
    registry: ClassVar[list[type[LayerKind]]] = []

    def __init_subclass__(cls) -> None:
        LayerKind.registry.append(cls)

    @classmethod
    def of(cls, module: nn.Module) -> LayerKind | None:
        """The kind that records this module, or None."""
        for kind in cls.registry:
            if isinstance(module, kind.module_type):
                return kind()
        return None

    @abstractmethod
    def shape(self, module: nn.Module) -> tuple[int, int]:
        """d_in, the length of a key, and d_out, the length of a value."""

    @abstractmethod
    def weight(self, module: nn.Module) -> torch.Tensor:
        """The weight; a leaf, unless the module is parametrised."""

    @abstractmethod
    def bias(self, module: nn.Module) -> torch.Tensor | None:
        """The bias, where there is one."""

    def leaves(self, module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weight and bias as the module holds them now: None for one that it has not, or computes.

        Never computes anything: a parametrisation may change its state when it is asked.
        """
        return leaf(module, "weight"), leaf(module, "bias")

    @abstractmethod
    def input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The input [..., d_in] of a call of the module; None where there is no such argument."""

    @abstractmethod
    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        """The autograd node that multiplies by the weight: its gradient is [rows, d_out]."""

    def bias_node(self, output: torch.Tensor, bias: torch.Tensor) -> Node | None:
        """The node that adds the bias: where to hook while the weight is frozen. None where this
        kind of layer can't tell; the bias's training is then not explained."""
        return None


def leaf(module: nn.Module, name: str) -> torch.Tensor | None:
    """A module's own parameter of this name; None where it is absent, or computed from others."""
    own = module._parameters
    if name in own:
        return own[name]
    computed = module._modules.get("parametrizations")
    if isinstance(computed, nn.ModuleDict) and name in computed:
        return None
    found = getattr(module, name, None)  # a property of the user's, which hands one on
    return found if isinstance(found, nn.Parameter) else None
