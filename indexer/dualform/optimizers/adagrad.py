"""torch.optim.Adagrad: the sum of all squared gradients; the learning rate may fall by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class AdagradSettings(NamedTuple):
    """What Adagrad's step depends on; `nth` is the parameter's own count of steps, from 1."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    initial_accumulator: float
    maximize: bool
    nth: int


class Adagrad(Family):
    """Adagrad (Duchi et al., 2011), of dense gradients."""

    name = "adagrad"
    classes = ("torch.optim.adagrad.Adagrad",)
    settings_type = AdagradSettings
    buffers = same_names("sum")
    needs = ("sum",)

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> AdagradSettings:
        return AdagradSettings(
            number(group["lr"]),
            number(group["lr_decay"]),
            number(group["eps"]),
            number(group["weight_decay"]),
            number(group["initial_accumulator_value"]),
            bool(group["maximize"]),
            nth,
        )

    def fresh(self, settings: AdagradSettings) -> Mapping[str, float]:
        return {"sum": settings.initial_accumulator}

    def follows_whole(self, settings: AdagradSettings) -> bool:
        return settings.weight_decay != 0

    def transition(
        self, settings: AdagradSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, lr_decay, eps, decay, _, maximize, nth = settings
        adjusted = seen(gradient, maximize, decay, whole)
        squares = whole["sum"].addcmul_(adjusted, adjusted)
        step_size = lr / (1 + (nth - 1) * lr_decay)
        moves = squares.sqrt().add_(eps).reciprocal_().mul_(-step_size)
        ww = 1 + moves * decay if decay else 1.0
        return Transition(1.0, 0.0, 0.0, ww, 0.0, moves.neg_() if maximize else moves)
