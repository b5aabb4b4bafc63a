"""What the layers of one recorder share while they capture rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from dualform.record.annotations import Annotations
from dualform.record.buffers import Buffer, Pool
from dualform.record.passes import Pass

if TYPE_CHECKING:
    from dualform.record.capture import LayerCapture

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


_Value = tuple[Pass, Buffer]
"""A pass, and what a backward brought it."""


class Tape:
    """What the layers of one recorder share: memory, annotation, order, and pending values.

    Attributes:
        share: What part of the sum over all ranks' rows a gradient is; 1 of a run in one process.
        averaged: Called after a backward, once gradients were averaged over ranks.
    """

    def __init__(self, pool: Pool, annotations: Annotations, share: float = 1.0) -> None:
        self.pool = pool
        self.annotations = annotations
        self.share = share
        self.averaged: Callable[[], None] | None = None
        self.numbers = itertools.count()
        self._pending: dict[int, dict[LayerCapture, list[_Value]]] = {}

    def defer(self, layer: LayerCapture, value: _Value) -> None:
        """Keep a value until the running backward has accumulated into the layer's weight."""
        task = _graph_task()
        layers = self._pending.get(task)
        if layers is None:
            layers = self._pending[task] = {}
            # A backward that never reaches the weight must not hold memory until the step.
            Variable._execution_engine.queue_callback(lambda: self._forget(task))
        layers.setdefault(layer, []).append(value)

    def accumulated(self, layer: LayerCapture) -> Sequence[_Value]:
        """The layer's values, now that the running backward has accumulated into its weight."""
        return self._pending.get(_graph_task(), {}).pop(layer, ())

    def discard(self) -> None:
        """Forget backwards that were broken off."""
        self._pending.clear()

    @property
    def ranked(self) -> bool:
        """Gradients are averaged over several processes."""
        return self.averaged is not None

    def _forget(self, task: int) -> None:
        self._pending.pop(task, None)
        if self.averaged is not None:  # behind what DistributedDataParallel queued meanwhile
            Variable._execution_engine.queue_callback(self.averaged)
