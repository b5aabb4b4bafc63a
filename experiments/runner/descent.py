"""A variant's optimizer, schedule and clipping: what both training loops do after backward."""

from __future__ import annotations

import math

import torch
from torch import nn

from runner.config import Variant


class Descent:
    """Moves a model's weights as a variant says.

    Args:
        variant: Its settings.
        model: Whose parameters.
        steps: How many there will be, for the schedule.
    """

    def __init__(self, variant: Variant, model: nn.Module, steps: int) -> None:
        self.optimizer: torch.optim.Optimizer
        self._model, self._clip = model, variant.clip
        parameters, lr, decay = model.parameters(), variant.lr, variant.weight_decay
        if variant.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
        else:
            self.optimizer = torch.optim.SGD(
                parameters, lr=lr, momentum=variant.momentum, weight_decay=decay
            )
        warm_up = variant.warm_up
        self._schedule = None
        if warm_up:
            self._schedule = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer,
                lambda s: min(1.0, (s + 1) / warm_up) * (0.5 + 0.5 * math.cos(math.pi * s / steps)),
            )

    def step(self) -> None:
        """Clip the gradients that backward left, and take a step."""
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self.optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
