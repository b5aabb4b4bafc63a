"""torch.optim.NAdam: Adam with Nesterov's momentum, whose coefficient has a schedule of its own."""

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


class NAdamSettings(NamedTuple):
    """What NAdam's step depends on; `nth` is the parameter's own count of steps, from 1,
    `mu_product` the product of its momentum coefficients up to this step, as rounded by torch, and
    `float32` whether torch has bias corrections of single precision."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum_decay: float
    maximize: bool
    decoupled: bool
    mu_product: float
    nth: int
    float32: bool = False


class NAdam(Family):
    """NAdam (Dozat, 2016), with coupled or decoupled weight decay."""

    name = "nadam"
    classes = ("torch.optim.nadam.NAdam",)
    settings_type = NAdamSettings
    buffers = same_names("exp_avg", "exp_avg_sq")
    needs = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"
    scalars = ("mu_product",)

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> NAdamSettings:
        beta1, decay = number(group["betas"][0]), number(group["momentum_decay"])
        before = state.get(
            "mu_product", torch.ones((), dtype=torch.get_default_dtype(), device="cpu")
        )
        return NAdamSettings(
            number(group["lr"]),
            beta1,
            number(group["betas"][1]),
            number(group["eps"]),
            number(group["weight_decay"]),
            decay,
            bool(group["maximize"]),
            bool(group.get("decoupled_weight_decay", False)),
            number(before * _mu(beta1, decay, nth)),
            nth,
            counts_in_float32(group),
        )

    def follows_whole(self, settings: NAdamSettings) -> bool:
        return settings.weight_decay != 0 and not settings.decoupled

    def transition(
        self, settings: NAdamSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, eps, decay, momentum_decay, maximize, decoupled, product, nth, float32 = (
            settings
        )
        coupled = 0.0 if decoupled else decay
        sign = -1.0 if maximize else 1.0
        adjusted = seen(gradient, maximize, coupled, whole)
        second = whole["exp_avg_sq"].mul_(beta2).addcmul_(adjusted, adjusted, value=1 - beta2)
        per_unit = second.div(bias_correction(beta2, nth, float32)).sqrt_().add_(eps).reciprocal_()
        mu = _mu(beta1, momentum_decay, nth)
        mu_next = _mu(beta1, momentum_decay, nth + 1)
        of_gradient = per_unit * (-lr * (1 - mu) / (1 - product))
        of_momentum = per_unit.mul_(-lr * mu_next / (1 - product * mu_next))
        return Transition(
            mm=beta1,
            mw=(1 - beta1) * coupled,
            mg=(1 - beta1) * sign,
            ww=1 - lr * decay if decoupled else 1 + coupled * of_gradient if coupled else 1.0,
            wm=of_momentum,
            wg=of_gradient * sign,
        )


def _mu(beta1: float, decay: float, nth: int) -> float:
    """The momentum coefficient of a step."""
    return beta1 * (1 - 0.5 * float(0.96 ** (nth * decay)))
