"""Reduced precision under AdamW: marked, but rows, ledger and states are what training made.

A loop that is written out keeps what autograd saw: keys and values are those 16-bit numbers to the
bit, and a step that a grad scaler skips is none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.optimizers import AdamSettings
from dualform.record import Recorder
from dualform.store.recording import Recording

from . import reading

STEPS, BATCH, SKIPPED = 12, 16, 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_rows_ledger_and_states_under_autocast(
    tmp_path: Path, dtype: torch.dtype, fused: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    keys, values, scales = [], [], []

    def see(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        keys.append(args[0].detach().to(dtype).float().numpy().copy())
        output.register_hook(lambda grad: values.append(-grad.float().numpy()))

    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        model[2].register_forward_hook(see)
        for step in range(STEPS):
            x, y = torch.randn(BATCH, 12), torch.randint(0, 3, (BATCH,))
            recorder.annotate(label=y)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                output = model(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            if step == SKIPPED:
                loss = loss * float("inf")
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    taken = [step for step in range(STEPS) if step != SKIPPED]
    with Recording.open(tmp_path / "r") as recording:
        assert any("autocast" in mark.reason for mark in recording.marks["2"])
        recorded = {each.step: each for each in recording.passes("2")}
        rows = [row for row in recording.ledger().parameters["2.weight"] if row.took_part]
        # The fused kernel is asked to step at every step, and does not where it skips.
        assert len(rows) == len(taken)
        assert [row.settings.nth for row in rows] == list(range(1, STEPS))
        for row, step in zip(rows, taken, strict=True):
            assert row.settings == AdamSettings(
                1e-2, 0.9, 0.999, 1e-8, 1e-2, False, False, True, row.settings.nth
            )
            assert row.scale == pytest.approx(1 / scales[step], rel=1e-3)
            each = recorded[row.step]
            assert np.array_equal(reading.keys(recording, "2", each), keys[step])
            assert np.array_equal(reading.values(recording, "2", each), values[step])
        final = recording.final()
        assert final is not None
        for name, parameter in model.named_parameters():
            assert np.array_equal(final[name], parameter.detach().numpy())
            for buffer in ("exp_avg", "exp_avg_sq"):
                there = optimizer.state[parameter][buffer].numpy()
                assert np.array_equal(final[f"{buffer}:{name}"], there)


def test_the_scaler_is_seen_where_most_units_are_dead(tmp_path: Path) -> None:
    """The part of a large gradient that a step reads may be zero, scaled or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 320), nn.ReLU(), nn.Linear(320, 3))
    with torch.no_grad():
        model[0].bias[20:] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Recorder(model, optimizer, tmp_path / "r"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(16, 256)), torch.arange(16) % 3)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with Recording.open(tmp_path / "r") as recording:
        assert not recording.marks["0"]
        for row in recording.ledger().parameters["0.weight"]:
            assert row.scale == pytest.approx(2.0**-10, rel=1e-6)
    reading.assert_rebuilds(tmp_path / "r")
