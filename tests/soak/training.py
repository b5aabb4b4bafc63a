"""A training run whose every row is known beforehand, and what must be answered about it.

The loss is linear in the layer's output, sum(output * target), so the gradient at the output is the
target itself. Keys, targets and queries are small multiples of 1/4: dot products are exact in
float32. Answers are computed in float64 by the definition, with nothing of dualform's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

D_IN, D_OUT = 5, 3
LABELS = 3
TASKS = ("a", "b")


@dataclass(frozen=True)
class Batch:
    """The rows of one step: keys float32 [n, D_IN], targets float32 [n, D_OUT], labels int64 [n]
    of which -1 stands for none, the example of each and the task of all."""

    keys: np.ndarray
    targets: np.ndarray
    labels: np.ndarray
    examples: np.ndarray
    task: str


def batch(seed: int) -> Batch:
    """The same for the same seed."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    return Batch(
        (rng.integers(-8, 9, (n, D_IN)) / 4).astype(np.float32),
        (rng.integers(-4, 5, (n, D_OUT)) / 4).astype(np.float32),
        rng.integers(0, LABELS, n),
        rng.integers(0, 10, n),
        TASKS[seed % 2],
    )


def queries(seed: int, n: int) -> np.ndarray:
    """float32 [n, D_IN]."""
    random = np.random.default_rng(seed)
    return (random.integers(-8, 9, (n, D_IN)) / 4).astype(np.float32)


class Trainer:
    """One linear layer and SGD with momentum; a copy of both after every step, unless told not."""

    def __init__(self, seed: int, lr: float, momentum: float, *, copies: bool = True) -> None:
        self._copies = copies
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(D_IN, D_OUT))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.lr, self.momentum = lr, momentum
        self.batches: list[Batch] = []
        self.saved = [self._state()]

    def step(self, rows: Batch, annotate: Callable[..., None] | None = None) -> None:
        """Train on these rows; `annotate` is told of them, as a Recorder is."""
        if annotate is not None:
            columns: dict[str, Any] = {"example": rows.examples, "task": rows.task}
            annotate(label=rows.labels, **columns)
        self.optimizer.zero_grad()
        output = self.model(torch.from_numpy(rows.keys))
        (output * torch.from_numpy(rows.targets)).sum().backward()
        self.optimizer.step()
        self.batches.append(rows)
        if self._copies:
            self.saved.append(self._state())

    def back_to(self, step: int) -> Trainer:
        """Another trainer, loaded from the checkpoint after so many steps."""
        other = Trainer(0, self.lr, self.momentum)
        model, optimizer = self.saved[step]
        other.model.load_state_dict(model)
        other.optimizer.load_state_dict(copy.deepcopy(optimizer))
        other.batches, other.saved = self.batches[:step], self.saved[: step + 1]
        return other

    def memory(self, steps: int | None = None) -> Memory:
        """What was trained on in the first so many steps, all by default."""
        steps = len(self.batches) if steps is None else steps
        weights = [(m["0.weight"].numpy(), m["0.bias"].numpy()) for m, _ in self.saved[: steps + 1]]
        return Memory(tuple(self.batches[:steps]), tuple(weights), self.lr, self.momentum)

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())


@dataclass(frozen=True, eq=False)
class Memory:
    """All rows, in the order of training, and how they were used.

    Attributes:
        batches: One per step.
        weights: (weight, bias) after 0, 1, ... steps.
        lr, momentum: Of every step.
    """

    batches: tuple[Batch, ...]
    weights: tuple[tuple[np.ndarray, np.ndarray], ...]
    lr: float
    momentum: float
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [len(rows.keys) for rows in self.batches]
        self.columns.update(
            step=np.repeat(np.arange(len(sizes)), sizes),
            label=np.concatenate([np.zeros(0, int), *(rows.labels for rows in self.batches)]),
            example=np.concatenate([np.zeros(0, int), *(rows.examples for rows in self.batches)]),
            task=np.repeat(np.array([rows.task for rows in self.batches], object), sizes),
        )

    @property
    def steps(self) -> int:
        return len(self.batches)

    @property
    def rows(self) -> int:
        return len(self.columns["step"])

    def keys(self) -> np.ndarray:
        """float64 [rows, D_IN]."""
        return np.concatenate([np.zeros((0, D_IN)), *(rows.keys for rows in self.batches)])

    def scores(self, asked: np.ndarray) -> np.ndarray:
        """float64 [n, rows], exact."""
        return asked.astype(np.float64) @ self.keys().T

    def groups(self, column: str) -> list[tuple[Any, np.ndarray]]:
        """A column's values, ascending, each with its rows, bool [rows]."""
        values = self.columns[column]
        return [(value, values == value) for value in sorted(set(values.tolist()))]

    def output(self, asked: np.ndarray, mask: np.ndarray, at_step: int | None) -> np.ndarray:
        """The layer's output without the rows outside the mask, float64 [n, D_OUT]."""
        weight, bias = (each.astype(np.float64) for each in self.weights[0])
        moved = self.moved(mask, at_step)
        return asked @ (weight + moved[0]).T + (bias + moved[1])

    def moved(self, mask: np.ndarray, at_step: int | None) -> tuple[np.ndarray, np.ndarray]:
        """How far these rows alone move weight and bias: SGD, step by step, in float64."""
        way = np.zeros((D_OUT, D_IN + 1))
        buffer, first = np.zeros_like(way), 0
        for number, rows in enumerate(self.batches):
            if at_step is not None and number >= at_step:
                break
            each = mask[first : first + len(rows.keys)]
            first += len(rows.keys)
            keys = np.concatenate([rows.keys, np.ones((len(rows.keys), 1))], 1)[each]
            buffer = self.momentum * buffer + rows.targets[each].astype(np.float64).T @ keys
            way -= self.lr * buffer
        return way[:, :-1], way[:, -1]

    def best(
        self, scores: np.ndarray, mask: np.ndarray, k: int, order: str, distinct: str | None
    ) -> list[int]:
        """Rows of one query, best first, by (score, row)."""
        merit = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
        found: list[int] = []
        seen: set[Any] = set()
        for row in sorted(np.flatnonzero(mask).tolist(), key=lambda t: (-merit[t], t)):
            value = row if distinct is None else self.columns[distinct][row]
            if value not in seen:
                seen.add(value)
                found.append(row)
        return found[:k]


@dataclass(frozen=True)
class Filter:
    """Text, and what it selects of the columns by name, bool [rows]."""

    text: str | None
    selects: Callable[[dict[str, np.ndarray]], np.ndarray]


FILTERS: Sequence[Filter] = (
    Filter(None, lambda c: np.ones(len(c["step"]), bool)),
    Filter("label = 1", lambda c: c["label"] == 1),
    Filter("label <> 1", lambda c: c["label"] != 1),
    Filter("step < 2", lambda c: c["step"] < 2),
    Filter("step >= 1 and label in (0, 2)", lambda c: (c["step"] >= 1) & (c["label"] != 1)),
    Filter("task = 'a'", lambda c: c["task"] == "a"),
    Filter("not (task = 'a' or example > 4)", lambda c: (c["task"] != "a") & (c["example"] <= 4)),
    Filter("example between 2 and 5", lambda c: (c["example"] >= 2) & (c["example"] <= 5)),
    Filter("label is null", lambda c: np.zeros(len(c["step"]), bool)),
    Filter("label = 0.5 or example = 3", lambda c: c["example"] == 3),
    Filter("label > 7", lambda c: np.zeros(len(c["step"]), bool)),
)


def batches(seeds: Sequence[int]) -> Iterator[Batch]:
    """One for each seed."""
    return (replace(batch(seed)) for seed in seeds)
