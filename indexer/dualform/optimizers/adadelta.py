"""torch.optim.Adadelta: the ratio of two accumulators, of updates and of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class AdadeltaSettings(NamedTuple):
    """What Adadelta's step depends on; `nth` is the parameter's own count of steps, from 1."""

    lr: float
    rho: float
    eps: float
    weight_decay: float
    maximize: bool
    nth: int


class Adadelta(Family):
    """Adadelta (Zeiler, 2012)."""

    name = "adadelta"
    classes = ("torch.optim.adadelta.Adadelta",)
    settings_type = AdadeltaSettings
    buffers = same_names("square_avg", "acc_delta")
    needs = ("square_avg", "acc_delta")

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> AdadeltaSettings:
        return AdadeltaSettings(
            number(group["lr"]),
            number(group["rho"]),
            number(group["eps"]),
            number(group["weight_decay"]),
            bool(group["maximize"]),
            nth,
        )

    def follows_whole(self, settings: AdadeltaSettings) -> bool:
        return settings.weight_decay != 0

    def transition(
        self, settings: AdadeltaSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, rho, eps, decay, maximize, _ = settings
        adjusted = seen(gradient, maximize, decay, whole)
        square = whole["square_avg"].mul_(rho).addcmul_(adjusted, adjusted, value=1 - rho)
        ratio = whole["acc_delta"].add(eps).sqrt_().div_(square.add(eps).sqrt_())
        delta = ratio * adjusted
        whole["acc_delta"].mul_(rho).addcmul_(delta, delta, value=1 - rho)
        moves = ratio.mul_(-lr)
        ww = 1 + moves * decay if decay else 1.0
        return Transition(1.0, 0.0, 0.0, ww, 0.0, moves.neg_() if maximize else moves)
