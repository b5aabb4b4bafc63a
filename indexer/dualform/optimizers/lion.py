"""Lion, as timm.optim has it: steps of one size, by the sign of the momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class LionSettings(NamedTuple):
    """What Lion's step depends on."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


class Lion(Family):
    """Lion (Chen et al., 2023), with decoupled decay.

    The update sign(u), u = beta1 m + (1 - beta1) g, is u / |u|: linear in the gradients once the
    whole run's |u| is held fixed. m is the buffer before the step; a transition knows the one after
    it, m' = beta2 m + (1 - beta2) g, so u = (beta1 m' + (beta2 - beta1) g) / beta2.
    """

    name = "lion"
    classes = ("timm.optim.lion.Lion",)
    settings_type = LionSettings
    buffers = same_names("exp_avg")
    momentum = "exp_avg"
    needs = ("exp_avg",)
    continuous = False
    single = False  # a sign turns where its sum crosses zero

    def why_not(self, optimizer: torch.optim.Optimizer) -> str | None:
        if any(number(group["betas"][1]) == 0 for group in optimizer.param_groups):
            return "its second beta is 0, so its buffer does not say what the update was"
        if any(group.get("caution") for group in optimizer.param_groups):
            return "caution=True leaves parts of an update out by the mean of a whole weight"
        return super().why_not(optimizer)

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> LionSettings:
        return LionSettings(
            number(group["lr"]),
            number(group["betas"][0]),
            number(group["betas"][1]),
            number(group["weight_decay"]),
            bool(group.get("maximize", False)),
        )

    def follows_whole(self, settings: LionSettings) -> bool:
        return True  # |u| is of the whole's momentum

    def transition(
        self, settings: LionSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, decay, maximize = settings
        sign = -1.0 if maximize else 1.0
        adjusted = seen(gradient, maximize, 0.0, whole)
        update = whole["exp_avg"].mul(beta1).add_(adjusted, alpha=1 - beta1)
        moves = torch.where(update == 0, 0.0, -lr / update.abs())
        return Transition(
            mm=beta2,
            mw=0.0,
            mg=(1 - beta2) * sign,
            ww=1 - lr * decay,
            wm=moves * (beta1 / beta2),
            wg=moves.mul_((beta2 - beta1) / beta2 * sign),
        )
