"""The ledger's algebra against torch.optim.SGD itself: float64 gradients, in memory, to 1e-10.

Random training: any mix of SGD's settings, changed between steps, in two groups that hold a weight
and a bias apart; steps at which a parameter is frozen, is left out (its gradient is None) or has a
zero gradient; gradients scaled between backward and step; momentum buffers loaded from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from torch import nn

from dualform.optimizers import SGDSettings
from dualform.record.optimizer import OptimizerView
from dualform.store.ledger import Ledger, LedgerRow, from_parquet, to_parquet

from . import scenarios

TOLERANCE = 1e-10
LR = (0.0, 1e-3, 0.03, 0.1)
NAMES = ("weight", "bias")
SHAPES = {"weight": (3, 4), "bias": (3,)}


@dataclass(frozen=True)
class Step:
    """What one step does to one parameter.

    Attributes:
        gradient: "given", "none" or "zero".
        scale: What the gradient is multiplied with between backward and step.
    """

    settings: scenarios.Settings
    gradient: str
    scale: float


@dataclass(frozen=True)
class Run:
    """A whole training: steps per parameter, and which of them start with a momentum buffer."""

    seed: int
    steps: dict[str, list[Step]]
    loaded: dict[str, bool]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    count = draw(st.integers(1, 30))
    steps: dict[str, list[Step]] = {}
    for name in NAMES:
        current, taken = draw(scenarios.settings(LR)), []
        schedule = draw(st.sampled_from([1.0, 0.9, 1.05]))
        for _ in range(count):
            change = draw(st.sampled_from(["nothing"] * 6 + ["all", "momentum off", "momentum on"]))
            if change == "all":
                current = draw(scenarios.settings(LR))
            elif change == "momentum off":
                current = replace(current, momentum=0.0, nesterov=False)
            elif change == "momentum on":
                current = replace(current, momentum=0.8)
            current = replace(current, lr=current.lr * schedule)
            gradient = draw(st.sampled_from(["given"] * 5 + ["none", "zero"]))
            scale = draw(st.sampled_from([1.0, 1.0, 0.01, 0.37, -2.0]))
            taken.append(Step(current, gradient, scale))
        steps[name] = taken
    loaded = {name: draw(st.booleans()) for name in NAMES}
    return Run(draw(st.integers(0, 2**32 - 1)), steps, loaded)


@dataclass(frozen=True)
class Trained:
    """What SGD did: per parameter, W and m (zeros where there is none) before each step and after
    the last one, float64 [steps + 1, ...], and the rows' sums E = -gradient, [steps, ...].
    """

    ledger: Ledger
    weights: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    sums: dict[str, np.ndarray]


def train(run: Run, foreach: bool) -> Trained:
    generator = torch.Generator().manual_seed(run.seed)

    def noise(name: str) -> torch.Tensor:
        return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)

    parameters = {name: nn.Parameter(noise(name)) for name in NAMES}
    optimizer = torch.optim.SGD(
        [{"params": [parameter]} for parameter in parameters.values()], lr=0.1, foreach=foreach
    )
    for name, parameter in parameters.items():
        if run.loaded[name]:
            optimizer.state[parameter]["momentum_buffer"] = noise(name)
    view = OptimizerView(optimizer)
    count = len(run.steps["weight"])
    rows: list[LedgerRow] = []
    weights: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    buffers: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    sums: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}

    def keep() -> None:
        for name, parameter in parameters.items():
            buffer = view.momentum(parameter)
            weights[name].append(parameter.detach().numpy().copy())
            buffers[name].append(np.zeros(SHAPES[name]) if buffer is None else buffer.numpy() * 1.0)

    for t in range(count):
        keep()
        for group, (name, parameter) in zip(
            optimizer.param_groups, parameters.items(), strict=True
        ):
            step = run.steps[name][t]
            group.update(vars(step.settings))
            gradient = (
                noise(name) if step.gradient == "given" else torch.zeros(SHAPES[name]).double()
            )
            # A parameter that takes no part has rows too, which never reach it.
            sums[name].append(-gradient.numpy().copy())
            parameter.grad = None if step.gradient == "none" else gradient * step.scale
        view.refresh()
        for name, parameter in parameters.items():
            scale, takes_part = run.steps[name][t].scale, parameter.grad is not None
            rows.append(view.row(t, name, parameter, scale, takes_part))
        optimizer.step()
    keep()
    return Trained(
        Ledger(from_parquet(to_parquet(rows)), count),
        {name: np.stack(weights[name]) for name in NAMES},
        {name: np.stack(buffers[name]) for name in NAMES},
        {name: np.stack(sums[name]) for name in NAMES},
    )


@settings(max_examples=count(80, 6000), deadline=None)
@given(runs(), st.booleans(), st.data())
def test_coefficients_agree_with_sgd(run: Run, foreach: bool, data: st.DataObject) -> None:
    trained = train(run, foreach)
    count = trained.ledger.steps
    at_step = data.draw(st.integers(0, count), "at_step")
    start = data.draw(st.integers(0, at_step), "start")
    for name in NAMES:
        for first in {0, start}:
            c = trained.ledger.coefficients(name, at_step, first)
            rebuilt = (
                c.p * trained.weights[name][first]
                + c.r * trained.buffers[name][first]
                + np.tensordot(c.c, trained.sums[name][first:at_step], 1)
            )
            expected = trained.weights[name][at_step]
            error = np.linalg.norm(rebuilt - expected)
            assert error <= TOLERANCE * np.linalg.norm(expected), (name, first, at_step)


@settings(max_examples=count(40, 3000), deadline=None)
@given(runs(), st.data())
def test_what_follows_does_not_change_what_was(run: Run, data: st.DataObject) -> None:
    """The coefficients at a step are those of a training that ended there."""
    full = train(run, foreach=False)
    at_step = data.draw(st.integers(0, full.ledger.steps), "at_step")
    short = Ledger(
        [row for rows in full.ledger.parameters.values() for row in rows if row.step < at_step],
        at_step,
    )
    for name in NAMES if at_step else ():
        ours, theirs = full.ledger.coefficients(name, at_step), short.coefficients(name, at_step)
        assert (ours.p, ours.r) == (theirs.p, theirs.r)
        assert np.array_equal(ours.c, theirs.c)


@pytest.mark.parametrize(("momentum", "lr"), [(0.9, 3e-3), (0.5, 0.1), (0.0, 0.2)])
def test_the_closed_form(momentum: float, lr: float) -> None:
    """Constant momentum, clip factors s_t: c_t = lr s_t (1 - mu^(T - t)) / (1 - mu)."""
    scales = np.random.default_rng(0).uniform(0.1, 1, 500)
    rows = [
        LedgerRow(t, "w", SGDSettings(lr, momentum), scale=s, first=momentum != 0 and t == 0)
        for t, s in enumerate(scales.tolist())
    ]
    c = Ledger(rows, 500).coefficients("w", 500)
    expected = lr * scales * (1 - momentum ** (500 - np.arange(500))) / (1 - momentum)
    np.testing.assert_allclose(c.c, expected, rtol=1e-13)
    assert c.p == 1.0


@pytest.mark.parametrize(("at_step", "start"), [(-1, 0), (4, 0), (2, 3), (2, -1)])
def test_steps_beyond_the_ledger_are_refused(at_step: int, start: int) -> None:
    ledger = Ledger([LedgerRow(t, "w", SGDSettings(0.1)) for t in range(3)], 3)
    with pytest.raises(ValueError, match="need 0 <="):
        ledger.coefficients("w", at_step, start)
