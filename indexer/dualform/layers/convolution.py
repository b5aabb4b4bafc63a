"""`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`: a product with every patch of the input.

The key is a patch, [channels, *kernel] flattened, the value the negative gradient at the output's
channels in the patch's place, and W the weight flattened to [d_out, channels * kernel]: then the
output at a place is W key + b, and the weight's gradient the sum over patches. A row per example
and place; `slot` is the example, `position` counts the places in the output's order.

In groups, each multiplies its own channels by its own rows of W: [d_out, channels / groups *
kernel]. A row is then of one group: its patch, and values that are zero for the other groups'
units. `position` counts the places of the first group, then of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from dualform.layers.base import (
    Forward,
    Product,
    ProductKind,
    ShapeError,
    Use,
    Windows,
    first_tensor,
    nearest_node,
)

_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
MOST_GROUPS = 32
"""A row has a value for the units of all groups, so values take as many times the bytes."""

_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Convolution(ProductKind):
    """Convolutions with any stride, padding and dilation, in up to `MOST_GROUPS` groups."""

    kind = "convolution"
    example = "Conv1d, Conv2d, Conv3d"

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return isinstance(module, _TYPES) and cls.why_not(module) is None

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        if not isinstance(module, _TYPES):
            return None
        base = next(kind for kind in _TYPES if isinstance(module, kind))
        here = type(module)
        if here.forward is not base.forward or here._conv_forward is not base._conv_forward:
            return (
                f"{here.__name__} has a forward of its own, so what its weight multiplies is not "
                f"known; use nn.{base.__name__}"
            )
        if module.groups > MOST_GROUPS:
            return (
                f"a convolution in {module.groups} groups has {module.groups} rows for each place, "
                f"all with values for every unit; up to {MOST_GROUPS} groups are recorded"
            )
        return None

    def shape(self, module: nn.Module) -> tuple[int, int]:
        weight = self.weight(module)
        return weight.shape[1:].numel(), weight.shape[0]

    def weight_2d(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.flatten(1)

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        given = first_tensor(args, kwargs)
        if given is None:
            return None
        x, windows = _windows(_convolution(module), given)
        return windows.cut(x) if windows.batched else windows.cut(x)[0]

    def uses(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Sequence[Use]:
        given = first_tensor(args, kwargs)
        if given is None:
            return super().uses(module, args, kwargs, output, weight, bias)  # which says so
        x, windows = _windows(_convolution(module), given)
        node = self.node(output, weight) if bias is None else self.bias_node(output, bias)
        return (Use(x, node, partial(self.values, module), windows=windows),)

    def values(self, module: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
        convolution = _convolution(module)
        axes, groups = len(convolution.kernel_size), convolution.groups
        if groups == 1:
            return gradient.movedim(-1 - axes, -1)
        given = gradient.flatten(-axes).unflatten(-2, (groups, -1))
        values: torch.Tensor = given.new_zeros(
            *given.shape[:-2], given.shape[-1], groups, given.shape[-2]
        )
        # [..., group, places, group, units of a group]: where both are the same.
        torch.diagonal(values, 0, -4, -2).copy_(given.movedim(-3, -1).transpose(-2, -3))
        return values.flatten(-2)

    def node(self, output: torch.Tensor, weight: torch.Tensor) -> Node | None:
        return nearest_node(output.grad_fn, weight, direct=True)

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        convolution = _convolution(module)

        def forward(input: torch.Tensor) -> torch.Tensor:
            x, windows = _windows(convolution, input)
            patches, places = windows.cut(x), _places(windows, x)
            found = product(patches if windows.batched else patches[0])
            if convolution.groups > 1:
                of_groups = found.unflatten(-2, (convolution.groups, -1))
                of_groups = of_groups.unflatten(-1, (convolution.groups, -1))
                found = torch.diagonal(of_groups, 0, -4, -2).movedim(-1, -2).flatten(-2)
            found = found.movedim(-1, -2)
            return found.reshape(*found.shape[:-1], *places)

        return forward


def _convolution(module: nn.Module) -> _Convolution:
    assert isinstance(module, _TYPES)
    return module


def _windows(module: _Convolution, x: torch.Tensor) -> tuple[torch.Tensor, Windows]:
    """The input of a call, with an axis for the examples, and what the kernel sees of it.

    Args:
        module: The convolution.
        x: [batch, channels, *size], or without the batch.

    Raises:
        ShapeError: The convolution takes no such tensor.
    """
    axes = len(module.kernel_size)
    batched = x.dim() == axes + 2
    if not (batched or x.dim() == axes + 1) or x.shape[-1 - axes] != module.in_channels:
        raise ShapeError(
            f"the input has shape {list(x.shape)}; {module} takes [batch, {module.in_channels}, "
            f"{', '.join(['size'] * axes)}]"
        )
    windows = Windows(
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(module.dilation),
        module.groups,
        _padding(module),
        module.padding_mode,
        batched,
        partial(_patches, module),
    )
    x = x if batched else x[None]
    if min(_places(windows, x)) < 1:
        raise ShapeError(f"the input is smaller than the kernel of {module}")
    return x, windows


def _places(windows: Windows, x: torch.Tensor) -> tuple[int, ...]:
    """How many places the kernel has on each axis of [batch, channels, *size]."""
    axes = zip(
        x.shape[2:],
        windows.padding,
        windows.kernel,
        windows.stride,
        windows.dilation,
        strict=True,
    )
    return tuple(
        (size + before + behind - dilation * (kernel - 1) - 1) // stride + 1
        for size, (before, behind), kernel, stride, dilation in axes
    )


def _patches(module: _Convolution, x: torch.Tensor) -> torch.Tensor:
    """What the kernel sees in each place of [batch, channels, *size]: [batch, groups * places,
    channels / groups * kernel]."""
    axes = len(module.kernel_size)
    pads = [pad for both in reversed(_padding(module)) for pad in both]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(x.detach(), pads, mode)
    steps = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(steps, 2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    x = x.unflatten(1, (module.groups, -1))
    return x.movedim(2, 2 + axes).flatten(2 + axes).flatten(1, 1 + axes)


def _padding(module: _Convolution) -> tuple[tuple[int, int], ...]:
    """How much the forward pads, before and behind each axis."""
    if module.padding_mode != "zeros":
        flat = module._reversed_padding_repeated_twice
        return tuple(zip(flat[-2::-2], flat[::-2], strict=True))
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if module.padding == "same":
        steps = zip(module.dilation, module.kernel_size, strict=True)
        missing = [dilation * (size - 1) for dilation, size in steps]
        return tuple((both // 2, both - both // 2) for both in missing)
    return tuple((pad, pad) for pad in module.padding)  # type: ignore[misc]
