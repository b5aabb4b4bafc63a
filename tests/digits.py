"""A small real memory: a network trained on scikit-learn's digits, recorded and indexed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from dualform.index import build_index
from dualform.record import Recorder, Sink

STEPS, BATCH = 60, 32


@dataclass(frozen=True)
class Digits:
    """Images, float32 [1797, 64] in 0..1, and labels, int64 [1797]."""

    images: torch.Tensor
    labels: torch.Tensor


def load() -> Digits:
    """The digits, as tensors."""
    data = load_digits()
    images = torch.from_numpy((data.data / 16).astype(np.float32))
    return Digits(images, torch.from_numpy(data.target.astype(np.int64)))


def network() -> nn.Sequential:
    """64-48-48-10 with ReLU, initialised alike every time; its layers are "0", "2" and "4"."""
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    torch.random.set_rng_state(generator_state)
    return model


def record(
    path: Path | Sink,
    *,
    momentum: float = 0.9,
    make: Callable[[nn.Sequential], torch.optim.Optimizer] | None = None,
) -> nn.Sequential:
    """Train for STEPS steps and record: columns label, example (row number) and task.

    Args:
        path: Of the recording, or another sink.
        momentum: Of SGD.
        make: Makes another optimizer instead.

    Returns:
        The trained model.
    """
    digits, model = load(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    if make is not None:
        optimizer = make(model)
    order = np.random.default_rng(0).permutation(len(digits.labels))
    with Recorder(model, optimizer, path) as recorder:
        for step in range(STEPS):
            ids = torch.from_numpy(
                np.take(order, range(step * BATCH, (step + 1) * BATCH), mode="wrap")
            )
            recorder.annotate(
                label=digits.labels[ids], example=ids, task="even" if step % 2 == 0 else "odd"
            )
            loss = nn.functional.cross_entropy(model(digits.images[ids]), digits.labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        kept = list(range(0, 1797, 3))
        recorder.add_examples(kept, [f"digit {digits.labels[i]}" for i in kept])
    return model


def adamw(model: nn.Sequential) -> torch.optim.Optimizer:
    """An optimizer whose rows have no coefficients."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def publish(directory: Path, *, shard_rows: int = 700) -> Path:
    """Record and build below a directory; returns the index."""
    record(directory / "recording")
    build_index(directory / "recording", directory / "index", shard_rows=shard_rows)
    return directory / "index"
