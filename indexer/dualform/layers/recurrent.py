"""What `LSTM` and `GRU` share: modules of two products, ih and hh, that stand in for fused ones."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from dualform.layers.base import ShapeError, UnsupportedModuleError


class TwoProducts(Protocol):
    """A layer whose gates are products with x_t, ih, and with h_{t-1}, hh."""

    ih: nn.Linear
    hh: nn.Linear


def check_single(fused: nn.RNNBase, name: str) -> None:
    """Raise UnsupportedModuleError where a fused module is more than one plain layer.

    Args:
        fused: torch's.
        name: Of its class, and of ours that takes it over.
    """
    if fused.num_layers != 1 or fused.bidirectional or fused.proj_size or fused.dropout:
        raise UnsupportedModuleError(
            f"{fused} can't be taken over as a whole: only one layer, one direction, without "
            f"projection and dropout; stack several {name}, with nn.Dropout between them"
        )
    if not fused.batch_first:
        raise UnsupportedModuleError(
            f"this nn.{name} takes [time, batch, input]; make it with batch_first=True, and "
            "transpose what it is given and gives"
        )


def check_input(x: torch.Tensor, input_size: int, name: str) -> None:
    """Raise ShapeError where x is not [batch, time, input_size] with a time step."""
    if x.dim() != 3 or x.shape[2] != input_size or x.shape[1] == 0:
        raise ShapeError(
            f"x has shape {list(x.shape)}; {name} takes [batch, time, {input_size}] with at "
            f"least one time step (as nn.{name} with batch_first=True)"
        )


def start(module: TwoProducts, hidden_size: int) -> None:
    """Weights and biases as torch's fused modules start."""
    for product in (module.ih, module.hh):
        for parameter in product.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)


@torch.no_grad()
def take_weights(module: TwoProducts, fused: nn.RNNBase) -> None:
    """Copy the weights of torch's fused layer."""
    for ours, theirs in _pairs(module, fused):
        ours.copy_(theirs)


@torch.no_grad()
def give_weights(module: TwoProducts, fused: nn.RNNBase) -> None:
    """Copy them back."""
    for ours, theirs in _pairs(module, fused):
        theirs.copy_(ours)


def _pairs(module: TwoProducts, fused: nn.RNNBase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (parameter, getattr(fused, f"{name}_{suffix}"))
        for part, suffix in ((module.ih, "ih_l0"), (module.hh, "hh_l0"))
        for name, parameter in part.named_parameters()
    ]
