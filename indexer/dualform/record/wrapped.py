"""What a recorder is given: the model, the optimizer that takes the steps, and where it records.

The optimizer is found where a training framework hands out one that wraps it:
accelerate's and Lightning's wrappers imitate an optimizer without having been initialised as one:
they have no hooks of their own, and pass every step on.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from dualform.record.errors import LayerSelectionError, OptimizerError, OptionError
from dualform.record.sink import Sink

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


def check_given(model: Any, path_or_sink: Any) -> None:
    """Look at the other two.

    Raises:
        LayerSelectionError: `model` is none, or several devices have copies of it.
        OptionError: `path_or_sink` is neither.
    """
    if not isinstance(model, nn.Module):
        raise LayerSelectionError(
            f"model must be a torch.nn.Module, not {type(model).__name__}: "
            "Recorder(model, optimizer, path); of a trainer, give the model that it trains"
        )
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise LayerSelectionError(
            f"DataParallel runs copies of the model on {len(model.device_ids)} devices, whose rows "
            "are not seen; give one device (device_ids=[0]), or use DistributedDataParallel, "
            "where each process records its own rows"
        )
    if not isinstance(path_or_sink, (str, os.PathLike, Sink)):
        raise OptionError(
            f"path_or_sink={path_or_sink!r}: it is the path of a folder that does not exist yet, "
            "or a sink"
        )
