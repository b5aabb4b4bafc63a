"""torch.optim.Adafactor: a second moment in two factors, steps as large as the weight's own size.

Of a vector, such as a bias, the second moment is kept whole. Both the weight's and the update's
root mean square set the step, so an element's transition depends on all elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number, same_names, seen


class AdafactorSettings(NamedTuple):
    """What Adafactor's step depends on; `nth` is the parameter's own count of steps, from 1."""

    lr: float
    beta2_decay: float
    eps1: float
    eps2: float
    d: float
    weight_decay: float
    maximize: bool
    nth: int


class Adafactor(Family):
    """Adafactor (Shazeer and Stern, 2018), as torch has it: no first moment, decoupled decay."""

    name = "adafactor"
    classes = ("torch.optim.Adafactor", "torch.optim._adafactor.Adafactor")
    settings_type = AdafactorSettings
    buffers = same_names("row_var", "col_var", "variance")
    elementwise = False

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> AdafactorSettings:
        eps1, eps2 = group["eps"]
        return AdafactorSettings(
            number(group["lr"]),
            number(group["beta2_decay"]),
            torch.finfo(dtype).eps if eps1 is None else number(eps1),
            number(eps2),
            number(group["d"]),
            number(group["weight_decay"]),
            bool(group["maximize"]),
            nth,
        )

    def blank(self, weight: torch.Tensor) -> Whole:
        if weight.dim() < 2:
            return {"variance": torch.zeros_like(weight)}
        rows = torch.zeros_like(weight[..., :1])
        return {"row_var": rows, "col_var": torch.zeros_like(weight[..., :1, :])}

    def follows_whole(self, settings: AdafactorSettings) -> bool:
        return True

    def transition(
        self, settings: AdafactorSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        lr, beta2_decay, eps1, eps2, d, decay, maximize, nth = settings
        new, count = nth**beta2_decay, gradient.numel() ** 0.5
        size = max(eps2, float(whole["weight"].norm()) / count) * min(lr, nth**-0.5)
        square = gradient.square()
        if gradient.dim() > 1:
            rows = whole["row_var"].lerp_(square.mean(-1, keepdim=True), new)
            columns = whole["col_var"].lerp_(square.mean(-2, keepdim=True), new)
            second = (rows @ columns).div_(rows.mean(-2, keepdim=True).clamp_(min=eps1))
        else:
            second = whole["variance"].lerp_(square, new).clone()
        moves = second.clamp_(min=eps1 * eps1).rsqrt_()
        update = seen(gradient, maximize, 0.0, whole) * moves
        clipped = max(1.0, float(update.norm()) / (count * d))
        moves.mul_(size / clipped if maximize else -size / clipped)
        return Transition(1.0, 0.0, 0.0, 1 - lr * decay if decay else 1.0, 0.0, moves)
