"""Is a checkpoint the one that the memory led to, under optimizers without one coefficient a step?

The layer is followed through its steps since the latest state, as `dualform.optimizers` does it.
Elements whose gradient is no more than its own rounding (an attention's key bias, a bias before
batch norm) are left out: such optimizers turn that rounding into whole steps, which nobody can
repeat. Of a large weight some units are enough, where elements move independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from dualform.optimizers import Part, Trajectory
from dualform.record.errors import ResumeError
from dualform.store.ledger import Ledger, LedgerRow
from dualform.store.recording import LayerSpec, PassRecord, Recording

TOLERANCE = 2e-3
"""Largest difference from what was followed, relative to the way, and to buffers' largest values.

Far above rounding (1e-5), as single elements may be nearly noise; a checkpoint that is a step off
misses the count of steps first, and one of another run is off by as much as the way.
"""

_NOISE = 1e-3
"""Rounding's share in the gradients above which an element is left out."""

_UNIT = 2.0**-24
_ELEMENTS = 65_536


def check_followed(
    recording: Recording,
    ledger: Ledger,
    spec: LayerSpec,
    steps: tuple[int, int],
    before: Mapping[str, np.ndarray],
    now: Mapping[str, tuple[torch.Tensor, Mapping[str, torch.Tensor]]],
) -> None:
    """Compare a layer's parameters and buffers with what its rows make of an earlier state.

    Args:
        recording: With the rows.
        ledger: Its ledger, of a family that is known.
        spec: The layer's.
        steps: After how many steps the earlier state was, and after how many it is now.
        before: The earlier state, as stored.
        now: By parameter name.

    Raises:
        ResumeError: They differ.
    """
    start, end = steps
    units = np.arange(spec.d_out)
    if ledger.family.elementwise:
        some = max(1, _ELEMENTS // spec.d_in)
        units = np.unique(np.linspace(0, spec.d_out - 1, min(some, spec.d_out)).astype(int))
    runs = {}
    for name in spec.parameters:
        found = {"weight": before[name]}
        for buffer in ledger.family.buffers:
            if f"{buffer}:{name}" in before:
                found[buffer] = before[f"{buffer}:{name}"]
        rows = ledger.parameters[name][start:end]
        shape = before[name].shape
        runs[name] = _Followed(ledger, rows, {n: _units(a, units, shape) for n, a in found.items()})
    for keys, values in _steps(recording, spec, units, start, end):
        for name, run in runs.items():
            if name == spec.weight:
                run.take(values.T @ keys, values.abs().T @ keys.abs())
            else:
                run.take(values.sum(0), values.abs().sum(0))
    for name, run in runs.items():
        parameter, buffers = now[name]
        real = {n: _units(_array(t), units, parameter.shape) for n, t in buffers.items()}
        real["weight"] = _units(_array(parameter), units, parameter.shape)
        if not run.agrees(real):
            raise ResumeError(
                f"resume_at_step={end}: parameter {name!r}, or its state in the optimizer, is not "
                f"what the recording says it was after {end} steps; load the model's and the "
                "optimizer's state of the checkpoint of that step before making the recorder. "
                "Nothing was dropped"
            )


class _Followed:
    """A parameter's units, followed.

    Args:
        ledger: Of whose family.
        rows: The parameter's, of the steps to come.
        state: "weight" and the buffers that are there.
    """

    def __init__(
        self, ledger: Ledger, rows: Sequence[LedgerRow], state: Mapping[str, torch.Tensor]
    ) -> None:
        family = ledger.family
        self._rows = iter(rows)
        self._steps = len(rows)
        follow = any(family.follows_whole(row.settings) for row in rows if row.took_part)
        self._trajectory = Trajectory(family, state, follow=follow)
        self._momentum = family.momentum
        self._part: Part = self._trajectory.start(state)
        self._start = self._part.weight.clone()
        self._gradients = torch.zeros_like(self._start)
        self._noise = torch.zeros_like(self._start)
        self._largest = {name: tensor.abs() for name, tensor in self._state().items()}

    def take(self, products: torch.Tensor, magnitudes: torch.Tensor) -> None:
        """Take the next step: its rows' sum of e (x) x, and of the terms' magnitudes, float32."""
        row = next(self._rows)
        if not row.took_part:
            return
        gradient = products.double() * -row.scale
        self._gradients += gradient.abs()
        self._noise += magnitudes.double() * (abs(row.scale) * _UNIT)
        self._trajectory.step(row.settings, row.first, gradient, [(self._part, gradient)])
        for name, tensor in self._state().items():
            # A momentum buffer is there from the first step on that fills it.
            largest = self._largest.setdefault(name, torch.zeros_like(tensor))
            torch.maximum(largest, tensor.abs(), out=largest)

    def agrees(self, real: Mapping[str, torch.Tensor]) -> bool:
        """Whether what there is now is what was followed, where that can be told."""
        told = self._noise <= _NOISE * self._gradients  # exact zeros too
        rounding = 4 * (self._steps + 1) ** 0.5 * _UNIT
        for name, followed in self._state().items():
            if name not in real:
                continue
            where = told if followed.shape == told.shape else torch.ones_like(followed).bool()
            way = self._largest[name]
            if name == "weight":
                way = real[name] - self._start
            off = float((real[name] - followed)[where].norm())
            allowed = TOLERANCE * float(way[where].norm())
            if not off <= allowed + rounding * float(followed[where].norm()):
                return False
        return True

    def _state(self) -> dict[str, torch.Tensor]:
        state = dict(self._trajectory.whole)
        state["weight"] = self._part.weight
        if self._momentum is not None and self._part.momentum is not None:
            state[self._momentum] = self._part.momentum
        return state


def _steps(
    recording: Recording, spec: LayerSpec, units: np.ndarray, start: int, end: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each step's keys [n, d_in] and values [n, units], float32; n is 0 where it has no rows."""
    of_step: dict[int, list[PassRecord]] = {}
    for record in recording.passes(spec.name):
        of_step.setdefault(record.step, []).append(record)
    for step in range(start, end):
        passes = of_step.get(step, [])
        rows = sum(item.rows for item in passes)
        keys = np.empty((rows, spec.d_in), np.float32)
        values = np.empty((rows, spec.d_out), np.float32)
        first = 0
        for item in passes:
            recording.read_keys(item, keys[first : first + item.rows])
            recording.read_values(item, values[first : first + item.rows])
            first += item.rows
        yield torch.from_numpy(keys), torch.from_numpy(np.ascontiguousarray(values[:, units]))


def _units(array: np.ndarray, units: np.ndarray, shape: Sequence[int]) -> torch.Tensor:
    """Those units of an array, where it has the parameter's shape."""
    taken = array[units] if array.shape == tuple(shape) else array
    return torch.from_numpy(np.ascontiguousarray(taken)).double()


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().double().cpu().numpy())
