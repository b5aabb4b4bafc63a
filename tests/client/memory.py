"""A small memory whose every number the tests know: a layer trained on chosen rows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dualform.index import build_index
from dualform.record import Recorder

ROWS, D_IN, D_OUT, LR, ROWS_PER_STEP = 600, 12, 5, 0.1, 7


@dataclass(frozen=True)
class Memory:
    """The index at `path`, and what it was made of: key, value and metadata of row t."""

    path: Path
    keys: np.ndarray
    values: np.ndarray
    label: list[int | None]
    task: list[str | None]

    def weights(self, queries: np.ndarray) -> np.ndarray:
        """float64 [n, rows]: every attention weight."""
        weights: np.ndarray = queries.astype(np.float64) @ self.keys.astype(np.float64).T
        return weights


def make_memory(directory: Path) -> Memory:
    """A layer "fc" without bias; labels 0 to 3 and two tasks, both not annotated in some steps."""
    rng = np.random.default_rng(7)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    noise = rng.standard_normal(ROWS)
    label: list[int | None] = []
    task: list[str | None] = []
    model = nn.Sequential(OrderedDict(fc=nn.Linear(D_IN, D_OUT, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with Recorder(model, optimizer, directory / "recording") as recorder:
        for step, first in enumerate(range(0, ROWS, ROWS_PER_STEP)):
            rows = list(range(first, min(first + ROWS_PER_STEP, ROWS)))
            annotation: dict[str, object] = {
                "noise": noise[rows],
                "seen": [t % 3 == 0 for t in rows],
            }
            if step % 10:
                annotation["label"] = [t % 4 for t in rows]
            if step % 15 != 7:
                annotation["task"] = [("mnist", "fashion")[t % 2] for t in rows]
            label += annotation.get("label", [None] * len(rows))  # type: ignore[arg-type]
            task += annotation.get("task", [None] * len(rows))  # type: ignore[arg-type]
            recorder.annotate(**annotation)
            # The gradient at the output is then minus the value.
            loss = -(model(torch.from_numpy(keys[rows])) * torch.from_numpy(values[rows])).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    build_index(directory / "recording", directory / "index", shard_rows=128)
    return Memory(directory / "index", keys, values, label, task)
