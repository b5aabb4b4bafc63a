"""What JSON says of values that are missing and of values that are no number."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from dualform.index import build_index
from dualform.record import Recorder

from .conftest import dualform

READING = (0.5, math.nan, math.inf)  # of a step's rows, in every other step


def test_a_group_that_is_nan_and_one_without_a_value_differ(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(10):
            recorder.annotate(even=step % 2 == 0)
            if step % 2:
                recorder.annotate(reading=list(READING))
            optimizer.zero_grad()
            model(torch.from_numpy(keys[3 * step : 3 * step + 3])).sum().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    np.save(tmp_path / "q.npy", np.ones((1, 3), np.float32))
    index, file = tmp_path / "index", tmp_path / "q.npy"
    asked = ("--local", index, "--layer", "0", "--query", file, "--json")
    sums = dualform("query", "sums", *asked, "--group-by", "reading")
    assert sums.status == 0, sums.err
    data = json.loads(sums.out)
    assert data["groups"] == [0.5, "inf", "nan", None]
    weights = keys.astype(np.float64).sum(1).reshape(10, 3)
    totals = [weights[1::2, place].sum() for place in (0, 2, 1)] + [weights[::2].sum()]
    np.testing.assert_allclose(data["values"][0], totals, rtol=0, atol=1e-6 * abs(weights).sum())
    best = dualform("query", "top-k", *asked, "-k", 40)
    assert best.status == 0, best.err
    data = json.loads(best.out)
    for row, value, score in zip(
        data["rows"][0], data["columns"]["reading"][0], data["scores"][0], strict=True
    ):
        annotated = row >= 0 and row // 3 % 2
        assert value == ((0.5, "nan", "inf")[row % 3] if annotated else None)
        assert (score is None) == (row < 0)
