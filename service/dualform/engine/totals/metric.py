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
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.memory.states import State, States
from dualform.engine.totals.steps import steps_in_order
from dualform.optimizers import STILL, Factor, ParameterRun, Transition, adjoint, layer_state
from dualform.optimizers import products as products_of
from dualform.store.ledger import Ledger

KEPT_BYTES = 128 << 20
"""Metrics of so many bytes are kept for questions that come again."""


@dataclass(frozen=True)
class UnitMetric:
    """The metric of one output unit after some step.

    Attributes:
        weight: A, float64 [steps, d_in]: by the step of a row, with the sign that a value takes.
        bias: a', float64 [steps]; zeros for a layer without a bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.weight.nbytes + self.bias.nbytes


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
        stop: Asked at every step.
    """
    manifest, family = layer.manifest, ledger.family
    # The preconditioner of an element may depend on the others: then all units are followed.
    units = slice(unit, unit + 1) if family.elementwise else slice(None)
    row = 0 if family.elementwise else unit
    states = layer_state(state, family, manifest.weight, manifest.bias)
    weight = ParameterRun(
        family, ledger.parameters[manifest.weight], _units(states["weight"], units), 0, 0
    )
    bias = None
    if manifest.bias is not None:
        bias = ParameterRun(
            family, ledger.parameters[manifest.bias], _units(states["bias"], units), 0, 0
        )
    moves: dict[str, list[Transition]] = {"weight": [STILL] * end, "bias": [STILL] * end}

    def keep(name: str, step: int, transition: Transition) -> None:
        moves[name][step] = Transition(*(_row(factor, row) for factor in transition))

    for rows in steps_in_order(layer, 0, end, stop, units):
        values = rows.values.contiguous()
        weight.advance(rows.step, lambda step, t: keep("weight", step, t))
        weight.take(products_of(rows.keys, values), (), lambda step, t: keep("weight", step, t))
        if bias is not None:
            bias.advance(rows.step, lambda step, t: keep("bias", step, t))
            total = values.sum(0, dtype=torch.float64)
            bias.take(total, (), lambda step, t: keep("bias", step, t))
    weight.advance(end, lambda step, t: keep("weight", step, t))
    if bias is not None:
        bias.advance(end, lambda step, t: keep("bias", step, t))
    of_weight = _factors(moves["weight"], ledger, manifest.weight, (layer.d_in,))
    if manifest.bias is None:
        return UnitMetric(of_weight, torch.zeros(end, dtype=torch.float64))
    return UnitMetric(of_weight, _factors(moves["bias"], ledger, manifest.bias, ()))


def _units(state: Mapping[str, torch.Tensor], units: slice) -> dict[str, torch.Tensor]:
    return {name: tensor[units] if tensor.ndim else tensor for name, tensor in state.items()}


def _row(factor: Factor, row: int) -> Factor:
    """One unit's part of a factor; that of a vector is a number."""
    if not isinstance(factor, torch.Tensor):
        return factor
    if factor.ndim == 0 or len(factor) == 1:
        row = 0
    unit_factor = factor if factor.ndim == 0 else factor[row]
    return float(unit_factor) if unit_factor.ndim == 0 else unit_factor.clone()


def _factors(
    moves: list[Transition], ledger: Ledger, parameter: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Each step's factor of what its rows add up to, float64 [steps, *shape]."""
    factors, _, _ = adjoint(reversed(moves))
    out = torch.empty((len(moves), *shape), dtype=torch.float64)
    for step, factor in enumerate(reversed(factors)):
        out[step] = factor
        out[step] *= -ledger.parameters[parameter][step].scale
    return out


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
