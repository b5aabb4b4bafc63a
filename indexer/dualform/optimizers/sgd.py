"""torch.optim.SGD: momentum, dampening, Nesterov, weight decay. One coefficient for each step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number


class SGDSettings(NamedTuple):
    """What torch.optim.SGD's step depends on."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False


class Numbers(NamedTuple):
    """A `Transition` whose factors are numbers."""

    mm: float
    mw: float
    mg: float
    ww: float
    wm: float
    wg: float


class SGD(Family):
    """The SGD family."""

    name = "sgd"
    classes = ("torch.optim.sgd.SGD",)
    settings_type = SGDSettings
    buffers = MappingProxyType({"momentum": "momentum_buffer"})
    momentum = "momentum"
    scalar = True

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> SGDSettings:
        return SGDSettings(
            number(group["lr"]),
            number(group["momentum"]),
            number(group["dampening"]),
            bool(group["nesterov"]),
            number(group["weight_decay"]),
            bool(group["maximize"]),
        )

    def transition(
        self, settings: SGDSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        return Transition(*self.numbers(settings, first))

    def numbers(self, settings: SGDSettings, first: bool) -> Numbers:
        """The same without a state: every factor is a number."""
        lr, momentum, dampening, nesterov, decay, maximize = settings
        sign = -1.0 if maximize else 1.0
        if momentum == 0:
            return Numbers(1.0, 0.0, 0.0, 1 - lr * decay, 0.0, -lr * sign)
        part = 1.0 if first else 1 - dampening
        kept = 0.0 if first else momentum
        if nesterov:
            return Numbers(
                kept, part * decay, part * sign, 1 - lr * decay, -lr * momentum, -lr * sign
            )
        return Numbers(kept, part * decay, part * sign, 1.0, -lr, 0.0)
