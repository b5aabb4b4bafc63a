"""LAMB, as timm.optim has it: Adam's direction, its length set by the weight's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names


class LambSettings(NamedTuple):
    """What LAMB's step depends on.

    Attributes:
        beta3: The share of a gradient that enters the first moment.
        coupled: Weight decay that is part of the update, whose length is then set.
        decayed: What a weight loses by decay that is not.
        corrected: Both moments are corrected for their start at zero.
        adapted: The update's length is set.
        clipped: To no more than its own.
        steps: Steps of the parameter's group after this one.
    """

    lr: float
    beta1: float
    beta2: float
    beta3: float
    eps: float
    coupled: float
    decayed: float
    corrected: bool
    adapted: bool
    clipped: bool
    steps: int


class Lamb(Family):
    """LAMB (You et al., 2020), with the gradients clipped before the step, not in it."""

    name = "lamb"
    classes = ("timm.optim.lamb.Lamb",)
    settings_type = LambSettings
    buffers = same_names("exp_avg", "exp_avg_sq")
    needs = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"
    elementwise = False

    def why_not(self, optimizer: torch.optim.Optimizer) -> str | None:
        if optimizer.defaults.get("max_grad_norm") is not None:
            return (
                "it clips gradients within its step, where nobody sees by how much; make it with "
                "max_grad_norm=None and call clip_grad_norm_ before the step, which does the same"
            )
        for option in ("caution", "corrected_weight_decay"):
            if any(group.get(option) for group in optimizer.param_groups):
                return f"{option}=True is not followed"
        return super().why_not(optimizer)

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> LambSettings:
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        beta1, decoupled = number(group["betas"][0]), bool(group.get("decoupled_decay", False))
        return LambSettings(
            lr,
            beta1,
            number(group["betas"][1]),
            1 - beta1 if group["grad_averaging"] else 1.0,
            number(group["eps"]),
            0.0 if decoupled else decay,
            lr * decay if decoupled else 0.0,
            bool(group["bias_correction"]),
            decay != 0 or bool(group["always_adapt"]),
            bool(group["trust_clip"]),
            int(group.get("step", 0)) + 1,
        )

    def follows_whole(self, settings: LambSettings) -> bool:
        return True

    def transition(
        self, settings: LambSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, beta3, eps, coupled, decayed, corrected, adapted, clipped, count = (
            settings
        )
        of_first, of_second = (1 - beta1**count, 1 - beta2**count) if corrected else (1.0, 1.0)
        second = whole["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        per_unit = second.sqrt().div_(of_second**0.5).add_(eps).mul_(of_first).reciprocal_()
        if adapted:
            momentum = whole["exp_avg"].mul(beta1).add_(gradient, alpha=beta3)
            weight = whole["weight"] * (1 - decayed)
            update = momentum.mul_(per_unit).add_(weight, alpha=coupled)
            length, of_update = float(weight.norm()), float(update.norm())
            trust = length / of_update if length > 0 and of_update > 0 else 1.0
            lr *= min(trust, 1.0) if clipped else trust
        return Transition(
            mm=beta1,
            mw=0.0,
            mg=beta3,
            ww=1 - decayed - lr * coupled,
            wm=per_unit.mul_(-lr),
            wg=0.0,
        )
