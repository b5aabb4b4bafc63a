"""torch.optim.Adamax: Adam with the largest gradient, decayed, in place of the second moment."""

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


class AdamaxSettings(NamedTuple):
    """What Adamax's step depends on; `nth` is the parameter's own count of steps, from 1, and
    `float32` whether torch has bias corrections of single precision."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    nth: int
    float32: bool = False


class Adamax(Family):
    """Adamax (Kingma and Ba, 2015, section 7.1)."""

    name = "adamax"
    classes = ("torch.optim.adamax.Adamax",)
    settings_type = AdamaxSettings
    buffers = same_names("exp_avg", "exp_inf")
    needs = ("exp_avg", "exp_inf")
    momentum = "exp_avg"

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> AdamaxSettings:
        return AdamaxSettings(
            number(group["lr"]),
            number(group["betas"][0]),
            number(group["betas"][1]),
            number(group["eps"]),
            number(group["weight_decay"]),
            bool(group["maximize"]),
            nth,
            counts_in_float32(group),
        )

    def follows_whole(self, settings: AdamaxSettings) -> bool:
        return settings.weight_decay != 0

    def transition(
        self, settings: AdamaxSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta1, beta2, eps, decay, maximize, nth, float32 = settings
        adjusted = seen(gradient, maximize, decay, whole)
        largest = whole["exp_inf"].mul_(beta2)
        torch.maximum(largest, adjusted.abs().add_(eps), out=largest)
        return Transition(
            mm=beta1,
            mw=(1 - beta1) * decay,
            mg=(1 - beta1) * (-1.0 if maximize else 1.0),
            ww=1.0,
            wm=largest.reciprocal().mul_(-lr / bias_correction(beta1, nth, float32)),
            wg=0.0,
        )
