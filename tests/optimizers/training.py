"""Training by a real optimizer in float64, and what the families make of its ledger.

A weight [5, 7] and a bias [5], in groups of their own, get random gradients that are sums of three
parts. Unit 2 is dead: its gradient is exactly zero at every step. Settings change while training
runs, some steps have no gradient or a zero one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dualform.optimizers import STILL, Part, Trajectory, Transition
from dualform.record.optimizer import OptimizerView
from dualform.store.ledger import LedgerRow, from_parquet, to_parquet

SHAPES = {"weight": (5, 7), "bias": (5,)}
DEAD = 2
PARTS = 3

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass
class Step:
    """One step of one parameter: its ledger row, and the gradient's parts; None where it had no
    gradient."""

    row: LedgerRow
    parts: list[torch.Tensor] | None


@dataclass
class Run:
    """A parameter's training.

    Attributes:
        state: Before the first step that is followed.
        steps: Those followed.
        final: The weight after them.
        end: All buffers after them.
    """

    state: dict[str, torch.Tensor]
    steps: list[Step] = field(default_factory=list)
    final: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    end: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    make: Make,
    seed: int,
    *,
    steps: int = 25,
    before: int = 0,
    change: Callable[[dict[str, Any], np.random.Generator], None] = lambda group, random: None,
    scale: float = 1.0,
) -> tuple[OptimizerView, dict[str, Run]]:
    """Train, and keep what a recorder would.

    Args:
        make: From groups, an optimizer.
        seed: Of everything.
        steps: That are followed.
        before: Steps that come first; the optimizer is then made anew, with its state loaded.
        change: What may happen to a group before a step.
        scale: Of the gradients.
    """
    random = np.random.default_rng(seed)
    parameters = {
        name: torch.from_numpy(random.standard_normal(shape)).requires_grad_()
        for name, shape in SHAPES.items()
    }

    def made() -> torch.optim.Optimizer:
        return make([{"params": [p]} for p in parameters.values()])

    optimizer = made()
    if before:
        for _ in range(before):
            _gradients(parameters, random, scale)
            optimizer.step()
        loaded = optimizer.state_dict()
        optimizer = made()
        optimizer.load_state_dict(loaded)
    view = OptimizerView(optimizer)
    runs = {name: Run(_kept({"weight": p, **view.buffers(p)})) for name, p in parameters.items()}
    for step in range(steps):
        for group in optimizer.param_groups:
            change(group, random)
        gradients = _gradients(parameters, random, scale, skip=True)
        view.refresh()
        for name, parameter in parameters.items():
            took_part = gradients[name] is not None
            row = view.row(step, name, parameter, 1.0, took_part)
            runs[name].steps.append(Step(row, gradients[name]))
        optimizer.step()
    for name, run in runs.items():
        read = from_parquet(to_parquet([step.row for step in run.steps]))
        assert read == [step.row for step in run.steps]
        run.final = parameters[name].detach().clone()
        run.end = _kept(view.buffers(parameters[name]))
    return view, runs


@dataclass
class FollowedRun:
    """What a trajectory made of a run.

    Attributes:
        initial: The part that has no gradient.
        parts: Those of the gradient's parts.
        whole: One with all of it.
        transitions: Of the steps.
        buffers: The whole's, at the end.
    """

    initial: Part
    parts: list[Part]
    whole: Part
    transitions: list[Transition]
    buffers: dict[str, torch.Tensor]


def follow(view: OptimizerView, run: Run) -> FollowedRun:
    """Follow a run by its ledger and the gradients' parts."""
    family = view.family
    needed = any(
        family.follows_whole(step.row.settings) for step in run.steps if step.row.took_part
    )
    trajectory = Trajectory(family, run.state, follow=needed)
    initial, whole = trajectory.start(run.state), trajectory.start(run.state)
    parts = [trajectory.empty() for _ in range(PARTS)]
    transitions = []
    for step in run.steps:
        if step.parts is None:
            transitions.append(STILL)
            continue
        gradient = total(step.parts)
        given: list[tuple[Part, torch.Tensor | None]] = [(initial, None), (whole, gradient)]
        given += list(zip(parts, step.parts, strict=True))
        transitions.append(trajectory.step(step.row.settings, step.row.first, gradient, given))
    return FollowedRun(initial, parts, whole, transitions, dict(trajectory.whole))


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts' sum, in one order."""
    found = parts[0].clone()
    for part in parts[1:]:
        found += part
    return found


def _gradients(
    parameters: dict[str, torch.Tensor],
    random: np.random.Generator,
    scale: float,
    skip: bool = False,
) -> dict[str, list[torch.Tensor] | None]:
    found: dict[str, list[torch.Tensor] | None] = {}
    for name, parameter in parameters.items():
        kind = random.choice(["given"] * 6 + ["none", "zero"]) if skip else "given"
        gradients = torch.from_numpy(random.standard_normal((PARTS, *parameter.shape))) * scale
        gradients[:, DEAD] = 0
        if kind == "zero":
            gradients.zero_()
        found[name] = None if kind == "none" else list(gradients)
        parameter.grad = None if kind == "none" else total(list(gradients))
    return found


def _kept(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}
