"""The rows of a layer step by step, in the order in which training saw them.

Inside a shard rows lie grouped by task and label; what follows a weight through training needs
them by step. Shards cover contiguous ranges of row ids and ids ascend with steps, so one shard at a
time is enough: its order is sorted once, and each step's rows are gathered from the maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop


@dataclass(frozen=True)
class StepRows:
    """All rows of one step.

    Attributes:
        step: Its number.
        positions: int64 [n], in order of row id.
        keys: float32 [n, d_in].
        values: float32 [n, d_out], or of the units that were asked for.
    """

    step: int
    positions: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor


def steps_in_order(
    layer: Layer, first: int, end: int, stop: Stop | None, units: slice = slice(None)
) -> Iterator[StepRows]:
    """The steps from `first` up to `end` that have rows.

    Args:
        layer: Whose rows; its index has values.
        first, end: Half-open range of steps.
        stop: Asked before each step.
        units: Of the values, those of these output units alone.

    Raises:
        CancelledError: `stop` is true.
        DamagedError: A file does not hold what was written.
    """
    space = layer.space
    waiting: list[StepRows] = []  # a step's rows may go on in the next shard
    for shard in layer.shards:
        span = slice(shard.start, shard.start + shard.rows)
        steps = space.steps[span]
        inside = np.flatnonzero((steps >= first) & (steps < end))
        inside = inside[np.argsort(space.ids[span][inside], kind="stable")]
        if not len(inside):
            continue
        assert shard.values is not None
        keys, values = shard.keys.rows(), shard.values.rows()
        bounds = np.flatnonzero(np.diff(steps[inside])) + 1
        for places in np.split(inside, bounds):
            check_stop(stop)
            which = torch.from_numpy(places)
            found = StepRows(
                int(steps[places[0]]),
                places + shard.start,
                keys[which].float(),  # stored numbers of 16 bits are products' float32 ones
                values[which, units].float(),
            )
            if waiting and waiting[0].step != found.step:
                yield _joined(waiting)
                waiting = []
            waiting.append(found)
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[StepRows]) -> StepRows:
    if len(parts) == 1:
        return parts[0]
    return StepRows(
        parts[0].step,
        np.concatenate([part.positions for part in parts]),
        torch.cat([part.keys for part in parts]),
        torch.cat([part.values for part in parts]),
    )
