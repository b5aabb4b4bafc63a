"""torch.optim.RMSprop: plain, centered, with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class RMSpropSettings(NamedTuple):
    """What RMSprop's step depends on; `nth` is the parameter's own count of steps, from 1."""

    lr: float
    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    centered: bool
    maximize: bool
    nth: int


class RMSprop(Family):
    """RMSprop (Hinton, 2012); centered as in Graves (2013)."""

    name = "rmsprop"
    classes = ("torch.optim.rmsprop.RMSprop",)
    single = False  # centered: the mean square less the square of the mean
    settings_type = RMSpropSettings
    buffers = same_names("square_avg", "grad_avg", "momentum_buffer")
    needs = ("square_avg",)
    momentum = "momentum_buffer"

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> RMSpropSettings:
        return RMSpropSettings(
            number(group["lr"]),
            number(group["alpha"]),
            number(group["eps"]),
            number(group["weight_decay"]),
            number(group["momentum"]),
            bool(group["centered"]),
            bool(group["maximize"]),
            nth,
        )

    def follows_whole(self, settings: RMSpropSettings) -> bool:
        return settings.weight_decay != 0

    def transition(
        self, settings: RMSpropSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, alpha, eps, decay, momentum, centered, maximize, _ = settings
        adjusted = seen(gradient, maximize, decay, whole)
        square = whole["square_avg"].mul_(alpha).addcmul_(adjusted, adjusted, value=1 - alpha)
        if centered:
            mean = whole["grad_avg"].lerp_(adjusted, 1 - alpha)
            spread = square.addcmul(mean, mean, value=-1).sqrt_()
        else:
            spread = square.sqrt()
        per_unit = spread.add_(eps).reciprocal_()
        sign = -1.0 if maximize else 1.0
        if momentum > 0:
            decayed = per_unit * decay if decay else 0.0
            return Transition(momentum, decayed, per_unit.mul_(sign), 1.0, -lr, 0.0)
        decayed = 1 - per_unit * (lr * decay) if decay else 1.0
        return Transition(1.0, 0.0, 0.0, decayed, 0.0, per_unit.mul_(-lr * sign))
