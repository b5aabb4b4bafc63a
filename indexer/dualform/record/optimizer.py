"""Reading torch.optim.SGD as it is at a step: the ledger's rows, and the momentum buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dualform.record.wrapped import steps_as
from dualform.store.ledger import LedgerRow

_Settings = tuple[float, float, float, bool, float, bool]


class OptimizerView:
    """Reads one optimizer, whose groups may change while training runs.

    Args:
        optimizer: Any optimizer; only torch.optim.SGD itself is understood.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.exact = steps_as(optimizer, torch.optim.SGD)
        self.name = "SGD" if self.exact else type(optimizer).__name__
        self._key: list[list[int]] = []
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[torch.Tensor, int] = {}
        self._settings: list[_Settings] = []
        self.refresh()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer updates this parameter; see `refresh`."""
        return parameter in self._group_of

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's momentum buffer, if it has one yet."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        buffer = state.get("momentum_buffer")
        return buffer if isinstance(buffer, torch.Tensor) else None

    def kernel_scale(self) -> float:
        """What the step itself multiplies gradients by, before anything else.

        torch.amp.GradScaler leaves unscaling to fused kernels: 1 / loss scale. 0 where the kernel
        was told that the gradients are not finite, and will not step.
        """
        scale = getattr(self.optimizer, "grad_scale", None)
        found = getattr(self.optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor) and bool(found):
            return 0.0
        return 1 / float(scale) if isinstance(scale, torch.Tensor) else 1.0

    def row(
        self, step: int, name: str, parameter: torch.Tensor, scale: float, took_part: bool
    ) -> LedgerRow:
        """The ledger's row of a parameter for the step that is about to run; see `refresh`."""
        index = self._group_of.get(parameter)
        if index is None:
            return LedgerRow(step, name, lr=0.0, took_part=False)
        settings = self._settings[index]
        first = took_part and settings[1] != 0 and self.momentum(parameter) is None
        return LedgerRow(step, name, *settings, scale, took_part, first)

    def refresh(self) -> None:
        """Look at the groups again; due once per step."""
        groups = self.optimizer.param_groups
        key = [[id(group), *map(id, group["params"])] for group in groups]
        if key != self._key:
            self._key, self._groups = key, list(groups)
            self._group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self._settings = [self._read(group) for group in groups]

    def _read(self, group: Mapping[str, Any]) -> _Settings:
        """lr, momentum, dampening, nesterov, weight_decay, maximize: the ledger's order."""
        return (
            float(group["lr"]),
            float(group.get("momentum", 0.0)) if self.exact else 0.0,
            float(group.get("dampening", 0.0)),
            bool(group.get("nesterov", False)),
            float(group.get("weight_decay", 0.0)),
            bool(group.get("maximize", False)),
        )
