"""A training process that saves checkpoints, to be killed and resumed.

python resumer.py PATH CHECKPOINTS STEPS EVERY SEGMENT_BYTES SECONDS_PER_STEP [RESUME_AT_STEP]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

from dualform.record import DiskSink, Recorder, recorder


def network() -> tuple[nn.Module, torch.optim.SGD]:
    """The same at every start."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, dampening=0.2, weight_decay=1e-3
    )
    return model, optimizer


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's own, whatever came before."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(16, 20, generator=random), torch.randint(0, 5, (16,), generator=random)


def train(model: nn.Module, optimizer: torch.optim.SGD, watching: Recorder, step: int) -> None:
    """One step."""
    x, y = batch(step)
    watching.annotate(label=y, example=torch.arange(16) + 16 * step, task=f"part {step // 20}")
    watching.add_examples([step // 5], [f"five steps from {step // 5 * 5} on"])
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def load(folder: Path, step: int) -> tuple[nn.Module, torch.optim.SGD]:
    """What was saved after so many steps."""
    model, optimizer = network()
    saved = torch.load(folder / f"{step}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.SGD) -> None:
    """So that a kill leaves all of it or nothing."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "part")
    (folder / "part").rename(folder / f"{step}.pt")


def main(
    path: Path, folder: Path, steps: int, every: int, size: int, pause: float, start: int | None
) -> None:
    """Train and record, from a checkpoint where `start` is given."""
    recorder.STATE_RATIO = 1
    model, optimizer = network() if start is None else load(folder, start)
    sink = DiskSink(path, segment_bytes=size)
    with Recorder(model, optimizer, sink, resume_at_step=start) as watching:
        for step in range(start or 0, steps):
            train(model, optimizer, watching, step)
            if (step + 1) % every == 0:
                save(folder, step + 1, model, optimizer)
            print(step, flush=True)
            time.sleep(pause)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        *(int(word) for word in sys.argv[3:6]),
        float(sys.argv[6]),
        int(sys.argv[7]) if len(sys.argv) > 7 else None,
    )
