"""torch.optim.Adam and AdamW, with AMSGrad, coupled or decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


class AdamSettings(NamedTuple):
    """What Adam's step depends on; `nth` is the parameter's own count of steps, from 1, and
    `float32` whether torch has bias corrections of single precision."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool
    nth: int
    float32: bool = False


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
            counts_in_float32(group),
        )

    def follows_whole(self, settings: AdamSettings) -> bool:
        return settings.weight_decay != 0 and not settings.decoupled

    def transition(
        self, settings: AdamSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, eps, decay, amsgrad, maximize, decoupled, nth, float32 = settings
        coupled = 0.0 if decoupled else decay
        sign = -1.0 if maximize else 1.0
        adjusted = seen(gradient, maximize, coupled, whole)
        second = whole["exp_avg_sq"].mul_(beta2).addcmul_(adjusted, adjusted, value=1 - beta2)
        if amsgrad:
            second = torch.maximum(whole["max_exp_avg_sq"], second, out=whole["max_exp_avg_sq"])
        # lr / (1 - beta1^n) over sqrt(v / (1 - beta2^n)) + eps, the corrections taken out of it
        # so that the second moment is passed over as seldom as can be.
        root = bias_correction(beta2, nth, float32) ** 0.5
        step_size = second.new_tensor(-lr * root / bias_correction(beta1, nth, float32))
        denominator = second.sqrt().add_(eps * root)
        return Transition(
            mm=beta1,
            mw=(1 - beta1) * coupled,
            mg=(1 - beta1) * sign,
            ww=1 - lr * decay if decoupled else 1.0,
            wm=torch.div(step_size, denominator, out=denominator),
            wg=0.0,
        )

    def transitions(
        self,
        settings: Sequence[AdamSettings],
        firsts: Sequence[bool],
        whole: Whole,
        gradients: torch.Tensor,
    ) -> list[Transition]:
        """All steps together but for the second moment's recurrence: an operation each."""
        if any(each.amsgrad for each in settings):
            return super().transitions(settings, firsts, whole, gradients)

        def column(values: Iterable[float]) -> torch.Tensor:
            return gradients.new_tensor(list(values)).reshape(-1, *[1] * (gradients.ndim - 1))

        moments = gradients.mul_(gradients).mul_(column(1 - each.beta2 for each in settings))
        second = whole["exp_avg_sq"]
        for moment, each in zip(moments.unbind(), settings, strict=True):
            second = moment.add_(second, alpha=each.beta2)
        whole["exp_avg_sq"] = second.clone()
        roots = column(
            bias_correction(each.beta2, each.nth, each.float32) ** 0.5 for each in settings
        )
        sizes = column(
            -each.lr / bias_correction(each.beta1, each.nth, each.float32) for each in settings
        ).mul_(roots)
        denominators = moments.sqrt_().add_(column(each.eps for each in settings) * roots)
        factors = torch.div(sizes, denominators, out=denominators).unbind()
        return [
            Transition(
                mm=each.beta1,
                mw=0.0,
                mg=(1 - each.beta1) * (-1.0 if each.maximize else 1.0),
                ww=1 - each.lr * each.weight_decay if each.decoupled else 1.0,
                wm=factor,
                wg=0.0,
            )
            for each, factor in zip(settings, factors, strict=True)
        ]
