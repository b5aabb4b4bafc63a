"""The rows of a layer step by step, in the order in which training saw them.

Inside a shard rows lie grouped by task and label; what follows a weight through training needs
them by step. Shards cover contiguous ranges of row ids and ids ascend with steps, so one shard at a
time is enough: its order is sorted once, and each step's rows are gathered from the maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import TILE_BYTES, Shard, Stop, check_stop, tile_rows
from dualform.optimizers import PRODUCT_ROWS
from dualform.store.encoding import FLOAT32

AHEAD_BYTES = 4 * TILE_BYTES
"""Of packed rows that are read before their step's turn comes, at most, unless a step has more."""


@dataclass(frozen=True)
class StepRows:
    """Rows of one step.

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

    def after(self, rows: StepRows) -> StepRows:
        """All, these after others of the step."""
        return _joined([rows, self])


def rows_of(layer: Layer, step: int, values: torch.Tensor) -> StepRows:
    """The rows of one step in order of row id, with values of theirs, float32 [total, m] by
    position."""
    positions = np.flatnonzero(layer.space.steps == step)
    order = np.argsort(layer.space.ids[positions])
    keys = layer.keys_at(positions)[torch.from_numpy(order)]
    positions = positions[order]
    return StepRows(step, positions, keys, values[torch.from_numpy(positions)])


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
        bounds = np.flatnonzero(np.diff(steps[inside])) + 1
        for places, keys, values in _read(layer, shard, np.split(inside, bounds), units, stop):
            found = StepRows(int(steps[places[0]]), places + shard.start, keys, values)
            if waiting and waiting[0].step != found.step:
                yield _joined(waiting)
                waiting = []
            waiting.append(found)
    if waiting:
        yield _joined(waiting)


def key_sums(
    layer: Layer, factors: np.ndarray, first: int, end: int, stop: Stop | None
) -> torch.Tensor:
    """What the keys of each step add up to, each times a factor: float64 [end - first, d_in].

    The keys are read once, where they lie. Up to `PRODUCT_ROWS` of a step are added in float32, as
    in a product, and in order of row id, so that sharding changes nothing.

    Args:
        layer: Whose rows.
        factors: float32 [total], by position.
        first, end: Half-open range of steps.
        stop: Asked between tiles.

    Raises:
        CancelledError: `stop` is true.
        DamagedError: A file does not hold what was written.
    """
    space = layer.space
    by_id = _by_id(layer)  # ids ascend with steps, and from shard to shard
    steps = space.steps[by_id]
    steps = steps[: np.searchsorted(steps, end)]
    sums = torch.zeros((end - first, layer.d_in), dtype=torch.float64)
    before = int(np.searchsorted(steps, first))
    bags = _bags(steps[before:]) + before
    most = space.total if layer.keys_are_mapped else tile_rows(layer.d_in, 1)
    for number, one, last in _inside(bags, space.starts, most):
        check_stop(stop)
        shard, rows = layer.shards[number], slice(bags[one], bags[last])
        positions = by_id[rows]
        if layer.keys_are_mapped and bags[last] <= space.starts[number + 1]:
            keys, places = shard.mapped_keys(), positions - shard.start
            shard.keys.expect(scattered=False)
        else:
            order = np.argsort(positions)
            keys, places = layer.keys_at(positions[order]), np.argsort(order)
        found = torch.nn.functional.embedding_bag(
            torch.from_numpy(places),
            keys,
            torch.from_numpy(bags[one:last] - bags[one]),
            mode="sum",
            per_sample_weights=torch.from_numpy(factors[positions]),
        )
        sums.index_add_(0, torch.from_numpy(steps[bags[one:last]] - first), found.double())
    return sums


def key_sum(keys: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """What all rows of one step add up to, as `key_sums` adds them: float64 [d_in].

    Args:
        keys: float32 [n, d_in], in order of row id.
        factors: float32 [n].
    """
    total = torch.zeros(keys.shape[1], dtype=torch.float64)
    bags = torch.arange(0, len(keys), PRODUCT_ROWS)
    rows = torch.arange(len(keys))
    found = torch.nn.functional.embedding_bag(
        rows, keys, bags, mode="sum", per_sample_weights=factors
    )
    for of_bag in found.double():
        total += of_bag
    return total


def _read(
    layer: Layer, shard: Shard, steps: Sequence[np.ndarray], units: slice, stop: Stop | None
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Each step's places in the shard, keys, and values of some units. Packed rows of several steps
    are read together: they lie in the same blocks."""
    assert shard.values is not None
    most = AHEAD_BYTES // FLOAT32.row_bytes(layer.d_in + layer.d_out) if any(layer.packed) else 0
    first = 0
    while first < len(steps):
        check_stop(stop)
        last, rows = first + 1, len(steps[first])
        while last < len(steps) and rows + len(steps[last]) <= most:
            rows += len(steps[last])
            last += 1
        together = steps[first:last]
        places = together[0] if len(together) == 1 else np.concatenate(together)
        sizes = [len(each) for each in together]
        keys = shard.keys.pick(places).split(sizes)
        values = shard.values.pick_units(places, units).split(sizes)
        yield from zip(together, keys, values, strict=True)
        first = last


def _by_id(layer: Layer) -> np.ndarray:
    """Positions in order of row id, int64 [total]; each shard's ids are a range, of all or some of
    an index's shards."""
    ids = layer.space.ids
    shift = [
        place.start - shard.start
        for place, shard in zip(layer.published.shards, layer.shards, strict=True)
    ]
    ranks = ids - np.repeat(shift, [shard.rows for shard in layer.shards])
    by_id = np.empty(len(ids), np.int64)
    by_id[ranks] = np.arange(len(ids))
    return by_id


def _bags(steps: np.ndarray) -> np.ndarray:
    """Where rows of one step start, `PRODUCT_ROWS` of them at most, and the end of all: int64.

    Args:
        steps: int64 [n], ascending.
    """
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    inside = np.arange(len(steps)) - np.repeat(starts, np.diff(starts, append=len(steps)))
    return np.append(np.flatnonzero(inside % PRODUCT_ROWS == 0), len(steps))


def _inside(bags: np.ndarray, shards: np.ndarray, most: int) -> Iterator[tuple[int, int, int]]:
    """Bags in runs of so many rows at most and of one shard: its number, and which, half-open.

    A bag that goes on in the next shard, or has more rows, comes alone.

    Args:
        bags: Where they start, and the end of all.
        shards: Where these start, likewise.
        most: Rows.
    """
    first = 0
    while first < len(bags) - 1:
        number = int(np.searchsorted(shards, bags[first], "right")) - 1
        end = min(shards[number + 1], bags[first] + most)
        last = max(first + 1, int(np.searchsorted(bags, end, "right")) - 1)
        yield number, first, last
        first = last


def _joined(parts: list[StepRows]) -> StepRows:
    if len(parts) == 1:
        return parts[0]
    return StepRows(
        parts[0].step,
        np.concatenate([part.positions for part in parts]),
        torch.cat([part.keys for part in parts]),
        torch.cat([part.values for part in parts]),
    )
