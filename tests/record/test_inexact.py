"""A layer that the ledger does not explain is marked: from which step, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from torch import nn

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.record.buffers import Pool
from dualform.record.check import MOST_LOST, TOLERANCE, GradientCheck, Verdict
from dualform.record.passes import Pass
from dualform.record.watch import GradientWatch
from dualform.store.recording import InexactMark, Recording

from . import reading


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))


def train(
    path: Path,
    steps: int = 40,
    before_step: Callable[[int, nn.Sequential], None] = lambda step, model: None,
    after_step: Callable[[int, nn.Sequential], None] = lambda step, model: None,
    loss: Callable[[nn.Sequential], torch.Tensor] | None = None,
    zero: bool = True,
    optimizer_of: Callable[[nn.Sequential], torch.optim.Optimizer] | None = None,
) -> Recording:
    model = network()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05)
        if optimizer_of is None
        else optimizer_of(model)
    )
    with Recorder(model, optimizer, path):
        for step in range(steps):
            if zero:
                optimizer.zero_grad()
            x, y = torch.randn(16, 12), torch.randint(0, 3, (16,))
            (nn.functional.cross_entropy(model(x), y) if loss is None else loss(model)).backward()
            before_step(step, model)
            optimizer.step()
            after_step(step, model)
    return Recording.open(path)


def only(marks: list[InexactMark]) -> InexactMark:
    (mark,) = marks
    return mark


def test_clipping_by_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def clip(step: int, model: nn.Sequential) -> None:
        if step >= 5:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)

    with caplog.at_level(logging.WARNING, "dualform.record"):
        recording = train(tmp_path / "r", before_step=clip)
    assert only(recording.marks["0"]).from_step == 5
    assert "clipped by value" in only(recording.marks["0"]).reason
    assert "inexact from step 5" in caplog.text


def test_layers_with_the_same_mark_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(3, 4)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    told = [each.getMessage() for each in caplog.records if "inexact" in each.getMessage()]
    (line,) = told
    assert line.startswith("layers '0', '1', '2' and 2 more are inexact from step 0 on: reduced")
    assert list(Recording.open(tmp_path / "r").marks) == list("01234")


def test_an_edited_bias_keeps_the_scale_of_its_weight(tmp_path: Path) -> None:
    """Clipping by norm scales both; that no factor explains the bias's edit does not undo it."""
    factors = []

    def clip_and_edit(step: int, model: nn.Sequential) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        factors.append(min(1.0, 0.1 / (float(norm) + 1e-6)))
        if step == 3:
            bias = model[2].bias
            assert isinstance(bias, nn.Parameter)
            assert bias.grad is not None
            bias.grad[0] += 0.05

    recording = train(tmp_path / "r", steps=5, before_step=clip_and_edit)
    assert only(recording.marks["2"]).from_step == 3
    ledger = recording.ledger().parameters
    scales = np.array([row.scale for row in ledger["2.bias"]])
    assert max(factors) < 0.9
    np.testing.assert_allclose(scales, factors, rtol=1e-5)


def test_clipping_by_value_through_data(tmp_path: Path) -> None:
    def clip(step: int, model: nn.Sequential) -> None:
        if step == 5:
            model[0].weight.grad.data.clamp_(-0.01, 0.01)

    recording = train(tmp_path / "r", before_step=clip)
    assert only(recording.marks["0"]).from_step == 5
    assert recording.marks["2"] == []


def test_noise_on_the_gradient(tmp_path: Path) -> None:
    def disturb(step: int, model: nn.Sequential) -> None:
        if step == 3:
            grad = model[2].weight.grad
            grad.add_(torch.randn_like(grad) * 1e-4)

    recording = train(tmp_path / "r", before_step=disturb)
    assert only(recording.marks["2"]).from_step == 3
    assert recording.marks["0"] == []


def test_noise_on_the_bias_gradient(tmp_path: Path) -> None:
    def disturb(step: int, model: nn.Sequential) -> None:
        if step == 3:
            grad = model[2].bias.grad
            grad.add_(torch.randn_like(grad) * 1e-3)

    recording = train(tmp_path / "r", before_step=disturb)
    assert only(recording.marks["2"]).from_step == 3


def test_gradients_carried_over_a_step(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", zero=False)
    mark = only(recording.marks["0"])
    assert mark.from_step == 1
    assert "carried over" in mark.reason


def test_gradients_assigned_by_hand_later_on(tmp_path: Path) -> None:
    def assign(step: int, model: nn.Sequential) -> None:
        if step == 4:
            for p in model.parameters():
                p.grad = torch.ones_like(p)

    recording = train(tmp_path / "r", before_step=assign)
    assert only(recording.marks["0"]).from_step == 4


def test_gradient_penalty(tmp_path: Path) -> None:
    def loss(model: nn.Sequential) -> torch.Tensor:
        x = torch.randn(16, 12, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    recording = train(tmp_path / "r", loss=loss)
    mark = only(recording.marks["0"])
    assert mark.from_step == 0
    assert "double backward" in mark.reason


def test_create_graph_alone_is_exact(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r"):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 12)).pow(2).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(g.detach().pow(2).sum() for g in grads)
        (loss + penalty).backward()
        optimizer.step()
    assert Recording.open(tmp_path / "r").marks == {"0": [], "2": []}


def test_autocast(tmp_path: Path) -> None:
    def loss(model: nn.Sequential) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(64, 12))
        return out.float().pow(2).mean()

    recording = train(tmp_path / "r", loss=loss)
    mark = only(recording.marks["0"])
    assert mark.from_step == 0
    assert "autocast" in mark.reason
    assert sum(record.rows for record in recording.passes("0")) == 40 * 64


@pytest.mark.parametrize("step", [0, 5, 17, 39])
def test_weights_edited_by_hand(tmp_path: Path, step: int) -> None:
    def edit(at: int, model: nn.Sequential) -> None:
        if at == step:
            model[0].weight.data.mul_(1.5)

    recording = train(tmp_path / "r", after_step=edit)
    mark = only(recording.marks["0"])
    assert mark.from_step == step
    assert "weights changed" in mark.reason
    assert recording.marks["2"] == []


def test_momentum_edited_by_hand(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "r"):
        for step in range(20):
            optimizer.zero_grad()
            model(torch.randn(16, 12)).pow(2).mean().backward()
            optimizer.step()
            if step == 3:
                optimizer.state[model[0].weight]["momentum_buffer"].mul_(0.5)
    assert only(Recording.open(tmp_path / "r").marks["0"]).from_step == 0


def test_adam_is_exact(tmp_path: Path) -> None:
    recording = train(
        tmp_path / "r", optimizer_of=lambda model: torch.optim.Adam(model.parameters(), lr=0.01)
    )
    assert not recording.marks["0"]
    assert recording.ledger().family.name == "adam"
    assert recording.manifest.optimizer == "Adam"
    assert len(recording.passes("0")) == 40
    assert recording.ledger().steps == 40


def test_float64_is_recorded_rounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(16, 12, dtype=torch.float64)
    with Recorder(model, optimizer, tmp_path / "r"):
        model(x).pow(2).mean().backward()
        grad = model[0].weight.grad.clone()
        optimizer.step()
    recording = Recording.open(tmp_path / "r")
    mark = only(recording.marks["0"])
    assert mark.from_step == 0
    assert mark.reason.startswith("rounded")
    assert recording.manifest.layers["0"].dtype == "float64"
    assert recording.initial()["0.weight"].dtype == np.float64
    record = recording.passes("0")[0]
    assert np.array_equal(reading.keys(recording, "0", record), x.float().numpy())
    assert reading.relative(-reading.step_sums(recording, "0")[0][0], grad.numpy()) < 1e-6


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    def loss(model: nn.Sequential) -> torch.Tensor:
        return model(torch.full((4, 12), torch.inf)).pow(2).sum()

    recording = train(tmp_path / "r", steps=3, loss=loss)
    assert "not finite" in only(recording.marks["2"]).reason


def test_a_weight_used_elsewhere_too(tmp_path: Path) -> None:
    def loss(model: nn.Sequential) -> torch.Tensor:
        return model(torch.randn(16, 12)).pow(2).mean() + model[0].weight.pow(2).sum()

    recording = train(tmp_path / "r", loss=loss)
    assert "add up" in only(recording.marks["0"]).reason
    assert recording.marks["2"] == []


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 128])
@pytest.mark.parametrize("lr", [1e-5, 0.05])
def test_no_false_alarm_in_a_long_run(tmp_path: Path, batch: int, lr: float) -> None:
    """Single rows (whose probes vanish by chance now and then), tiny and large steps, momentum."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 5))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(400):
            optimizer.zero_grad()
            x, y = torch.rand(batch, 50) + 1, torch.randint(0, 5, (batch,))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert Recording.open(tmp_path / "r").marks == {"0": [], "2": []}


@pytest.mark.parametrize("across", [1e-2, 1e-3])
@pytest.mark.parametrize(
    ("lr", "edited"),  # where weights grow twelvefold a step, an edit is soon below their rounding
    [(1e-6, False), (1e-6, True), (0.1, False), (0.1, True), (10.0, False)],
)
def test_rows_across_the_probe_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, across: float, lr: float, edited: bool
) -> None:
    """Keys of one direction, to which the private random vector happens to be almost orthogonal: by
    chance this comes in one of fifty such runs. An edit is still seen."""
    fixed = np.random.default_rng(0)  # the values' direction must not lie across the other vector
    monkeypatch.setattr(np.random, "default_rng", lambda: fixed)
    torch.manual_seed(0)
    model = nn.Linear(20, 30)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        v = torch.from_numpy(recorder._layers[0]._check.v)  # type: ignore[union-attr]
        key = torch.randn(20)
        key -= (key @ v) / (v @ v) * v
        key += across * key.norm() * v / v.norm()
        for step in range(20):
            optimizer.zero_grad()
            (model(key.repeat(32, 1)) - 1).square().mean().backward()
            optimizer.step()
            if edited and step == 7:
                with torch.no_grad():
                    model.weight.mul_(1.5)
    marks = Recording.open(tmp_path / "r").marks[""]
    assert [mark.reason.split(" other")[0] for mark in marks] == ["weights changed"] * edited


@pytest.mark.parametrize(("d_in", "signs"), [(20_000, True), (100_000, True), (1_000_000, False)])
def test_long_keys_are_no_fault(tmp_path: Path, d_in: int, signs: bool) -> None:
    """Clipped gradients of a million equal magnitudes: rounding in long sums is not a change."""
    model = nn.Linear(d_in, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(17):
            x = torch.randn(1, d_in)
            optimizer.zero_grad()
            model(x.sign() if signs else x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert Recording.open(tmp_path / "r").marks == {"": []}


@pytest.mark.parametrize("size", [1e-25, 1e-37, 1e-39, 1e-40, 1e-42, 1e-44])
def test_keys_below_the_normal_numbers_are_no_fault(tmp_path: Path, size: float) -> None:
    """What float32 loses there of products and sums has no relative bound; and moves no weight."""
    model = nn.Linear(30, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 30) * size).square().mean().backward()
            optimizer.step()
    assert Recording.open(tmp_path / "r").marks == {"": []}
    build_index(tmp_path / "r", tmp_path / "i")
    report = verify_index(tmp_path / "i")
    assert report.ok, report


@pytest.mark.parametrize("element", range(0, 100, 13))
@pytest.mark.parametrize("scaled", [False, True])
def test_one_infinity_at_the_last_step(tmp_path: Path, element: int, scaled: bool) -> None:
    """Wherever it is in a large gradient, of which a step reads a part."""
    model = nn.Linear(784, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "r"):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 784)).square().mean().backward()
            if step == 2:
                if scaled:
                    model.weight.grad.mul_(2.0)  # type: ignore[union-attr]
                model.weight.grad[element, 3] = float("inf")  # type: ignore[index]
            optimizer.step()
    mark = only(Recording.open(tmp_path / "r").marks[""])
    assert mark.from_step <= 2
    assert "finite" in mark.reason


def verdict(x: torch.Tensor, e: torch.Tensor, grad: torch.Tensor, seed: int) -> Verdict:
    """Test a gradient, untouched since backward, against the rows."""
    as_is = torch.Tensor.detach  # the gradient is [d_out, d_in] already
    check = GradientCheck(x.shape[1], e.shape[1], np.random.default_rng(seed), as_is)
    pool = Pool(1 << 20)
    key, value = pool.take(*x.shape), pool.take(*e.shape)
    key.copy(x)
    value.copy(e)
    item = Pass(0, {}, (len(x),), key)
    item.value = value
    watch = GradientWatch(grad.shape)
    watch.accumulated(grad)
    return check.weight(grad, watch, check.sides([item]))


@settings(max_examples=count(40, 3000), deadline=None)
@given(
    rows=st.integers(1, 300),
    d_in=st.integers(1, 80),
    d_out=st.integers(1, 80),
    offset=st.floats(0, 20),
    spread=st.floats(0, 4),
    seed=st.integers(0, 2**31),
)
def test_freivalds_does_not_cry_wolf(
    rows: int, d_in: int, d_out: int, offset: float, spread: float, seed: int
) -> None:
    """float32 products of any shape and conditioning are within its tolerance."""
    x, e = random_rows(rows, d_in, d_out, offset, spread, seed)
    assert verdict(x, e, -(e.T @ x), seed) == Verdict(True, probe=ANY)


@pytest.mark.parametrize("fault", ["row", "element", "noise"])
def test_freivalds_does_not_miss(fault: str) -> None:
    """One row missing, one element or all elements off by 1e-2 of |E| |X|: caught, but for the
    chance that the probes' product nearly vanishes (0.05 % for normal vectors, each step anew).
    """
    missed = 0
    for seed in range(300):
        x, e = random_rows(20 + seed, 5 + seed % 60, 5 + seed % 70, 1.0, 1.0, seed)
        grad = -(e.T @ x)
        size = float(e.norm() * x.norm())
        if fault == "row":
            worst = int((e.norm(dim=1) * x.norm(dim=1)).argmax())
            grad += torch.outer(e[worst], x[worst])
        elif fault == "element":
            grad[2, 3] += 1e-2 * size
        else:
            grad += 1e-2 * size * torch.randn_like(grad) / grad.numel() ** 0.5
        missed += verdict(x, e, grad, seed).fault != "mismatch"
    assert missed <= 3


def random_rows(
    rows: int, d_in: int, d_out: int, offset: float, spread: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a common part, and values whose lengths differ by factors of exp(spread)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d_in, generator=generator) + offset
    e = torch.randn(rows, d_out, generator=generator)
    return x, e * torch.exp(spread * torch.randn(rows, 1, generator=generator))


def test_weights_that_decay_to_nothing_are_no_fault(tmp_path: Path) -> None:
    """Below float32's normal numbers they are rounded by more than a share of themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(220):
            optimizer.zero_grad()
            model(torch.randn(32, 6)).square().sum().backward()
            optimizer.step()
    assert not model[0].weight.any()
    assert Recording.open(tmp_path / "r").marks == {"0": []}


@pytest.mark.parametrize("spread", [1e-3, 0.0])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(500, 8), (4_000, 3), (10_000, 2), pytest.param(60_000, 8, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("edited", [0.0, 0.01])
@pytest.mark.parametrize("cancel", [False, True])
def test_rows_that_are_much_alike(
    tmp_path: Path,
    rows: int,
    width: int,
    spread: float,
    edited: float,
    cancel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding, or a whole data set at each step: float32 rounds such rows all to one side. That is
    no fault, until it is more than weights that count as rebuilt may be off by."""
    made = np.random.default_rng  # one probe: another may miss at a step what is just too much
    monkeypatch.setattr(np.random, "default_rng", lambda *seed: made(*(seed or (0,))))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    target = torch.ones(rows, 3)
    if cancel:  # what the rows add is far more than what they add up to
        target[::2] = -1.0
    faults = []
    with Recorder(model, optimizer, tmp_path / "r"):
        for step in range(5):
            optimizer.zero_grad()
            x = 0.3 + spread * torch.randn(rows, width)
            y = model(x)
            y.retain_grad()
            (y - target).square().mean().backward()
            assert y.grad is not None
            e, keys = y.grad.double(), x.double()
            way = e.T @ keys
            error = (model[0].weight.grad.double() - way).norm()
            if step == 3 and edited:
                model[0].weight.grad.data[0] *= 1 + edited
                faults.append((step, "the gradient was "))
            elif error > max(MOST_LOST * way.norm(), TOLERANCE * e.norm() * keys.norm()):
                faults.append((step, "float32 lost too much"))
            optimizer.step()
    marks = Recording.open(tmp_path / "r").marks["0"]
    assert len(marks) == bool(faults)
    for mark, (step, why) in zip(marks, faults, strict=False):  # the first is the layer's
        assert mark.from_step == step
        assert mark.reason.startswith(why)
    build_index(tmp_path / "r", tmp_path / "i")
    report = verify_index(tmp_path / "i")
    assert report.ok, report
