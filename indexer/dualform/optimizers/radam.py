"""torch.optim.RAdam: Adam that steps by momentum alone until its second moment can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import (
    Family,
    Transition,
    Whole,
    bias_correction,
    counts_in_float32,
    number,
    same_names,
    seen,
)


class RAdamSettings(NamedTuple):
    """What RAdam's step depends on; `nth` is the parameter's own count of steps, from 1, and
    `float32` whether torch has bias corrections of single precision."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool
    nth: int
    float32: bool = False


class RAdam(Family):
    """RAdam (Liu et al., 2020), with coupled or decoupled weight decay."""

    name = "radam"
    classes = ("torch.optim.radam.RAdam",)
    settings_type = RAdamSettings
    buffers = same_names("exp_avg", "exp_avg_sq")
    needs = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> RAdamSettings:
        return RAdamSettings(
            number(group["lr"]),
            number(group["betas"][0]),
            number(group["betas"][1]),
            number(group["eps"]),
            number(group["weight_decay"]),
            bool(group["maximize"]),
            bool(group.get("decoupled_weight_decay", False)),
            nth,
            counts_in_float32(group),
        )

    def follows_whole(self, settings: RAdamSettings) -> bool:
        return settings.weight_decay != 0 and not settings.decoupled

    def transition(
        self, settings: RAdamSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, eps, decay, maximize, decoupled, nth, float32 = settings
        coupled = 0.0 if decoupled else decay
        sign = -1.0 if maximize else 1.0
        adjusted = seen(gradient, maximize, coupled, whole)
        second = whole["exp_avg_sq"].mul_(beta2).addcmul_(adjusted, adjusted, value=1 - beta2)
        step_size = lr / bias_correction(beta1, nth, float32)
        rectified = rectification(beta2, nth, float32)
        wm: float | torch.Tensor = -step_size
        if rectified is not None:
            factor = -step_size * rectified * bias_correction(beta2, nth, float32) ** 0.5
            wm = second.sqrt().add_(eps).reciprocal_().mul_(factor)
        return Transition(
            mm=beta1,
            mw=(1 - beta1) * coupled,
            mg=(1 - beta1) * sign,
            ww=1 - lr * decay if decoupled else 1.0,
            wm=wm,
            wg=0.0,
        )


def rectification(beta2: float, nth: int, float32: bool) -> float | None:
    """The variance's rectification; None while the second moment is not used (section 3.2).

    The length is what is left of two numbers of some thousands: in float32, four digits.
    """
    longest = 2 / (1 - beta2) - 1
    dtype = torch.float32 if float32 else torch.float64
    count = torch.tensor(nth, dtype=dtype, device="cpu")
    power = beta2**count
    length = float(longest - 2 * count * power / (1 - power))
    if length <= 5:
        return None
    above = (length - 4) * (length - 2) * longest
    return float((above / ((longest - 4) * (longest - 2) * length)) ** 0.5)
