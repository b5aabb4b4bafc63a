"""Reading torch.optim.SGD as it is at a step: the ledger's rows, and the momentum buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dualform.store.ledger import LedgerRow


class OptimizerView:
    """Reads one optimizer, whose groups may change while training runs.

    Args:
        optimizer: Any optimizer; only torch.optim.SGD itself is understood.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self.exact = type(optimizer) is torch.optim.SGD
        self._key: tuple[tuple[int, int], ...] = ()
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[torch.Tensor, int] = {}

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer updates this parameter."""
        self.refresh()
        return parameter in self._group_of

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's momentum buffer, if it has one yet."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        buffer = state.get("momentum_buffer")
        return buffer if isinstance(buffer, torch.Tensor) else None

    def row(
        self, step: int, name: str, parameter: torch.Tensor, scale: float, took_part: bool
    ) -> LedgerRow:
        """The ledger's row of a parameter for the step that is about to run; see `refresh`."""
        index = self._group_of.get(parameter)
        if index is None:
            return LedgerRow(step, name, lr=0.0, took_part=False)
        group = self._groups[index]
        momentum = float(group.get("momentum", 0.0)) if self.exact else 0.0
        return LedgerRow(
            step=step,
            parameter=name,
            lr=float(group["lr"]),
            momentum=momentum,
            dampening=float(group.get("dampening", 0.0)),
            nesterov=bool(group.get("nesterov", False)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            maximize=bool(group.get("maximize", False)),
            scale=scale,
            took_part=took_part,
            first=took_part and momentum != 0 and self.momentum(parameter) is None,
        )

    def refresh(self) -> None:
        """Look at the groups again; due once per step."""
        groups = self.optimizer.param_groups
        key = tuple((id(group), len(group["params"])) for group in groups)
        if key != self._key:
            self._key, self._groups = key, list(groups)
            self._group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
