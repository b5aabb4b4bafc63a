"""Small trainings that repeat themselves: recorded by any sink."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import digits
import numpy as np
import torch
from torch import nn

from dualform.record import LSTM, Recorder, Sink

STEPS, BATCH = 90, 32

Where = str | Path | Sink
Train = Callable[[Where], nn.Module]


def mlp(
    where: Where, *, seed: int = 0, steps: int = STEPS, edit_at: int | None = None
) -> nn.Module:
    """Digits, 64-48-48-10, momentum, decay and clipping; columns label and example.

    Args:
        where: The recorder's sink.
        seed: Of the order of images.
        steps: Optimizer steps.
        edit_at: The step before which one pixel of the batch is changed.
    """
    data, model = digits.load(), digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    order = np.random.default_rng(seed).permutation(len(data.labels))[:500]
    with Recorder(model, optimizer, where) as recorder:
        for step in range(steps):
            ids = torch.from_numpy(
                np.take(order, range(step * BATCH, (step + 1) * BATCH), mode="wrap")
            )
            images = data.images[ids]
            if step == edit_at:
                images[3, 20] += 1e-6
            recorder.annotate(label=data.labels[ids], example=ids)
            loss = nn.functional.cross_entropy(model(images), data.labels[ids])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


def offsets() -> list[np.ndarray]:
    """What the language model sees at each step: places in its text, int64 [4, 8]."""
    lanes = np.arange(4)[:, None] * 50 + np.arange(8)
    return [(lanes + 8 * step) % 199 for step in range(30)]


def language_model(where: Where) -> nn.Module:
    """An LSTM over random tokens, plain SGD; column offset, a token's place in the text."""
    torch.manual_seed(0)
    text = torch.randint(11, (200,))
    model = nn.ModuleDict({"embedding": nn.Embedding(11, 5), "rnn": LSTM(5, 7)})
    model["head"] = nn.Linear(7, 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(model, optimizer, where) as recorder:
        for places in map(torch.from_numpy, offsets()):
            recorder.annotate(offset=places)
            output, _ = model["rnn"](model["embedding"](text[places]))
            loss = nn.functional.cross_entropy(
                model["head"](output).flatten(0, 1), text[places + 1].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model
