"""What a row added to one output unit where rows have no coefficients: Adam and its kin.

Under the whole run's preconditioner a row r of step s adds

    e_r[u] (sum_i A_s[i] x_r[i] x[i] + a'_s)

to unit u for the query x: an attention weight under a diagonal metric that belongs to the unit and
the step. A_s collects what all later steps still did with step s's gradient, backwards through the
transitions of the unit's weights (docs/dual-form.md, *Every optimizer*).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.memory.states import State, States
from dualform.engine.totals.steps import key_sums, steps_in_order
from dualform.optimizers import (
    STILL,
    Factor,
    Family,
    Trajectory,
    Transition,
    gradient_factors,
    layer_state,
)
from dualform.optimizers import products as products_of
from dualform.store.ledger import Ledger, LedgerRow

KEPT_BYTES = 128 << 20
"""Metrics of so many bytes are kept for questions that come again."""


@dataclass(frozen=True)
class UnitMetric:
    """The metric of one output unit after some step, and that unit's values.

    Attributes:
        unit: The output unit.
        weight: A, float64 [steps, d_in]: by the step of a row, with the sign that a value takes.
        bias: a', float64 [steps]; zeros for a layer without a bias.
        values: float32 [total], e[unit] by position.
    """

    unit: int
    weight: torch.Tensor
    bias: torch.Tensor
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.weight.nbytes + self.bias.nbytes + self.values.nbytes


def unit_metric(
    layer: Layer, ledger: Ledger, state: State, unit: int, end: int, stop: Stop | None
) -> UnitMetric:
    """The metric of an output unit, by one pass over the rows.

    Args:
        layer: Whose rows.
        ledger: What the optimizer did.
        state: The layer's, before the first step.
        unit: The output unit.
        end: After how many steps.
        stop: Asked between tiles.
    """
    manifest, family = layer.manifest, ledger.family
    states = layer_state(state, family, manifest.weight, manifest.bias)
    values = layer.values_at(np.arange(layer.rows), unit)
    names = {"weight": manifest.weight}
    if manifest.bias is not None:
        names["bias"] = manifest.bias
    ledgers = {which: ledger.parameters[name][:end] for which, name in names.items()}
    runs = {which: _trajectory(family, ledgers[which], states[which], unit) for which in names}
    if family.elementwise:
        steps = layer.space.steps
        totals = np.bincount(steps[steps < end], values[steps < end], end)
        sums = {"weight": key_sums(layer, values, end, stop), "bias": torch.from_numpy(totals)}
        moves = {which: _moves(runs[which], ledgers[which], sums[which]) for which in names}
    else:
        moves = _moves_of_all(layer, ledgers, runs, unit, end, stop)
    shapes: dict[str, tuple[int, ...]] = {"weight": (layer.d_in,), "bias": ()}
    factors = {which: gradient_factors(moves[which], shapes[which]) for which in names}
    for which, found in factors.items():
        scales = found.new_tensor([-row.scale for row in ledgers[which]])
        found.mul_(scales.reshape(-1, *[1] * (found.ndim - 1)))
    none = torch.zeros(end, dtype=torch.float64)
    return UnitMetric(unit, factors["weight"], factors.get("bias", none), values)


def _trajectory(
    family: Family, rows: Sequence[LedgerRow], state: Mapping[str, torch.Tensor], unit: int
) -> Trajectory:
    """Of one unit; of all where the preconditioner of an element may depend on the others."""
    if family.elementwise:
        state = {name: tensor[unit] if tensor.ndim else tensor for name, tensor in state.items()}
    follow = any(family.follows_whole(row.settings) for row in rows if row.took_part)
    return Trajectory(family, state, follow=follow)


def _moves(run: Trajectory, rows: Sequence[LedgerRow], sums: torch.Tensor) -> list[Transition]:
    """How each step moved a unit's weights, or its bias.

    Args:
        run: The unit's.
        rows: Its ledger, a row a step.
        sums: What the rows of each step add up to, float64 [steps, ...]; they are overwritten.
    """
    taken = [step for step, row in enumerate(rows) if row.took_part]
    scales = sums.new_tensor([-row.scale for row in rows])
    sums.mul_(scales.reshape(-1, *[1] * (sums.ndim - 1)))
    found = run.run(
        [rows[step].settings for step in taken],
        [rows[step].first for step in taken],
        sums if len(taken) == len(rows) else sums[taken],
    )
    moves = [STILL] * len(rows)
    for step, move in zip(taken, found, strict=True):
        moves[step] = move
    return moves


def _moves_of_all(
    layer: Layer,
    ledgers: Mapping[str, Sequence[LedgerRow]],
    runs: Mapping[str, Trajectory],
    unit: int,
    end: int,
    stop: Stop | None,
) -> dict[str, list[Transition]]:
    """Likewise of weight and bias, of one of all units."""
    moves = {which: [STILL] * end for which in runs}
    none = torch.zeros(layer.d_out, layer.d_in, dtype=torch.float64)

    def of_unit(factor: Factor) -> Factor:
        if not isinstance(factor, torch.Tensor) or factor.ndim == 0:
            return factor
        return factor[unit if len(factor) > 1 else 0].clone()

    def take(step: int, sums: Mapping[str, torch.Tensor]) -> None:
        for which, run in runs.items():
            row = ledgers[which][step]
            if row.took_part:
                move = run.step(row.settings, row.first, sums[which] * -row.scale, ())
                moves[which][step] = Transition(*map(of_unit, move))

    step = 0
    for rows in steps_in_order(layer, 0, end, stop):
        for without in range(step, rows.step):
            take(without, {"weight": none, "bias": none[:, 0]})
        products = products_of(rows.keys, rows.values).double()
        take(rows.step, {"weight": products, "bias": rows.values.double().sum(0)})
        step = rows.step + 1
    for without in range(step, end):
        take(without, {"weight": none, "bias": none[:, 0]})
    return moves


class UnitMetrics:
    """The metrics that questions asked for, made once; thread-safe.

    Args:
        ledger: What the optimizer did.
        states: The index's stored weights.
        most_bytes: How much is kept; the oldest goes first.
    """

    def __init__(self, ledger: Ledger, states: States, most_bytes: int = KEPT_BYTES) -> None:
        self._ledger = ledger
        self._states = states
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, int], UnitMetric] = OrderedDict()

    def find(self, layer: Layer, unit: int, end: int, stop: Stop | None) -> UnitMetric:
        """The metric of a unit; arguments as for `unit_metric`."""
        key = (layer.name, unit, end)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        state = self._states.read(layer.manifest.initial)
        found = unit_metric(layer, self._ledger, state, unit, end, stop)
        with self._lock:
            self._kept[key] = found
            while sum(kept.nbytes for kept in self._kept.values()) > self._most_bytes:
                self._kept.popitem(last=False)
        return found
