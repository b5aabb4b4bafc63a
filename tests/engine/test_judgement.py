"""Verify judges as float32 training allows: rounding and noise are no faults, missing rows are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from torch import nn

from dualform.client import Client, FailedPreconditionError
from dualform.engine import Index, VerifyReport, verify_index
from dualform.engine.api.judgement import Rebuilt, judge
from dualform.index import build_index
from dualform.record import Recorder
from dualform.record.blocks import StepBlocks

STEPS, BATCH, TIME, WIDTH = 60, 4, 6, 16

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


class Attention(nn.Module):
    """One head over a sequence: softmax ignores the key's bias, whose true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        mixed: torch.Tensor = scores.softmax(-1) @ self.value(x)
        out: torch.Tensor = self.head(mixed.mean(1))
        return out


def record(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    generator = torch.Generator().manual_seed(1)
    with Recorder(model, optimizer, path / "recording"):
        for _ in range(STEPS):
            x = torch.randn(BATCH, TIME, WIDTH, generator=generator)
            y = torch.randint(0, 3, (BATCH,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    build_index(path / "recording", path / "index")
    return path / "index"


def reports(path: Path) -> tuple[VerifyReport, dict[str, str]]:
    report = verify_index(path)
    return report, {each.layer: each.note for each in report.layers}


def test_a_key_bias_under_adamw_is_noise_and_said_to_be(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attention()
    index = record(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    report, notes = reports(index)
    assert report.ok
    assert "key.bias: its gradient is rounding noise" in notes["key"]
    assert [outputs.layer for outputs in report.layers if outputs.note] == ["key"]
    by_name = {outputs.layer: outputs for outputs in report.layers}
    assert by_name["key"].bias_error is not None
    assert by_name["key"].bias_error > 1e-3
    for name in ("query", "value", "head"):
        error = by_name[name].output_error
        assert error is not None
        assert error <= 1e-5
    # The noise is the remainder: the output is there with it, and refused without.
    queries = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    with Index.open(index, device="cpu") as opened:
        out = opened.dual_output("key", queries, max_residual=np.inf)
    outputs = model.key(torch.from_numpy(queries)).detach().double().numpy()
    assert out.residual is not None
    whole = out.values.astype(np.float64) + out.residual
    assert (np.linalg.norm(whole - outputs, axis=1) <= 1e-6 * np.linalg.norm(outputs, axis=1)).all()
    with Client.local(index, device="cpu") as client:
        refused_in_words(client, model, queries)
    shown = warm.run("dualform", "index", "inspect", str(index)).stdout.splitlines()
    for line in shown:
        if line.startswith("key "):
            assert re.search(r"weights exact; no row explains 0\.\d+ of its outputs", line)
        if line.startswith(("query ", "value ", "head ")):
            assert line.endswith(" exact")


def refused_in_words(client: Client, model: nn.Module, queries: np.ndarray) -> None:
    """Where the remainder lies, and whose outputs they are in the user's words."""
    cause = r"unexplained, as residual \(most in 'key\.bias', [\d.]+ of .*rounding noise.*verify"
    with pytest.raises(FailedPreconditionError, match=rf"for query \d {cause}"):
        client.dual_output("key", queries)
    # Two inputs of six places: the input is named, and how to go on without the layer.
    inputs = torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(3))
    with pytest.raises(
        FailedPreconditionError, match=rf"for input [01] {cause}.*layers=.*max_residual"
    ):
        client.attribute(model, inputs, target=0, by="step")
    client.attribute(model, inputs, target=0, by="step", layers=["query", "value", "head"])


class Normed(nn.Module):
    """A linear layer before batch norm, which takes its bias away; half the units after it are
    dead."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 10)
        self.head = nn.Linear(10, 3)
        nn.init.constant_(self.second.bias[:5], -5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.second(self.norm(self.first(x[:, 0])))))
        return out


def test_a_bias_before_batch_norm_and_dead_units_under_adamw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normed()
    before = model.second.weight.detach().double().numpy().copy()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    index = record(tmp_path, model, torch.optim.AdamW(groups, lr=1e-3))
    report, notes = reports(index)
    assert report.ok
    assert "first.bias: its gradient is rounding noise" in notes["first"]
    assert notes["head"] == ""
    assert "noise" not in notes["second"]
    rng = np.random.default_rng(0)
    with Index.open(index, device="cpu") as opened:
        for name in ("first", "second", "head"):
            layer = model.get_submodule(name)
            queries = rng.standard_normal((5, opened.layers[name].d_in)).astype(np.float32)
            out = opened.dual_output(name, queries, max_residual=np.inf)
            expected = layer(torch.from_numpy(queries)).detach().double().numpy()
            assert out.residual is not None
            whole = out.values.astype(np.float64) + out.residual
            length = np.linalg.norm(expected, axis=1)
            assert (np.linalg.norm(whole - expected, axis=1) <= 1e-6 * length).all()
            share = np.linalg.norm(out.residual, axis=1) / length
            assert share.min() > 1e-6 if name == "first" else share.max() < 1e-5
        # Of a dead unit nothing but decay moved the weight: no row adds anything at all.
        parts = opened.dual_output("second", np.eye(12, dtype=np.float32), max_residual=np.inf)
    rows = parts.values.astype(np.float64) - parts.initial
    assert not rows[:, :5].any()
    assert rows[:, 5:].any(axis=0).all()
    after = model.second.weight.detach().double().numpy()
    np.testing.assert_allclose(after[:5], before[:5] * (1 - 1e-4) ** STEPS, rtol=1e-5)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-7),
    ],
    ids=["sgd 0.5", "sgd 1e-4", "momentum 1e-8", "adamw 1e-7"],
)
def test_weights_that_hardly_moved_are_no_fault(tmp_path: Path, optimizer_of: Optimizers) -> None:
    torch.manual_seed(0)
    model = Attention()
    report, notes = reports(record(tmp_path, model, optimizer_of(model)))
    assert report.ok, notes
    for each in report.layers:
        assert each.output_error is not None
        assert each.output_error <= 1e-5 or "noise" in each.note
        # Where the way is not rebuilt, that is said.
        assert each.note or max(each.weight_error or 0, each.bias_error or 0) <= 1e-4


@pytest.mark.parametrize("lr", [0.5, 1e-3])
def test_a_step_that_is_not_in_the_rows_is_a_fault(
    tmp_path: Path, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's value is lost on its way to the recording: nobody marks it, the weights tell."""
    torch.manual_seed(0)
    model = Attention()
    real = StepBlocks.take
    lost = []

    def losing(self: StepBlocks, layer: str, item: Any, values: bool) -> Any:
        if layer == "value" and self._step == STEPS // 2:
            item.value.array[0] = 0
            lost.append(layer)
        return real(self, layer, item, values)

    monkeypatch.setattr(StepBlocks, "take", losing)
    report, notes = reports(record(tmp_path, model, torch.optim.SGD(model.parameters(), lr=lr)))
    assert lost
    assert not report.ok
    assert "do not rebuild" in notes["value"]


@pytest.mark.parametrize(("output_error", "sound"), [(3e-5, True), (2e-4, False)])
def test_a_short_way_is_judged_by_what_outputs_are_answered_with(
    output_error: float, sound: bool
) -> None:
    """A bias that came back to where it began: 320 float32 roundings beside a way of 1e-3."""
    bias = Rebuilt("2.bias", error=1e-6, moved=1e-3, size=0.1, terms=1.0)
    judgement = judge([bias], 320, output_error, marked=False)
    assert (len(judgement.faults), len(judgement.notes)) == ((0, 1) if sound else (1, 0))
