"""Verification where rows have no coefficients: the layer is followed through its training again.

From each stored state (weights and the optimizer's buffers) the rows up to the next must lead to
its weights, in float64; all of them from the first state on must be what the index stores as their
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from dualform.engine.api.intervals import BadInterval, HasStates
from dualform.engine.api.judgement import NOISE, Rebuilt
from dualform.engine.memory.layer import Layer
from dualform.engine.totals.steps import StepRows, steps_in_order
from dualform.optimizers import LayerRun, layer_state
from dualform.store.index import INITIAL

_FLOAT32_UNIT = 2.0**-24
_SUMS = 1e-6

State = Mapping[str, np.ndarray]


@dataclass
class FollowedCheck:
    """What was found of a layer.

    Attributes:
        rebuilt: Its parameters; empty without final weights.
        off: Parameters of which the stored sum of the rows is not theirs.
        bad: The first two states between which the rows do not lead; None where all do.
    """

    rebuilt: list[Rebuilt] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    bad: BadInterval | None = None


def check_by_following(
    index: HasStates, layer: Layer, tolerance: float, up_to: int, advance: Callable[[int], None]
) -> FollowedCheck:
    """Follow a layer from its first state to the last.

    Args:
        index: Which has the states and the ledger.
        layer: Whose rows; its index has values.
        tolerance: Relative error that training's float32 may leave.
        up_to: States after more steps are not compared.
        advance: Called with numbers of rows done.
    """
    manifest, found = layer.manifest, FollowedCheck()
    initial, final = index.state(manifest.name, "initial"), index.state(manifest.name, "final")
    assert initial is not None
    whole, between = _run(index, layer, initial, 0), _Between(index, layer, initial, tolerance)
    names, ratios = between.names, between.ratios
    states = [step for step, _ in manifest.states if 0 < step <= up_to]
    for rows in steps_in_order(layer, 0, index.steps, None):
        while states and states[0] <= rows.step:
            step = states.pop(0)
            state = index.state(manifest.name, step)
            assert state is not None
            between.compare(step, state)
        whole.take(rows.step, rows.keys, rows.values, [slice(None)])
        between.take(rows)
        advance(len(rows.positions))
    whole.advance(index.steps)
    if final is not None and up_to >= index.steps:
        between.compare(index.steps, final)
    found.bad = between.bad
    stored = index.state(manifest.name, "rebuilt")
    if stored is not None:
        found.off = [name for name, off in _off(whole, stored, names).items() if off]
    if final is not None:
        for name, ours in _weights(whole, names).items():
            found.rebuilt.append(_rebuilt(name, ours, initial, final, ratios[name]))
    return found


class _Between:
    """Each stored state against what the rows since the one before make of that.

    Attributes:
        names: The weight's name, and the bias's.
        ratios: What `_noise` says of each step so far, by name.
        bad: The first two states between which the rows do not lead; None so far.
    """

    def __init__(self, index: HasStates, layer: Layer, initial: State, tolerance: float) -> None:
        manifest = layer.manifest
        self.names = [manifest.weight] + ([] if manifest.bias is None else [manifest.bias])
        self.ratios: dict[str, list[np.ndarray]] = {name: [] for name in self.names}
        self.bad: BadInterval | None = None
        self._index, self._layer, self._tolerance = index, layer, tolerance
        self._begin(0, initial)

    def take(self, rows: StepRows) -> None:
        """Follow one step's rows."""
        self._run.take(rows.step, rows.keys, rows.values, [slice(None)])
        for name, ratio in zip(self.names, _noise(rows), strict=False):
            self.ratios[name].append(ratio)

    def compare(self, end: int, after: State) -> None:
        """Hold the state after `end` steps against the rows, and go on from there."""
        self._run.advance(end)
        for name, ours in _weights(self._run, self.names).items():
            noise = _are_noise(self.ratios[name])
            sure = slice(None) if noise is None else ~noise
            ours = ours[sure]
            theirs, earlier = (s[name].astype(np.float64)[sure] for s in (after, self._before))
            error = float(np.linalg.norm(ours - theirs))
            way = float(np.linalg.norm(theirs - earlier))
            rounding = (end - self._start) * _FLOAT32_UNIT * float(np.linalg.norm(theirs))
            if self.bad is None and not error <= self._tolerance * way + rounding:
                relative = error / way if way > 0 else float("inf")
                self.bad = BadInterval(self._start, end, name, relative)
        self._begin(end, after)

    def _begin(self, start: int, state: State) -> None:
        self._start, self._before = start, state
        self._run = _run(self._index, self._layer, state, start)


def _rebuilt(
    name: str, ours: np.ndarray, initial: State, final: State, ratios: list[np.ndarray]
) -> Rebuilt:
    """What the rows made of a parameter, beside what training did."""
    theirs, first = (s[name].astype(np.float64) for s in (final, initial))
    noise = _are_noise(ratios)
    units = 0 if noise is None else int(np.count_nonzero(noise))
    unexplained = 0.0
    if noise is not None and units:
        unexplained = _share(ours[noise] - theirs[noise], theirs - first)
        if units < len(noise):  # the others are judged by themselves
            ours, theirs, first = (array[~noise] for array in (ours, theirs, first))
    return Rebuilt(
        name,
        error=float(np.linalg.norm(ours - theirs)),
        moved=float(np.linalg.norm(theirs - first)),
        size=max(float(np.linalg.norm(theirs)), float(np.linalg.norm(first))),
        units=len(theirs),
        noise=units,
        unexplained=unexplained,
    )


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    """|part| / |whole|, 0 where both are."""
    size = float(np.linalg.norm(part))
    return size / max(float(np.linalg.norm(whole)), np.finfo(float).tiny) if size else 0.0


def _run(index: HasStates, layer: Layer, state: State, start: int) -> LayerRun:
    manifest, ledger = layer.manifest, index.ledger
    return LayerRun(
        ledger.family,
        ledger.parameters[manifest.weight],
        None if manifest.bias is None else ledger.parameters[manifest.bias],
        layer_state(state, ledger.family, manifest.weight, manifest.bias),
        start,
        1,
    )


def _weights(run: LayerRun, names: list[str]) -> dict[str, np.ndarray]:
    """Initial part and rows together, by parameter."""
    first, rows = run.initial(), run.part(0)
    found = {names[0]: (first.weight + rows.weight).numpy()}
    if first.bias is not None and rows.bias is not None:
        found[names[1]] = (first.bias + rows.bias).numpy()
    return found


def _off(run: LayerRun, stored: State, names: list[str]) -> dict[str, bool]:
    """Which parameters' stored parts are not what following gives."""
    off: dict[str, bool] = {}
    for prefix, part in (("", run.part(0)), (INITIAL, run.initial())):
        for name, ours in zip(names, (part.weight, part.bias), strict=False):
            theirs = stored.get(prefix + name)
            if ours is None:
                continue
            size = float(torch.linalg.vector_norm(ours))
            wrong = theirs is None or theirs.shape != tuple(ours.shape)
            if theirs is not None and not wrong:
                wrong = not float(np.linalg.norm(theirs - ours.numpy())) <= _SUMS * size
            off[name] = off.get(name, False) or wrong
    return off


def _noise(rows: StepRows) -> tuple[np.ndarray, np.ndarray]:
    """Of each output unit, |gradient| / sum of its terms' lengths, of the weight and of the bias;
    1 where there are no terms. float64 [d_out]."""
    keys = torch.linalg.vector_norm(rows.keys, dim=1).double()
    values = rows.values.double()
    terms = values.abs()
    # |e'X| is at least |e'X v| / |v|: the direction of all keys' sum shows a sum that is not zero.
    direction = rows.keys.sum(0, dtype=torch.float64)
    length = torch.linalg.vector_norm(direction)
    product = values.T @ (rows.keys.double() @ direction) / length
    return _ratio(product, terms.T @ keys), _ratio(values.sum(0), terms.sum(0))


def _ratio(sums: torch.Tensor, terms: torch.Tensor) -> np.ndarray:
    ratio = torch.where((terms > 0) & sums.isfinite(), sums.abs() / terms, 1.0)
    return np.asarray(ratio.numpy())


def _are_noise(ratios: list[np.ndarray]) -> np.ndarray | None:
    """Which units' gradients are noise: bool [d_out]; None where nothing is known."""
    return np.median(ratios, axis=0) <= NOISE if ratios else None
