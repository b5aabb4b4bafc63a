"""The memory that rows wait in: given back as soon as nothing needs it, whoever frees it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch import nn

from dualform.record import Recorder
from dualform.record.buffers import Pool


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))


def test_memory_of_passes_without_backward_is_reused(tmp_path: Path) -> None:
    """A forward whose backward never comes gives its buffer back as soon as its graph is gone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        pool = recorder._tape.pool
        for _ in range(50):
            model(torch.randn(7, 5))
        gc.collect()
        assert sum(len(free) for free in pool._free.values()) <= 2


def test_buffers_that_the_garbage_collector_frees_while_the_pool_counts() -> None:
    """A new shape may come back in the middle of counting those that are free."""
    faults: list[object] = []
    pool = Pool(1 << 20)
    hook, threshold = sys.unraisablehook, gc.get_threshold()
    sys.unraisablehook = lambda fault: faults.append(fault.exc_value)
    gc.set_threshold(1)
    try:
        for i in range(20_000):
            cycle: list[object] = [pool.take(1 + i % 997, 1 + i % 89)]
            cycle.append(cycle)
            del cycle
            pool.take(3 + i % 500, 2)
    finally:
        sys.unraisablehook = hook
        gc.set_threshold(*threshold)
    assert not faults


def test_losses_kept_by_the_loop_keep_no_rows(tmp_path: Path) -> None:
    """`losses.append(loss)` keeps every graph alive, but not the recorder's copies in it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = []
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for _ in range(50):
            optimizer.zero_grad()
            value = model(torch.randn(7, 5)).square().mean()
            value.backward()
            optimizer.step()
            kept.append(value)
        recorder._sink.commit()
        free = sum(len(free) for free in recorder._tape.pool._free.values())
        assert free == 50 * 4  # everything is back, though no graph is gone
