"""torch.optim.Adam and AdamW, with AMSGrad, coupled or decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class AdamSettings(NamedTuple):
    """What Adam's step depends on; `nth` is the parameter's own count of steps, from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool
    nth: int


class Adam(Family):
    """Adam (Kingma and Ba, 2015), AMSGrad, and AdamW (Loshchilov and Hutter, 2019)."""

    name = "adam"
    classes = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
    settings_type = AdamSettings
    buffers = same_names("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    needs = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> AdamSettings:
        decoupled = group.get("decoupled_weight_decay", False)
        return AdamSettings(
            number(group["lr"]),
            number(group["betas"][0]),
            number(group["betas"][1]),
            number(group["eps"]),
            number(group["weight_decay"]),
            bool(group["amsgrad"]),
            bool(group["maximize"]),
            bool(decoupled),
            nth,
        )

    def follows_whole(self, settings: AdamSettings) -> bool:
        return settings.weight_decay != 0 and not settings.decoupled

    def transition(
        self, settings: AdamSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, eps, decay, amsgrad, maximize, decoupled, nth = settings
        coupled = 0.0 if decoupled else decay
        sign = -1.0 if maximize else 1.0
        adjusted = seen(gradient, maximize, coupled, whole)
        second = whole["exp_avg_sq"].mul_(beta2).addcmul_(adjusted, adjusted, value=1 - beta2)
        if amsgrad:
            second = torch.maximum(whole["max_exp_avg_sq"], second, out=whole["max_exp_avg_sq"])
        step_size = lr / (1 - beta1**nth)
        denominator = second.sqrt().div_((1 - beta2**nth) ** 0.5).add_(eps)
        return Transition(
            mm=beta1,
            mw=(1 - beta1) * coupled,
            mg=(1 - beta1) * sign,
            ww=1 - lr * decay if decoupled else 1.0,
            wm=denominator.reciprocal_().mul_(-step_size),
            wg=0.0,
        )
