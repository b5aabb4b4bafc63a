"""torch.optim.Rprop: steps by the gradient's sign, of sizes that grow and shrink by themselves.

sign(g) = g / |g|: a part of a gradient takes its share of the whole's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class RpropSettings(NamedTuple):
    """What Rprop's step depends on; `lr` is the size of the first step, `nth` the parameter's own
    count of steps, from 1, and `smallest` what products of gradients must reach not to be 0 in the
    parameter's precision."""

    lr: float
    eta_minus: float
    eta_plus: float
    step_size_min: float
    step_size_max: float
    smallest: float
    maximize: bool
    nth: int


class Rprop(Family):
    """Rprop (Riedmiller and Braun, 1993), as torch has it: no step where the sign changed."""

    name = "rprop"
    classes = ("torch.optim.rprop.Rprop",)
    settings_type = RpropSettings
    buffers = same_names("prev", "step_size")
    needs = ("prev", "step_size")

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> RpropSettings:
        limits = torch.finfo(dtype)
        return RpropSettings(
            number(group["lr"]),
            number(group["etas"][0]),
            number(group["etas"][1]),
            number(group["step_sizes"][0]),
            number(group["step_sizes"][1]),
            limits.smallest_normal * limits.eps / 2,
            bool(group["maximize"]),
            nth,
        )

    def fresh(self, settings: RpropSettings) -> Mapping[str, float]:
        return {"step_size": settings.lr}

    def transition(
        self, settings: RpropSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        _, minus, plus, least, most, smallest, maximize, _ = settings
        adjusted = seen(gradient, maximize, 0.0, whole, writable=True)
        product = adjusted * whole["prev"]
        turned = product < -smallest
        factors = torch.ones_like(product).masked_fill_(product > smallest, plus)
        factors.masked_fill_(turned, minus)
        size = whole["step_size"].mul_(factors).clamp_(least, most)
        adjusted.masked_fill_(turned, 0.0)
        whole["prev"].copy_(adjusted)
        moves = torch.where(adjusted == 0, 0.0, -size / adjusted.abs())
        return Transition(1.0, 0.0, 0.0, 1.0, 0.0, moves.neg_() if maximize else moves)
