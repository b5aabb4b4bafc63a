"""A training process to be killed: python trainer.py PATH STEPS COMMIT_BYTES [SECONDS_PER_STEP]."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

from dualform.record import DiskSink, Recorder


def main(path: Path, steps: int, segment_bytes: int, pause: float) -> None:
    """Train and record a fixed network on fixed random data."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sink = DiskSink(path, segment_bytes=segment_bytes)
    with Recorder(model, optimizer, sink) as recorder:
        for step in range(steps):
            x, y = torch.randn(32, 40), torch.randint(0, 10, (32,))
            recorder.annotate(label=y, example=torch.arange(32) + 32 * step, task="random")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            print(step, flush=True)
            time.sleep(pause)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
