"""A replay's memory does not grow with the rows it has seen."""

from __future__ import annotations

import pytest
import warm

# What the second half of a training may add: the ledger, and what malloc keeps. A recording would
# hold 107 MB more.
ALLOWED = 16e6

PROGRAM = """
import numpy as np, psutil, torch
from torch import nn
from dualform.record import Recorder
from dualform.replay import FirstRun, Replay

process = psutil.Process()

def train(sink, steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sizes = []
    with Recorder(model, optimizer, sink) as recorder:
        for step in range(steps):
            x, y = torch.randn(256, 256), torch.randint(10, (256,))
            recorder.annotate(label=y)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            sizes.append(process.memory_info().rss)
    quarter = steps // 4
    middle, end = sizes[quarter : 2 * quarter], sizes[-quarter:]
    print(int(np.median(end) - np.median(middle)))

first = FirstRun()
train(first, 400)
replay = Replay(first)
queries = np.random.default_rng(0).standard_normal((50, 256)).astype(np.float32)
best = replay.top_k("0", queries, 20, order="absolute")
replay.sums("0", queries, "label", absolute=True)
replay.dual_output("0", queries)
train(replay, 400)
assert (best.result().rows >= 0).all()
"""


@pytest.mark.slow
def test_more_rows_need_no_more_memory() -> None:
    """Of each training, what its last quarter holds more than its second: a peak here and there,
    where the machine is busy, is no growth."""
    done = warm.run(PROGRAM)
    assert done.returncode == 0, done.stderr
    growths = [int(line) for line in done.stdout.split()]
    assert len(growths) == 2
    assert max(growths) < ALLOWED, growths
