"""What a layer holds can be exchanged while it trains: marked from that step on, never passed over.

What a mark must say comes from the loop itself: its weights after every step, and whether training
runs as it does without a recorder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import LSTM, Recorder
from dualform.store.recording import Recording

from . import reading

STEPS, CHANGED = 20, 7
"""The change comes after so many steps."""

Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]
Loop = list[dict[str, torch.Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def train(path: Path | None, change: Change, at: int = CHANGED, momentum: float = 0.9) -> Loop:
    """The layers' weights and biases as the loop saw them before each step and at the end."""
    cpu = torch.device("cpu")  # whatever the default is
    with cpu:
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    history = []
    with nullcontext() if path is None else Recorder(model, optimizer, path):
        for step in range(STEPS):
            with cpu:
                if step == at:
                    change(model, optimizer)
                x, y = torch.randn(16, 12), torch.randint(0, 3, (16,))
            history.append({k: v.detach().clone() for k, v in model.state_dict().items()})
            x = x.to(next(model.parameters()).dtype)
            optimizer.zero_grad()
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if at == STEPS:
            change(model, optimizer)
        history.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    return history


def assign(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def assign_both(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    assign(model, optimizer)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def one_assigned_in_place(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """As many parameters as before, in the same list."""
    model[0].weight = nn.Parameter(model[0].weight.detach() + 0.1)
    optimizer.param_groups[0]["params"][0] = model[0].weight


def no_bias(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].bias = None


def new_bias(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].bias = nn.Parameter(torch.ones(16))


def new_weight(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight = nn.Parameter(torch.ones(16, 12))


def wider(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = torch.ones(20, 12)
    model[0].bias.data = torch.ones(20)
    model[2].weight.data = torch.ones(16, 20)
    optimizer.state.clear()


def normed(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    parametrizations.spectral_norm(model[0])


def pruned(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def another_layer(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0] = nn.Linear(12, 16)


def double(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.double()
    optimizer.state.clear()


CHANGES: list[tuple[Change, str]] = [
    (assign, "replaced by another parameter"),
    (assign_both, "replaced by another parameter"),
    (one_assigned_in_place, "replaced by another parameter"),
    (no_bias, "bias was removed"),
    (new_bias, "bias was replaced"),
    (new_weight, "weight was replaced"),
    (normed, "computed from other parameters"),
    (pruned, "computed from other parameters"),
    (another_layer, "another module in its place"),
    (double, "float64 now"),
    (wider, "has the shape [20, 12] now"),
]


@pytest.fixture(params=CHANGES, ids=lambda pair: pair[0].__name__)
def change(request: pytest.FixtureRequest) -> tuple[Change, str]:
    return request.param


def test_marked_from_the_step_of_the_change(tmp_path: Path, change: tuple[Change, str]) -> None:
    apply, reason = change
    plain = train(None, apply)
    history = train(tmp_path / "r", apply)
    for before, after in zip(plain, history, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    recording = Recording.open(tmp_path / "r")
    first = recording.marks["0"][0]
    assert first.from_step == CHANGED
    assert reason in first.reason
    # What came before is still a sum of rows: the weight that the loop saw when the change came.
    ledger, initial = recording.ledger(), recording.initial()
    c = ledger.coefficients("2.weight", CHANGED)
    sums = reading.step_sums(recording, "2")[0][:CHANGED]
    rebuilt = c.p * initial["2.weight"].astype(np.float64) + np.tensordot(c.c, sums, 1)
    reference = train(None, lambda *_: None)[CHANGED]["2.weight"].numpy()
    assert reading.relative(rebuilt, reference) < 1e-6


def test_the_final_state_is_what_the_layer_holds(tmp_path: Path) -> None:
    """Not what the optimizer went on with."""
    for apply in (assign, assign_both, no_bias, new_weight):
        path = tmp_path / apply.__name__
        last = train(path, apply)[-1]
        final = Recording.open(path).final()
        assert final is not None
        assert np.array_equal(final["0.weight"], last["0.weight"].numpy())
        assert np.array_equal(final["0.bias"], last.get("0.bias", torch.zeros(16)).numpy())


@pytest.mark.parametrize("apply", [no_bias, wider])
def test_wherever_tensors_are_made_by_default(tmp_path: Path, apply: Change) -> None:
    here = train(tmp_path / "here", apply)
    torch.set_default_device("meta")
    try:
        there = train(tmp_path / "there", apply)
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(here[-1][name], there[-1][name]) for name in there[-1])
    one, other = Recording.open(tmp_path / "here"), Recording.open(tmp_path / "there")
    assert one.marks == other.marks
    first, second = one.final(), other.final()
    assert first is not None
    assert second is not None
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)


@pytest.mark.parametrize(("apply", "reason"), [CHANGES[0], CHANGES[3], CHANGES[-1]])
def test_an_index_says_it(tmp_path: Path, apply: Change, reason: str) -> None:
    train(tmp_path / "r", apply)
    build_index(tmp_path / "r", tmp_path / "i")
    first, *_ = verify_index(tmp_path / "i").layers
    assert first.exact_steps == CHANGED
    assert reason in first.note


def test_rows_of_a_parameter_that_the_optimizer_took_over(tmp_path: Path) -> None:
    """Attention weights stay exact: its rows from the first pass on. Without it, there are none."""
    for apply, steps in ((assign_both, STEPS), (assign, CHANGED)):
        path = tmp_path / apply.__name__
        train(path, apply)
        records = Recording.open(path).passes("0")
        assert [record.step for record in records] == list(range(steps))


def test_after_the_last_step(tmp_path: Path) -> None:
    train(tmp_path / "r", assign, at=STEPS)
    mark = Recording.open(tmp_path / "r").marks["0"][0]
    assert mark.from_step == STEPS - 1


def test_tied_later(tmp_path: Path) -> None:
    def share(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        again = nn.Linear(16, 16)
        again.weight = model[2].weight
        model[3] = nn.Sequential(nn.Tanh(), again)

    train(tmp_path / "r", share)
    recording = Recording.open(tmp_path / "r")
    mark = recording.marks["2"][0]
    assert mark.from_step == CHANGED
    assert "add up" in mark.reason


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_data_replaced(tmp_path: Path, momentum: float) -> None:
    def data(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.data = model[0].weight.detach() * 1.01

    train(tmp_path / "r", data, momentum=momentum)
    (mark,) = Recording.open(tmp_path / "r").marks["0"]
    assert mark.from_step == CHANGED - 1
    assert "weights changed" in mark.reason


def blind_to(change: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As much of a change as u'(change)v does not see."""
    return change - (u @ change @ v) / (u @ u * (v @ v)) * torch.outer(u, v)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_change_that_probes_cannot_see(tmp_path: Path, make: type[torch.optim.Optimizer]) -> None:
    """By the recorder's own u and v; by chance this was so in one of a thousand runs."""
    model = network()
    optimizer = make(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        check = recorder._layers[0]._check  # type: ignore[union-attr]
        u, v = (torch.from_numpy(vector).double() for vector in (check.u, check.v))
        for step in range(STEPS):
            if step == CHANGED:
                weight = model[0].weight.detach().double()
                model[0].weight.data = (weight + 1e-3 * blind_to(weight, u, v)).float()
            optimizer.zero_grad()
            model(torch.randn(16, 12)).square().mean().backward()
            optimizer.step()
    (mark,) = Recording.open(tmp_path / "r").marks["0"]
    assert mark.from_step == CHANGED - 1
    assert "weights changed" in mark.reason


@pytest.mark.parametrize("element", range(0, 48, 5))
def test_every_element_of_a_small_parameter_is_looked_at(tmp_path: Path, element: int) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, tmp_path / "r"):
        for step in range(6):
            if step == 4:
                with torch.no_grad():
                    model[4].weight.view(-1)[element] += 0.1
            optimizer.zero_grad()
            model(torch.randn(16, 12)).square().mean().backward()
            optimizer.step()
    (mark,) = Recording.open(tmp_path / "r").marks["4"]
    assert mark.from_step == 3


def test_weights_that_come_back_before_the_step(tmp_path: Path) -> None:
    """Averaged weights are swapped in to be evaluated, and out again: nothing changed."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(STEPS):
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 0.9 for name, value in kept.items()})
            with torch.no_grad():
                model(torch.randn(4, 12))
            model.load_state_dict(kept)
            optimizer.zero_grad()
            model(torch.randn(16, 12)).square().mean().backward()
            optimizer.step()
    assert Recording.open(tmp_path / "r").marks == {"0": [], "2": [], "4": []}
    reading.assert_rebuilds(tmp_path / "r")


def test_a_layer_that_the_optimizer_no_longer_holds_stands_still(tmp_path: Path) -> None:
    """Its ledger says so; a gradient that nobody zeroes or uses is no fault."""

    def let_go(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        held = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = [p for p in held if p is not model[0].weight]

    train(tmp_path / "r", let_go)
    recording = Recording.open(tmp_path / "r")
    assert recording.marks == {"0": [], "2": [], "4": []}
    reading.assert_rebuilds(tmp_path / "r")


def test_a_part_of_an_lstm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": LSTM(5, 6)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r"):
        for step in range(6):
            if step == 4:
                model["lstm"].hh.weight = nn.Parameter(torch.zeros(24, 6))
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            model["lstm"](torch.randn(3, 4, 5))[0].square().mean().backward()
            optimizer.step()
    mark = Recording.open(tmp_path / "r").marks["lstm"][0]
    assert mark.from_step == 4
    assert "replaced" in mark.reason


def test_parameters_that_a_call_alone_uses(tmp_path: Path) -> None:
    """functional_call puts others in the layer's place for one call: nothing was replaced."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            other = {k: nn.Parameter(torch.ones_like(p)) for k, p in model.named_parameters()}
            x = torch.randn(8, 12)
            torch.func.functional_call(model, other, x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()
    assert Recording.open(tmp_path / "r").marks == {"0": [], "2": [], "4": []}
    reading.assert_rebuilds(tmp_path / "r")
