"""A replay's memory does not grow with the rows it has seen."""

from __future__ import annotations

import warm

# The memory that four times the rows may add: the ledger, and what malloc keeps.
ALLOWED = 16e6

PROGRAM = """
import sys, numpy as np, psutil, torch
from torch import nn
from dualform.record import Recorder
from dualform.replay import FirstRun, Replay

process, sizes = psutil.Process(), []

def train(sink, steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with Recorder(model, optimizer, sink) as recorder:
        for step in range(steps):
            x, y = torch.randn(256, 256), torch.randint(10, (256,))
            recorder.annotate(label=y)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % 5 == 0:
                sizes.append(process.memory_info().rss)

steps = int(sys.argv[1])
first = FirstRun()
train(first, steps)
replay = Replay(first)
queries = np.random.default_rng(0).standard_normal((50, 256)).astype(np.float32)
best = replay.top_k("0", queries, 20, order="absolute")
replay.sums("0", queries, "label", absolute=True)
replay.dual_output("0", queries)
train(replay, steps)
assert (best.result().rows >= 0).all()
print(max(sizes) - sizes[0])
"""


def growth(steps: int) -> int:
    """What both trainings add to the memory that the process has after its first step, in bytes."""
    done = warm.run(PROGRAM, steps)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_four_times_the_rows_need_no_more_memory() -> None:
    """At 400 steps a recording would hold 214 MB, at 100 steps 53 MB."""
    small, large = growth(100), growth(400)
    assert large - small < ALLOWED, (small, large)
