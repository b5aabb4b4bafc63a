"""Every family against torch's own optimizer, in float64: parts add up to the weights it made."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import pytest
import torch

from dualform.optimizers import (
    FAMILIES,
    STILL,
    AdamSettings,
    Trajectory,
    adjoint,
    family_of,
    gradient_factors,
)
from dualform.optimizers.family import bias_correction
from dualform.optimizers.radam import rectification
from dualform.record.optimizer import OptimizerView

from .training import DEAD, SHAPES, Make, Run, follow, total, train

TOLERANCE = 1e-12

BOTH = [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}]

CASES: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [
        {},
        {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    torch.optim.Adam: [{}, {"amsgrad": True}, *BOTH, {"eps": 1e-3, "betas": (0.0, 0.9)}],
    torch.optim.AdamW: [{}, {"amsgrad": True, "weight_decay": 0.5}],
    torch.optim.NAdam: [{}, *BOTH, {"momentum_decay": 0.1, "betas": (0.8, 0.9)}],
    torch.optim.RAdam: [{}, *BOTH, {"betas": (0.9, 0.8)}, {"betas": (0.5, 0.95), "eps": 1e-2}],
    torch.optim.Adamax: [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.8), "eps": 1e-2}],
    torch.optim.RMSprop: [
        {},
        {"centered": True},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.5, "centered": True, "weight_decay": 0.1, "alpha": 0.8},
        {"weight_decay": 0.1},
    ],
    torch.optim.Adagrad: [
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1},
        {"initial_accumulator_value": 0.7},
    ],
    torch.optim.Adadelta: [{}, {"weight_decay": 0.1}, {"rho": 0.5, "eps": 1e-3}],
    torch.optim.Adafactor: [
        {},
        {"weight_decay": 0.1, "d": 1.1},
        {"eps": (1e-2, 0.5), "beta2_decay": -0.5},
    ],
    torch.optim.Rprop: [{}, {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.02)}],
}
MATRIX = [
    pytest.param(kind, each, id=f"{kind.__name__}-{each}") for kind in CASES for each in CASES[kind]
]


def maker(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> Make:
    return lambda groups: kind(groups, lr=0.03, **settings)  # type: ignore[call-arg]


def change(group: dict[str, Any], random: np.random.Generator) -> None:
    """What schedules do to groups: lr at every step, as a tensor too; betas; a sign, once."""
    group["lr"] = float(group["lr"]) * float(random.choice([1.0, 0.9, 1.1]))
    if random.random() < 0.2 and "betas" in group:
        group["betas"] = (float(random.uniform(0.5, 0.95)), float(random.uniform(0.8, 0.999)))
    if random.random() < 0.1 and "maximize" in group:
        group["maximize"] = not group["maximize"]
    if random.random() < 0.1 and group.get("momentum"):
        group["momentum"] = float(random.uniform(0.3, 0.95))


def test_every_family_of_torch_is_here() -> None:
    here = {each for each in FAMILIES.values() if any(c.startswith("torch.") for c in each.classes)}
    assert {
        family_of(make([{"params": [torch.zeros(1)]}])).family
        for make in (maker(kind, {}) for kind in CASES)
    } == here


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(("kind", "settings"), MATRIX)
def test_parts_add_up(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], foreach: bool
) -> None:
    for seed, before in ((0, 0), (1, 0), (2, 7)):
        make = maker(kind, {**settings, "foreach": foreach})
        view, runs = train(make, seed, before=before, change=change)
        assert view.why_not is None
        assert_parts_add_up(view, runs)


def assert_parts_add_up(view: OptimizerView, runs: dict[str, Run]) -> None:
    """Forwards, backwards, and in the preconditioner."""
    for name, run in runs.items():
        followed = follow(view, run)
        assert_close(followed.whole.weight, run.final, run.final.norm())
        sizes = followed.initial.weight.norm() + sum(p.weight.norm() for p in followed.parts)
        parts = followed.initial.weight + total([part.weight for part in followed.parts])
        assert_close(parts, run.final, sizes)
        factors, left, of_momentum = adjoint(reversed(followed.transitions))
        rows = torch.zeros(SHAPES[name], dtype=torch.float64) + left * run.state["weight"]
        momentum = run.state.get(view.family.momentum or "")
        if momentum is not None:
            rows += of_momentum * momentum
        size = rows.norm()
        for factor, step in zip(factors, reversed(run.steps), strict=True):
            if step.parts is not None:
                term = factor * total(step.parts)
                rows, size = rows + term, size + term.norm()
        assert_close(rows, run.final, size)
        for buffer, tensor in followed.buffers.items():
            if buffer in run.end:
                assert_close(tensor, run.end[buffer], run.end[buffer].norm())
        for part in followed.parts:  # what had no gradient moved nothing
            assert not part.weight[DEAD].any()


@pytest.mark.parametrize(("kind", "settings"), MATRIX)
def test_steps_together_are_steps_one_by_one(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    """A unit's transitions and how much of each gradient is left, as rankings need them."""
    view, runs = train(maker(kind, settings), 5, before=3, change=change)
    for name, run in runs.items():
        one_by_one = follow(view, run).transitions
        taken = [step for step in run.steps if step.parts is not None]
        needed = any(view.family.follows_whole(step.row.settings) for step in taken)
        together = iter(
            Trajectory(view.family, run.state, follow=needed).run(
                [step.row.settings for step in taken],
                [step.row.first for step in taken],
                torch.stack([total(step.parts) for step in taken if step.parts is not None]),
            )
        )
        moves = [STILL if step.parts is None else next(together) for step in run.steps]
        found = gradient_factors(moves, SHAPES[name])
        factors, _, _ = adjoint(reversed(one_by_one))
        for ours, factor in zip(found, reversed(factors), strict=True):
            expected = torch.zeros(SHAPES[name], dtype=torch.float64) + factor
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def assert_close(got: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    assert expected.isfinite().all()
    assert float((got - expected).norm()) <= TOLERANCE * float(size)


@pytest.mark.parametrize("scale", [1e-5, 1e-9])
@pytest.mark.parametrize("kind", list(CASES), ids=lambda kind: kind.__name__)
def test_small_gradients(kind: type[torch.optim.Optimizer], scale: float) -> None:
    """Where eps and the clamps decide."""
    view, runs = train(maker(kind, {}), 3, scale=scale)
    for run in runs.values():
        followed = follow(view, run)
        assert_close(followed.whole.weight, run.final, run.final.norm())


TENSORS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", TENSORS, ids=lambda kind: kind.__name__)
def test_settings_as_tensors(kind: type[torch.optim.Optimizer]) -> None:
    lr = torch.tensor(0.03, dtype=torch.float64)
    options: dict[str, Any] = {}
    if kind in TENSORS[:2]:  # the others refuse betas as tensors
        options["betas"] = tuple(torch.tensor(b, dtype=torch.float64) for b in (0.9, 0.95))
    view, runs = train(lambda groups: kind(groups, lr=lr, foreach=False, **options), 4)  # type: ignore[call-arg]
    for run in runs.values():
        assert_close(follow(view, run).whole.weight, run.final, run.final.norm())
        assert {type(value) for step in run.steps for value in step.row.settings} <= {
            float,
            bool,
            int,
        }


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused(kind: type[torch.optim.Optimizer]) -> None:
    view, runs = train(lambda groups: kind(groups, lr=0.03, weight_decay=0.1, fused=True), 5)  # type: ignore[call-arg]
    for run in runs.values():
        assert_close(follow(view, run).whole.weight, run.final, run.final.norm())


CAPTURABLE = [kind for kind in CASES if "capturable" in inspect.signature(kind).parameters]


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("kind", CAPTURABLE, ids=lambda kind: kind.__name__)
def test_capturable(
    kind: type[torch.optim.Optimizer], foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's arithmetic for CUDA graphs: steps, and the factors that they give, are tensors.

    torch asks that parameters lie on a GPU. That check alone is lifted; tests/gpu has no need to.
    """
    module = sys.modules[
        torch.optim.Adam.__module__ if kind is torch.optim.AdamW else kind.__module__
    ]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    for settings in CASES[kind]:
        options = {**settings, "foreach": foreach, "capturable": True}
        view, runs = train(maker(kind, options), 6, change=change)
        assert view.why_not is None
        for run in runs.values():
            followed = follow(view, run)
            parts = followed.initial.weight + total([part.weight for part in followed.parts])
            moved = sum(float(p.weight.norm()) for p in followed.parts)
            # Torch's factors are float32 numbers, made by up to eight roundings of half a unit.
            for got in (followed.whole.weight, parts):
                assert float((got - run.final).norm()) <= 8 * 2.0**-24 * moved


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("number", [bias_correction, rectification], ids=lambda made: made.__name__)
def test_wherever_tensors_are_made_by_default(number: Any, float32: bool) -> None:
    """torch.set_default_device, and `with torch.device(...)`, as in training scripts for a GPU."""
    expected = [number(0.9, nth, float32) for nth in range(1, 12)]
    with torch.device("meta"):
        assert [number(0.9, nth, float32) for nth in range(1, 12)] == expected


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Rprop])
def test_a_parameter_that_joins_later(kind: type[torch.optim.Optimizer]) -> None:
    """Its buffers are created by its first step, and do not start from zero."""
    options: dict[str, Any] = (
        {"initial_accumulator_value": 0.7} if kind is torch.optim.Adagrad else {}
    )
    late = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = kind([torch.zeros(1, requires_grad=True)], lr=0.03, **options)  # type: ignore[call-arg]
    optimizer.add_param_group({"params": [late]})
    view = OptimizerView(optimizer)
    trajectory = Trajectory(view.family, {"weight": late}, follow=False)
    whole = trajectory.start({"weight": late})
    for step in range(3):
        late.grad = torch.tensor([1.0, -2.0, 0.1 * step], dtype=torch.float64)
        view.refresh()
        row = view.row(step, "late", late, 1.0, True)
        optimizer.step()
        trajectory.step(row.settings, row.first, late.grad, [(whole, late.grad)])
    assert_close(whole.weight, late.detach(), late.detach().norm())


def test_adamw_without_an_example_is_the_loop_without_its_gradient() -> None:
    """Removed with the preconditioner held fixed: a loop that is written out, AdamW's paper's."""
    random = np.random.default_rng(0)
    examples, steps, lr, beta1, beta2, eps, decay = 4, 20, 0.01, 0.9, 0.99, 1e-8, 0.1
    gradients = random.standard_normal((steps, examples, 5, 7))
    start = random.standard_normal((5, 7))
    w, m, v = start.copy(), np.zeros((5, 7)), np.zeros((5, 7))
    for t in range(1, steps + 1):
        v = beta2 * v + (1 - beta2) * gradients[t - 1].sum(0) ** 2  # of all examples
        m = beta1 * m + (1 - beta1) * gradients[t - 1][1:].sum(0)  # example 0 is removed
        den = np.sqrt(v / (1 - beta2**t)) + eps
        w = w * (1 - lr * decay) - lr * m / (1 - beta1**t) / den

    family = FAMILIES["adam"]
    state = {"weight": torch.from_numpy(start)}
    trajectory = Trajectory(family, state, follow=False)
    initial, removed = trajectory.start(state), trajectory.empty()
    others = [trajectory.empty() for _ in range(examples - 1)]
    for t in range(1, steps + 1):
        settings = AdamSettings(lr, beta1, beta2, eps, decay, False, False, True, t)
        of_step = torch.from_numpy(gradients[t - 1])
        parts = [(initial, None), (removed, of_step[0]), *zip(others, of_step[1:], strict=True)]
        trajectory.step(settings, False, of_step.sum(0), parts)
    kept = initial.weight + total([part.weight for part in others])
    np.testing.assert_allclose(kept.numpy(), w, rtol=1e-12, atol=1e-13)
    assert np.abs(removed.weight.numpy()).max() > 0.01  # removing it changes something


LACKING = [(kind, "step") for kind in CASES if kind is not torch.optim.SGD] + [
    (torch.optim.AdamW, "exp_avg"),
    (torch.optim.RAdam, "exp_avg_sq"),
    (torch.optim.RMSprop, "square_avg"),
    (torch.optim.Rprop, "prev"),
]


@pytest.mark.parametrize(("kind", "key"), LACKING, ids=lambda each: getattr(each, "__name__", each))
def test_a_state_without_what_the_family_needs(kind: type[torch.optim.Optimizer], key: str) -> None:
    """Such as one that another optimizer saved: said when the optimizer is looked at."""
    weight = torch.ones(2, 3, requires_grad=True)
    optimizer = kind([weight], lr=0.03)  # type: ignore[call-arg]
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert family_of(optimizer).why_not is None
    del optimizer.state[weight][key]
    found = family_of(optimizer)
    assert found.family.name == "unknown"
    assert found.why_not is not None
    assert f"has no {key} of a parameter (it has " in found.why_not
    assert "load a state that such an optimizer saved" in found.why_not


def test_other_optimizers_are_unknown() -> None:
    parameters = [torch.zeros(2, 2, requires_grad=True)]

    class Own(torch.optim.NAdam):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Wrapped(torch.optim.NAdam):
        """As frameworks make them: another __init__, the same step."""

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    found = family_of(Own(parameters))
    assert (found.family.name, found.name) == ("unknown", "Own")
    assert found.why_not is not None
    assert "overrides the step of torch.optim.NAdam" in found.why_not
    found = family_of(Wrapped(parameters))
    assert (found.family.name, found.name, found.why_not) == ("nadam", "NAdam", None)
    for optimizer, why in (
        (torch.optim.LBFGS(parameters), "not linear in the gradients"),
        (torch.optim.SparseAdam(parameters), "sparse"),
        (torch.optim.ASGD(parameters), "of no family that is known"),
    ):
        found = family_of(optimizer)
        assert found.family.name == "unknown"
        assert found.why_not is not None
        assert why in found.why_not
