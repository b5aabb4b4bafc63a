"""Reading an optimizer as it is at a step: its family, the ledger's rows, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import torch

from dualform.optimizers import family_of
from dualform.store.ledger import LedgerRow


class OptimizerView:
    """Reads one optimizer, whose groups may change while training runs.

    Args:
        optimizer: Any optimizer.

    Attributes:
        optimizer: As given.
        name: Its class's.
        family: What it belongs to (`dualform.optimizers`).
        why_not: Why its steps can't be read; None where they can.
        compiled: The coming step runs as compiled code, in the arithmetic of `capturable`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.family, self.name, self.why_not = family_of(optimizer)
        self.compiled = False
        self._counted = "nth" in self.family.settings_type._fields
        self._key: list[list[int]] = []
        self._group_of: dict[torch.Tensor, int] = {}
        self._settings: dict[tuple[Any, ...], Any] = {}
        self._counts: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self.refresh()

    @property
    def exact(self) -> bool:
        """Whether a family knows how the optimizer moves weights."""
        return self.why_not is None

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer updates this parameter; see `refresh`."""
        return parameter in self._group_of

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's momentum buffer, if the family has one and it is there yet."""
        name = self.family.momentum
        return None if name is None else self.buffers(parameter).get(name)

    def buffers(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameter's state tensors that are there by now, by the family's names."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        return {
            name: state[key]
            for name, key in self.family.buffers.items()
            if isinstance(state.get(key), torch.Tensor)
        }

    def taken(self, parameter: torch.Tensor) -> int | None:
        """How many steps the optimizer says that the parameter took; None where it can't tell."""
        return self._count(parameter, False) if self._counted else None

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
            settings = self._no_settings()
            return LedgerRow(step, name, settings, took_part=False)
        count = self._count(parameter, took_part) if self._counted else 0
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        scalars = [float(state[key]) for key in self.family.scalars if key in state]
        key = (index, count, parameter.dtype, *scalars)
        if key not in self._settings:
            group = self.optimizer.param_groups[index]
            if self.compiled:
                group = {**group, "capturable": True}
            self._settings[key] = self.family.read(group, count, parameter.dtype, state)
        settings = self._settings[key]
        first = (
            took_part
            and self.family.scalar
            and settings.momentum != 0
            and self.momentum(parameter) is None
        )
        return LedgerRow(step, name, settings, scale, took_part, first)

    def refresh(self) -> None:
        """Look at the groups again; due once per step."""
        groups = self.optimizer.param_groups
        key = [[id(group), *map(id, group["params"])] for group in groups]
        if key != self._key:
            self._key = key
            self._group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self._settings = {}

    def _count(self, parameter: torch.Tensor, took_part: bool) -> int:
        """How many steps the parameter will have taken after the coming one."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        step = state.get("step", 0)
        if isinstance(step, torch.Tensor) and step.device.type != "cpu":
            # Reading it would wait for the device: it is read once, and counted from there, until
            # another takes its place (load_state_dict).
            known, before = self._counts.get(parameter, (None, 0))
            if known is not step:
                before = int(step)
            self._counts[parameter] = (step, before + took_part)
        else:
            before = int(step)
        return before + took_part

    def _no_settings(self) -> Any:
        """Of a parameter that the optimizer does not hold at this step."""
        kinds = get_type_hints(self.family.settings_type)
        return self.family.settings_type(**{name: kind() for name, kind in kinds.items()})
