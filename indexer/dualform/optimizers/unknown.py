"""An optimizer that no family knows: its ledger holds learning rates, and no part can be told.

The initial part is then the initial weight, and all that moved since is the remainder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualform.optimizers.family import Family, Transition, Whole, number


class UnknownSettings(NamedTuple):
    """What nearly every optimizer has."""

    lr: float


class Unknown(Family):
    """No family."""

    name = "unknown"
    settings_type = UnknownSettings
    elementwise = False
    explains = False

    def read(
        self, group: Mapping[str, Any], nth: int, dtype: torch.dtype, state: Mapping[str, Any]
    ) -> UnknownSettings:
        try:
            return UnknownSettings(number(group.get("lr", 0.0)))
        except (TypeError, ValueError):
            return UnknownSettings(float("nan"))

    def transition(
        self, settings: UnknownSettings, first: bool, whole: Whole, gradient: torch.Tensor
    ) -> Transition:
        raise NotImplementedError("how an optimizer of no known family moves parts is not known")
