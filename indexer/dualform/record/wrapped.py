"""The optimizer that takes the steps, where a training framework hands out one that wraps it.

accelerate's and Lightning's wrappers imitate an optimizer without having been initialised as one:
they have no hooks of their own, and pass every step on.
"""

from __future__ import annotations

import torch

from dualform.record.errors import OptimizerError

_HOLDERS = ("optimizer", "_optimizer")
"""Under these names wrappers keep the real one."""


def unwrapped(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer itself, or the one at the core of its wrappers.

    One that has hooks of its own is what it is, even if it works on another (such as Lookahead).

    Raises:
        OptimizerError: There is none.
    """
    inner, seen = optimizer, 0
    while seen < 10:
        if isinstance(inner, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(inner):
            return inner
        held = [getattr(inner, name, None) for name in _HOLDERS]
        inner = next((o for o in held if isinstance(o, torch.optim.Optimizer)), None)
        seen += 1
    raise OptimizerError(
        f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}; of a wrapper, "
        "give the optimizer that it was made from"
    )
