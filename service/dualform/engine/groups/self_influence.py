"""What each group's rows did to their own part of the loss, in the step that each was in.

A row's value is minus the loss's gradient at the layer's output, so that the rows p that a group
has in a step have G = sum_p e_p x_p^T for minus its gradient at the weight. The step itself added
s_t G of it to the weight (`Ledger.step_sizes`: SGD's learning rate), which lowered the step's loss
by s_t |G|^2 to first order, and by s'_t |sum_p e_p|^2 through the bias: the terms of TracIn's
self-influence (Pruthi et al., 2020, section 3.2) of every step that saw the group, and none
estimated from checkpoints. What later steps made of it, by momentum and decay, is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients

BLOCK_BYTES = 32 << 20
"""Keys and values in float64 that are held at once; a group's rows of one step at least."""


@dataclass(frozen=True)
class _Cells:
    """The rows of each group in each step, cells in the order in which they lie in the memory.

    Attributes:
        positions: int64 [rows], cell by cell.
        sizes: int64 [cells], how many rows each has.
    """

    positions: np.ndarray
    sizes: np.ndarray


def self_influence(
    layer: Layer,
    codes: np.ndarray,
    selected: np.ndarray,
    coefficients: LayerCoefficients,
    groups: int,
    stop: Stop | None,
) -> np.ndarray:
    """Of one layer, float64 [groups]; not finite where a row is not.

    Args:
        layer: Whose rows; all that a group has in a step, if any of them is selected.
        codes: int [total], by position the group of each.
        selected: bool [total], by position: the rows that take part.
        coefficients: What each row counted in its own step.
        groups: How many there are.
        stop: Asked between blocks.
    """

    def read(positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.keys_at(positions), layer.value_rows(positions)

    positions, steps = np.flatnonzero(selected), layer.space.steps
    numbers = layer.d_in + layer.d_out
    return _lowered(read, numbers, positions, codes, steps, coefficients, groups, stop)


def self_influence_of_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: np.ndarray,
    steps: np.ndarray,
    coefficients: LayerCoefficients,
    groups: int,
    stop: Stop | None,
) -> np.ndarray:
    """Likewise of rows by themselves.

    Args:
        keys: float32 [m, d_in].
        values: float32 [m, d_out].
        codes, steps: int64 [m], of each row.
        coefficients, groups, stop: As for `self_influence`.
    """

    def read(places: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.from_numpy(places)
        return keys[which], values[which]

    numbers = keys.shape[1] + values.shape[1]
    every = np.arange(len(keys))
    return _lowered(read, numbers, every, codes, steps, coefficients, groups, stop)


_Read = Callable[[np.ndarray], "tuple[torch.Tensor, torch.Tensor]"]
"""Keys and values, float32 [m, d_in] and [m, d_out], of rows at some positions, ascending."""


def _lowered(
    read: _Read,
    numbers: int,
    positions: np.ndarray,
    codes: np.ndarray,
    steps: np.ndarray,
    coefficients: LayerCoefficients,
    groups: int,
    stop: Stop | None,
) -> np.ndarray:
    """By groups, float64 [groups], of rows at some positions, with so many numbers each."""
    cells = _cells(codes, steps, positions)
    found = np.zeros(groups)
    ends = np.cumsum(cells.sizes)
    most = max(1, BLOCK_BYTES // (8 * numbers))
    first = 0
    while first < len(ends):
        check_stop(stop)
        start = int(ends[first] - cells.sizes[first])
        last = max(first + 1, int(np.searchsorted(ends, start + most, side="right")))
        positions, sizes = cells.positions[start : ends[last - 1]], cells.sizes[first:last]
        heads = positions[np.cumsum(sizes) - sizes]
        of_weight, of_bias = _squares(read, positions, sizes)
        c, c_bias = row_coefficients(coefficients, steps[heads])
        lowered = c.numpy() * of_weight
        if c_bias is not None:
            lowered += c_bias.numpy() * of_bias
        np.add.at(found, codes[heads], lowered)
        first = last
    return found


def _cells(codes: np.ndarray, steps: np.ndarray, positions: np.ndarray) -> _Cells:
    cells = codes[positions].astype(np.int64) * (int(steps.max(initial=0)) + 1) + steps[positions]
    _, first, cell, sizes = np.unique(
        cells, return_index=True, return_inverse=True, return_counts=True
    )
    if len(sizes) == len(positions):
        return _Cells(positions, np.ones(len(positions), np.int64))
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return _Cells(positions[np.argsort(place[cell], kind="stable")], sizes[order])


def _squares(
    read: _Read, positions: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """|G|^2 and |sum_p e_p|^2 of some cells: float64 [cells] both."""
    ascending, place = np.unique(positions, return_inverse=True)
    rows = torch.from_numpy(place)
    found_keys, found_values = read(ascending)
    keys, values = found_keys.double()[rows], found_values.double()[rows]
    of_weight, of_bias = np.empty(len(sizes)), np.empty(len(sizes))
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes):
        which = np.flatnonzero(sizes == size)
        inside = torch.from_numpy(starts[which, None] + np.arange(size))
        x, e = keys[inside], values[inside]
        # The product's square without the product, or the product, whatever is smaller.
        if size * size <= keys.shape[1] * values.shape[1]:
            squares = (torch.bmm(x, x.mT) * torch.bmm(e, e.mT)).sum(dim=(1, 2))
        else:
            squares = torch.stack([(e[n].T @ x[n]).square().sum() for n in range(len(e))])
        of_weight[which] = squares.numpy()
        of_bias[which] = e.sum(dim=1).square().sum(dim=1).numpy()
    return of_weight, of_bias
