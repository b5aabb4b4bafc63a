"""Time travel from stored states: every step against the weights that the loop saw, and refusals.

Training is torch's own; the weights after every step are copied by the loop.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import parse_filter
from dualform.engine import Index, verify_index
from dualform.engine.errors import DataLossError, FailedPreconditionError
from dualform.index import build_index
from dualform.record import Recorder, recorder
from dualform.store import DamagedError
from dualform.store.recording import Recording
from dualform.store.recording_writer import Record, RecordingWriter, StepPass

STEPS, D_IN = 24, 40

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.8, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.02},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Trained:
    """An index, and the parameters after 0, 1, ... steps."""

    path: Path
    history: list[dict[str, torch.Tensor]]


def train(
    folder: Path,
    *,
    ratio: float = 1.0,
    steps: int = STEPS,
    before: Callable[[int, nn.Module], None] = lambda step, model: None,
    **settings: Any,
) -> Trained:
    """Train with a schedule; the bias has settings of its own; shards of 40 rows."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D_IN, 12), nn.Tanh(), nn.Linear(12, 3))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "weight" in name]},
        {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    history = []

    def keep() -> None:
        history.append({name: p.detach().clone() for name, p in named.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "STATE_RATIO", ratio)
        with Recorder(model, optimizer, folder / "recording") as watching:
            for step in range(steps):
                keep()
                before(step, model)
                labels = torch.randint(0, 3, (10,))
                watching.annotate(label=labels)
                loss = nn.functional.cross_entropy(model(torch.randn(10, D_IN)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            keep()
    build_index(folder / "recording", folder / "index", shard_rows=40)
    return Trained(folder / "index", history)


def queries(layer: str) -> np.ndarray:
    d_in = {"0": D_IN, "2": 12}[layer]
    return np.random.default_rng(3).standard_normal((4, d_in)).astype(np.float32)


def states(trained: Trained, layer: str = "0") -> list[int]:
    with Index.open(trained.path, device="cpu") as index:
        return [step for step, _ in index.layers[layer].manifest.states]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Momentum and decay; states every 3 steps or so."""
    return train(tmp_path_factory.mktemp("trained"), ratio=10.0, **SETTINGS["decay"])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_is_what_the_loop_saw(tmp_path: Path, name: str) -> None:
    trained = train(tmp_path, ratio=10.0, **SETTINGS[name])
    assert 3 <= len(states(trained)) <= STEPS / 2
    with Index.open(trained.path, device="cpu") as index:
        for layer in ("0", "2"):
            x = queries(layer)
            for step in range(STEPS + 1):
                kept = trained.history[step]
                weight, bias = (kept[f"{layer}.{each}"].double() for each in ("weight", "bias"))
                expected = torch.from_numpy(x).double() @ weight.T + bias
                out = index.dual_output(layer, x, at_step=step)
                whole = index.dual_output(layer, x, at_step=step, where=parse_filter("step >= 0"))
                size = float(torch.linalg.vector_norm(expected))
                assert np.linalg.norm(out.values - expected.numpy()) <= 1e-6 * size
                assert np.linalg.norm(out.values - whole.values) <= 1e-6 * size
                assert np.array_equal(out.initial, whole.initial)
                assert out.coverage == whole.coverage
                assert out.coverage.rows == 10 * step
    report = verify_index(trained.path)
    assert report.ok, report
    assert [each.states for each in report.layers] == [len(states(trained))] * 2


def test_only_what_lies_after_the_state_is_read(trained: Trained, tmp_path: Path) -> None:
    """Shards of 4 steps each: those before the last state can be damaged without harm."""
    damaged = train(tmp_path, ratio=10.0, **SETTINGS["decay"])
    last = states(damaged)[-1]
    for shard in range(last // 4):
        for kind in ("keys.faiss", "values.npy"):
            flip(damaged.path / f"layers/0/{shard:06}.{kind}")
    with Index.open(damaged.path, device="cpu") as index, Index.open(trained.path) as sound:
        for step in range(last, STEPS + 1):
            found = index.dual_output("0", queries("0"), at_step=step)
            expected = sound.dual_output("0", queries("0"), at_step=step)
            assert np.array_equal(found.values, expected.values)
        with pytest.raises(DataLossError, match=r"000000\.keys\.faiss"):
            index.dual_output("0", queries("0"), strategy="scan")


def test_a_trained_layer_is_the_sum_of_all_rows(trained: Trained, tmp_path: Path) -> None:
    """Nothing of the answer comes from a state: it is there with all of them damaged."""
    damaged = train(tmp_path, ratio=10.0, **SETTINGS["decay"])
    for step in states(damaged):
        flip(damaged.path / f"layers/0/states-{step}.safetensors")
    with Index.open(damaged.path, device="cpu") as index, Index.open(trained.path) as sound:
        found, expected, scan = (
            i.dual_output("0", queries("0"), strategy=strategy)
            for i, strategy in ((index, "auto"), (sound, "auto"), (index, "scan"))
        )
        assert np.array_equal(found.values, expected.values)
        assert found.trained is not None
        assert np.linalg.norm(found.values - scan.values) <= 1e-6 * np.linalg.norm(scan.values)
        error = np.linalg.norm(found.values - found.trained)
        assert error <= 1e-5 * np.linalg.norm(found.trained)


@pytest.mark.skipif(sys.platform != "linux", reason="paths are bytes there")
def test_a_path_that_is_no_utf8(trained: Trained, tmp_path: Path) -> None:
    """safetensors takes no such path; its error was told as damage."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    shutil.copytree(trained.path, path)
    assert verify_index(path).ok
    with Index.open(path, device="cpu") as index, Index.open(trained.path) as expected:
        for step in (None, 7):
            np.testing.assert_array_equal(
                index.dual_output("0", queries("0"), at_step=step).values,
                expected.dual_output("0", queries("0"), at_step=step).values,
            )


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    trained = train(tmp_path, ratio=10.0, momentum=0.9)
    first, second = states(trained)[:2]
    flip(trained.path / f"layers/0/states-{second}.safetensors")
    with Index.open(trained.path, device="cpu") as index:
        index.dual_output("0", queries("0"), at_step=second - 1)
        for step in (second, second + 1):
            with pytest.raises(DataLossError, match=f"states-{second}"):
                index.dual_output("0", queries("0"), at_step=step)
        assert index.damage is not None
    report = verify_index(trained.path)
    assert not report.ok
    assert f"states-{second}" in str(report.damage)
    (trained.path / f"layers/0/states-{first}.safetensors").unlink()
    with (
        Index.open(trained.path, device="cpu") as index,
        pytest.raises(DataLossError, match="miss"),
    ):
        index.dual_output("0", queries("0"), at_step=first)


def test_a_damaged_state_in_the_recording_is_refused(tmp_path: Path) -> None:
    train(tmp_path, ratio=10.0)
    file = next((tmp_path / "recording/segments").glob("*.state-*"))
    flip(file)
    with pytest.raises(DamagedError, match=file.name):
        build_index(tmp_path / "recording", tmp_path / "other")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=file.name):
        Recording.open(tmp_path / "recording")


def test_by_default_states_are_a_small_part_of_what_is_written(tmp_path: Path) -> None:
    train(tmp_path, ratio=recorder.STATE_RATIO, steps=200, momentum=0.9)
    files = list((tmp_path / "recording/segments").iterdir())
    size = sum(file.stat().st_size for file in files if ".state-" in file.name)
    rows = sum(file.stat().st_size for file in files if file.suffix == ".bin")
    assert 0 < size <= rows / 50


def test_no_states_without_values_or_for_inexact_layers(tmp_path: Path) -> None:
    """Layer "0" is edited before step 9; its last look was at step 0, but where the edited element
    is by chance one of those that are compared at every step."""

    def edit(step: int, model: nn.Module) -> None:
        if step == 9:
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0  # type: ignore[index]

    trained = train(tmp_path, ratio=10.0, before=edit, momentum=0.9)
    assert states(trained, "2")[-1] > 16
    assert states(trained, "0")[-1] < 20
    with Index.open(trained.path, device="cpu") as index:
        with pytest.raises(FailedPreconditionError, match=r"not exact from step [08] on"):
            index.dual_output("0", queries("0"), at_step=9)
        index.dual_output("2", queries("2"), at_step=STEPS)
    assert verify_index(trained.path).ok
    build_index(tmp_path / "recording", tmp_path / "keys", values=False)
    with Index.open(tmp_path / "keys", device="cpu") as index:
        assert index.layers["0"].manifest.states == ()


def change_state(name: str) -> Callable[[int, dict[str, np.ndarray]], None]:
    def change(number: int, state: dict[str, np.ndarray]) -> None:
        if number == 2:
            state[name].flat[3] += 0.01

    return change


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "momentum:0.weight", "momentum:0.bias"])
def test_verify_finds_a_wrong_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The third state is not what training had: it does not follow from the second."""
    write, number = RecordingWriter.write_state, iter(range(100))

    def wrong(self: RecordingWriter, state: dict[str, np.ndarray]) -> None:
        change_state(name)(next(number), state)
        write(self, state)

    monkeypatch.setattr(RecordingWriter, "write_state", wrong)
    trained = train(tmp_path, ratio=10.0, momentum=0.9)
    _, second, third, *_ = states(trained)
    report = verify_index(trained.path)
    assert not report.ok
    bad, good = report.layers
    assert bad.bad_steps == (second, third)
    assert f"steps {second} to {third} do not add up: {name} is off" in bad.note
    assert bad.weight_error is not None
    assert bad.weight_error < 1e-5  # the run as a whole is sound
    assert (good.ok, good.bad_steps) == (True, None)


def test_verify_takes_no_offence_at_terms_that_cancel(tmp_path: Path) -> None:
    """Every second step undoes the momentum of the one before, up to rounding."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(40):
            x, gradient = torch.randn(8, 3), torch.randn(8, 2)
            for factor in (1.0, -0.9):
                optimizer.zero_grad()
                model(x).backward(factor * gradient)
                optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report


@pytest.mark.parametrize("closed", [True, False])
def test_verify_finds_the_steps_of_a_wrong_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """One row's value at step 13 has the wrong sign; also where there are no final weights."""
    append = RecordingWriter.append

    def wrong(self: RecordingWriter, passes: list[StepPass], *rest: Any) -> None:
        if self.steps == 13:
            passes = [each._replace(values=negated(each.values)) for each in passes]
        append(self, passes, *rest)

    monkeypatch.setattr(RecordingWriter, "append", wrong)
    trained = train(tmp_path, ratio=10.0, momentum=0.9)
    if not closed:
        for name in ("closed.json", "final.safetensors"):
            (tmp_path / "recording" / name).unlink()
        trained = replace(trained, path=tmp_path / "cut")
        build_index(tmp_path / "recording", trained.path)
    after = next(step for step in states(trained) if step > 13)
    before = max(step for step in states(trained) if step <= 13)
    for each in verify_index(trained.path).layers:
        assert not each.ok
        assert each.bad_steps == (before, after)
        assert (each.weight_error is not None) == closed
        assert ("cut short" in each.note) == (not closed)


def negated(record: Record | None) -> Record:
    assert record is not None
    numbers = np.frombuffer(record.memory, np.float32).copy()
    numbers[:3] *= -1
    memory = np.zeros(2 * numbers.nbytes, np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][: numbers.nbytes]
    aligned[:] = numbers.view(np.uint8)
    return Record(memoryview(aligned), record.nbytes)


def flip(path: Path) -> None:
    """Change one byte near the end."""
    data = bytearray(path.read_bytes())
    data[-20] ^= 0x10
    path.write_bytes(bytes(data))
