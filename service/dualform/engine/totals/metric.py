"""What a row added to one output unit where rows have no coefficients: Adam and its kin.

Under the whole run's preconditioner a row r of step s adds

    e_r[u] (sum_i A_s[i] x_r[i] x[i] + a'_s)

to unit u for the query x: an attention weight under a diagonal metric that belongs to the unit and
the step. A_s collects what all later steps still did with step s's gradient, backwards through the
transitions of the unit's weights (docs/dual-form.md, *Every optimizer*).

Of an index whose shards are in several places each place follows the steps that its rows are of:
it takes the unit from the one before as these steps found it, and from the one after what is still
made of what they leave (`Between`), both as small as the unit. The numbers are those of one place.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.memory.states import State, States
from dualform.engine.totals.steps import StepRows, key_sum, key_sums, rows_of, steps_in_order
from dualform.optimizers import (
    STILL,
    Factor,
    Family,
    Later,
    Trajectory,
    Transition,
    by_momentum,
    factors_before,
    layer_state,
)
from dualform.optimizers import products as products_of
from dualform.store.ledger import Ledger, LedgerRow

KEPT_BYTES = 128 << 20
"""Metrics of so many bytes are kept for questions that come again."""


@dataclass(frozen=True)
class Between:
    """What following a unit over some steps has to know of those before and after.

    Attributes:
        first, end: Half-open range of the steps that are followed.
        last: After how many steps of all the metric is.
        runs: By "weight" and "bias" the unit after `first` steps; of all units where the elements
            of a weight depend on each other. They are copied before they are moved.
        rows: Rows of step `first` that lie before those that are here.
        total: What the values of the unit in these rows add up to, in order of position.
        sums: In place of both, what all rows of step `first` add up to, as a gradient is made of.
        alone: By the same names whether all steps, to `last`, are `by_momentum`.
        later: What the steps from `end` on make of the weight, likewise.
        edge: The metric of step `end` and its bias's, float64 [d_in] and []: rows of it are here,
            but it is followed where the last of them are.
    """

    first: int
    end: int
    last: int
    runs: Mapping[str, Trajectory]
    rows: StepRows | None = None
    total: float = 0.0
    sums: Mapping[str, torch.Tensor] | None = None
    alone: Mapping[str, bool] | None = None
    later: Mapping[str, Later] | None = None
    edge: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, about."""
        after = [*(self.sums or {}).values(), *(self.edge or ())]
        for later in (self.later or {}).values():
            factors = (later.weight, later.momentum)
            after += [factor for factor in factors if isinstance(factor, torch.Tensor)]
        return sum(int(held.nbytes) for held in (*after, *self.runs.values()))


@dataclass(frozen=True)
class Passed:
    """Steps that were followed.

    Attributes:
        moves: By "weight" and "bias" how each step moved the unit.
        runs: The unit after them.
        sums: What all rows of the first step added up to; empty where no step was followed.
        rows, total: Those of the step after the last that are here or came before, as `Between`
            takes them; no rows where there are none.
        alone: As `Between` has it, of these steps; empty with the moves.
    """

    moves: Mapping[str, list[Transition]]
    runs: Mapping[str, Trajectory]
    sums: Mapping[str, torch.Tensor]
    rows: StepRows | None
    total: float
    alone: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitMetric:
    """The metric of one output unit after some step, and that unit's values.

    Attributes:
        unit: The output unit.
        weight: A, float64 [steps, d_in]: by the step of a row, with the sign that a value takes.
        bias: a', float64 [steps]; zeros for a layer without a bias.
        values: float32 [total], e[unit] by position.
        start: The step that the first of them is.
        before: What these steps and all later ones make of the weight and bias before them.
    """

    unit: int
    weight: torch.Tensor
    bias: torch.Tensor
    values: np.ndarray
    start: int = 0
    before: Mapping[str, Later] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.weight.nbytes + self.bias.nbytes + self.values.nbytes

    def head(self) -> Head:
        """Of its first step and those after."""
        if not len(self.weight):
            return Head(self.before, None)
        return Head(self.before, (self.weight[0].clone(), self.bias[0].clone()))


@dataclass(frozen=True)
class Head:
    """What whoever follows earlier steps has to know of later ones.

    Attributes:
        later: As `Between` has it.
        edge: Likewise; None where none of these steps is followed.
    """

    later: Mapping[str, Later]
    edge: tuple[torch.Tensor, torch.Tensor] | None


def starting(layer: Layer, ledger: Ledger, state: State, unit: int, last: int) -> Between:
    """A unit before the first step, for a metric after `last` steps; all of them are followed."""
    manifest, family = layer.manifest, ledger.family
    states = layer_state(state, family, manifest.weight, manifest.bias)
    runs = {
        which: _trajectory(family, rows, states[which], unit)
        for which, rows in _ledgers(layer, ledger, 0, last).items()
    }
    return Between(0, last, last, runs, later={which: Later() for which in runs})


def passed(
    layer: Layer,
    ledger: Ledger,
    unit: int,
    between: Between,
    values: np.ndarray,
    stop: Stop | None,
) -> Passed:
    """Follow a unit over some steps, of whose rows the layer has all that `between` has not.

    Args:
        layer: Whose rows.
        ledger: What the optimizer did.
        unit: The output unit.
        between: Which steps, and what was before.
        values: float32 [total], e[unit] by position.
        stop: Asked between tiles.
    """
    ledgers = _ledgers(layer, ledger, between.first, between.end)
    runs = {which: copy.deepcopy(run) for which, run in between.runs.items()}
    if not ledger.family.elementwise:
        return _passed_of_all(layer, ledgers, runs, unit, between, stop)
    sums = _sums_of_unit(layer, values, between, stop)
    head = {which: found[0].clone() for which, found in sums.items() if len(found)}
    rows = None
    total = between.total if between.first == between.end else 0.0
    if between.end < between.last:
        rows, total = _open(layer, values[:, None], between, total)
    moves = {which: _moves(runs[which], ledgers[which], sums[which]) for which in runs}
    return Passed(moves, runs, head, rows, total)


def unit_metric(
    layer: Layer, ledger: Ledger, unit: int, between: Between, stop: Stop | None
) -> UnitMetric:
    """The metric of an output unit, by one pass over the rows; arguments as for `passed`."""
    values = layer.values_at(np.arange(layer.rows), unit, stop)
    found = passed(layer, ledger, unit, between, values, stop)
    ledgers = _ledgers(layer, ledger, between.first, between.end)
    shapes: dict[str, tuple[int, ...]] = {"weight": (layer.d_in,), "bias": ()}
    factors, before = {}, {}
    for which, moves in found.moves.items():
        later = Later() if between.later is None else between.later[which]
        alone = by_momentum(moves) if between.alone is None else between.alone[which]
        factors[which], before[which] = factors_before(moves, shapes[which], later, alone)
        scales = factors[which].new_tensor([-row.scale for row in ledgers[which]])
        factors[which].mul_(scales.reshape(-1, *[1] * len(shapes[which])))
    weight = factors["weight"]
    bias = factors.get("bias", torch.zeros(len(weight), dtype=torch.float64))
    if between.edge is not None:
        weight = torch.cat([weight, between.edge[0][None]])
        bias = torch.cat([bias, between.edge[1][None]])
    return UnitMetric(unit, weight, bias, values, between.first, before)


def _ledgers(
    layer: Layer, ledger: Ledger, first: int, end: int
) -> Mapping[str, Sequence[LedgerRow]]:
    names = {"weight": layer.manifest.weight}
    if layer.manifest.bias is not None:
        names["bias"] = layer.manifest.bias
    return {which: ledger.parameters[name][first:end] for which, name in names.items()}


def _sums_of_unit(
    layer: Layer, values: np.ndarray, between: Between, stop: Stop | None
) -> dict[str, torch.Tensor]:
    """What the rows of each step add up to: of a unit's weights, float64 [steps, d_in], and its
    bias, [steps]."""
    first, end = between.first, between.end
    steps = layer.space.steps
    inside = (steps >= first) & (steps < end)
    bias = np.bincount(steps[inside] - first, values[inside], end - first)
    weight = key_sums(layer, values, first, end, stop)
    if first < end and between.sums is not None:
        weight[0], bias[0] = between.sums["weight"], float(between.sums["bias"])
    elif first < end and between.rows is not None:
        rows = rows_of(layer, first, torch.from_numpy(values[:, None])).after(between.rows)
        weight[0] = key_sum(rows.keys, rows.values[:, 0].contiguous())
        bias[0] = _total(between.total, values[steps == first])
    return {"weight": weight, "bias": torch.from_numpy(bias)}


def _open(
    layer: Layer, values: np.ndarray, between: Between, total: float
) -> tuple[StepRows | None, float]:
    """The rows of the step after the last that are here or came before, and their bias's sum."""
    rows = rows_of(layer, between.end, torch.from_numpy(values))
    if between.first == between.end and between.rows is not None:
        rows = rows.after(between.rows)
    total = _total(total, values[layer.space.steps == between.end, 0])
    return (rows if len(rows.keys) else None), total


def _total(before: float, values: np.ndarray) -> float:
    """A sum in float64, one after the other, as numpy.bincount's."""
    every = np.append(np.float64(before), values)
    return float(np.bincount(np.zeros(len(every), np.int64), every)[0])


def _trajectory(
    family: Family, rows: Sequence[LedgerRow], state: Mapping[str, torch.Tensor], unit: int
) -> Trajectory:
    """Of one unit; of all where the preconditioner of an element may depend on the others."""
    if family.elementwise:
        # Copies: what goes to another place should not take all units along.
        state = {
            name: tensor[unit].clone() if tensor.ndim else tensor for name, tensor in state.items()
        }
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


def _passed_of_all(
    layer: Layer,
    ledgers: Mapping[str, Sequence[LedgerRow]],
    runs: Mapping[str, Trajectory],
    unit: int,
    between: Between,
    stop: Stop | None,
) -> Passed:
    """Likewise of weight and bias, of one of all units."""
    first, end = between.first, between.end
    moves = {which: [STILL] * (end - first) for which in runs}
    none = torch.zeros(layer.d_out, layer.d_in, dtype=torch.float64)
    head: Mapping[str, torch.Tensor] = {"weight": none, "bias": none[:, 0]}

    def of_unit(factor: Factor) -> Factor:
        if not isinstance(factor, torch.Tensor) or factor.ndim == 0:
            return factor
        return factor[unit if len(factor) > 1 else 0].clone()

    def take(step: int, sums: Mapping[str, torch.Tensor]) -> None:
        for which, run in runs.items():
            row = ledgers[which][step - first]
            if row.took_part:
                move = run.step(row.settings, row.first, sums[which] * -row.scale, ())
                moves[which][step - first] = Transition(*map(of_unit, move))

    step, waiting = first, between.rows
    for rows in steps_in_order(layer, first, min(end + 1, between.last), stop):
        if rows.step == first and waiting is not None:
            rows, waiting = rows.after(waiting), None
        if rows.step == end:
            waiting = rows
            break
        for without in range(step, rows.step):
            take(without, {"weight": none, "bias": none[:, 0]})
        if rows.step == first and between.sums is not None:
            sums = between.sums
        else:
            products = products_of(rows.keys, rows.values).double()
            sums = {"weight": products, "bias": rows.values.double().sum(0)}
        head = sums if rows.step == first else head
        take(rows.step, sums)
        step = rows.step + 1
    for without in range(step, end):
        take(without, {"weight": none, "bias": none[:, 0]})
    return Passed(moves, runs, head, waiting, 0.0)


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

    def start(self, layer: Layer, unit: int, end: int) -> Between:
        """A unit before the first step; arguments as for `starting`."""
        state = self._states.read(layer.manifest.initial)
        return starting(layer, self._ledger, state, unit, end)

    def passed(self, layer: Layer, unit: int, between: Between, stop: Stop | None) -> Passed:
        """Follow a unit; arguments as for `passed`. The moves, which are as many numbers as the
        metric, are left out."""
        values = layer.values_at(np.arange(layer.rows), unit, stop)
        found = passed(layer, self._ledger, unit, between, values, stop)
        alone = {which: by_momentum(moves) for which, moves in found.moves.items()}
        return replace(found, moves={}, alone=alone)

    def find(
        self,
        layer: Layer,
        unit: int,
        end: int,
        stop: Stop | None,
        between: Between | None = None,
    ) -> UnitMetric:
        """The metric of a unit.

        Args:
            layer: Whose rows.
            unit: The output unit.
            end: After how many steps.
            stop: Asked between tiles.
            between: Of a layer whose rows are some of an index's, which steps they are, and what
                was before and after; None for all of them.
        """
        key = (layer.name, unit, end)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if between is None:
            between = self.start(layer, unit, end)
        found = unit_metric(layer, self._ledger, unit, between, stop)
        with self._lock:
            self._kept[key] = found
            while sum(kept.nbytes for kept in self._kept.values()) > self._most_bytes:
                self._kept.popitem(last=False)
        return found
