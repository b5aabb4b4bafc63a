"""The language models and their training, which repeats itself bit for bit."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dualform.record import LSTM, Recorder, Sink
from runner.lm_config import Variant
from runner.lm_text import Text

State = tuple[torch.Tensor, torch.Tensor]


class LanguageModel(nn.Module):
    """Embedding, dropout, perhaps a linear layer, one LSTM layer, and an output layer."""

    def __init__(self, variant: Variant, vocabulary: int) -> None:
        super().__init__()
        width = variant.projection or variant.embedding
        self.embedding = nn.Embedding(vocabulary, variant.embedding)
        self.dropout = nn.Dropout(variant.dropout)
        self.projection = (
            nn.Identity() if variant.projection is None else nn.Linear(variant.embedding, width)
        )
        self.rnn = LSTM(width, variant.hidden)
        self.decoder = nn.Linear(variant.hidden, vocabulary)

    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the LSTM sees: [batch, time, width]."""
        inputs: torch.Tensor = self.projection(self.dropout(self.embedding(tokens)))
        return inputs

    def forward(
        self, tokens: torch.Tensor, state: State | None = None
    ) -> tuple[torch.Tensor, State]:
        """Logits [batch, time, vocabulary] of the tokens after these, and the LSTM's state."""
        output, state = self.rnn(self.inputs(tokens), state)
        return self.decoder(output), state


@dataclass(frozen=True)
class Trained:
    """What training left.

    Attributes:
        model: In eval mode.
        seconds: How long it took, recording included.
        losses: Mean cross-entropy of each step.
        epochs: How often each position was seen, about.
    """

    model: LanguageModel
    seconds: float
    losses: list[float]
    epochs: float


def train(variant: Variant, text: Text, seed: int, sink: Sink | Path | None) -> Trained:
    """Train from the seed; a row's `offset` is the place of its x_t in the training text.

    Args:
        sink: Where the LSTM's rows go; None to train without a recorder.
    """
    torch.manual_seed(seed)
    model = LanguageModel(variant, len(text.vocabulary))
    optimizer = torch.optim.Adam(model.parameters(), lr=variant.lr, weight_decay=variant.l2)
    recorder = None if sink is None else Recorder(model, optimizer, sink, layers=["rnn"])
    losses: list[float] = []
    state: State | None = None
    start = time.perf_counter()
    for step, (offsets, begins) in enumerate(windows(len(text.training), variant)):
        if recorder is not None:
            recorder.annotate(offset=offsets)
        state = None if begins or state is None else (state[0].detach(), state[1].detach())
        logits, state = model(text.training[offsets], state)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), text.training[offsets + 1].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), variant.clip)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    if recorder is not None:
        recorder.close()
    seen = variant.steps * variant.batch * variant.time
    seconds = time.perf_counter() - start
    return Trained(model.eval(), seconds, losses, seen / len(text.training))


def windows(length: int, variant: Variant) -> Iterator[tuple[torch.Tensor, bool]]:
    """Positions int64 [batch, time] that each step sees, in contiguous lanes, and whether the lanes
    begin anew there.

    Raises:
        ValueError: The text is too short for one step.
    """
    lane = (length - 1) // variant.batch
    per_epoch = lane // variant.time
    if per_epoch == 0:
        raise ValueError(f"{length:,} tokens are too few for {variant.batch} lanes")
    starts = torch.arange(variant.batch)[:, None] * lane + torch.arange(variant.time)
    for step in range(variant.steps):
        place = step % per_epoch
        yield starts + place * variant.time, place == 0


@torch.no_grad()
def perplexity(model: LanguageModel, tokens: torch.Tensor, most: int = 20_000) -> float:
    """Of a text's first tokens, read in one go with carried state."""
    tokens = tokens[: most + 1]
    total, state = 0.0, None
    for start in range(0, len(tokens) - 1, 500):
        window = tokens[start : start + 501]
        logits, state = model(window[None, :-1], state)
        total += float(nn.functional.cross_entropy(logits[0], window[1:], reduction="sum"))
    return math.exp(total / (len(tokens) - 1))
