"""The same answers from a GPU: engine and recorder against the CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import digits
import numpy as np
import pytest
import torch
from synthetic import make_index
from torch import nn

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((30_000, 300)).astype(np.float32)
    keys[10_000:20_000] = keys[:10_000]
    return {
        "keys": keys,
        "values": rng.standard_normal((30_000, 20)).astype(np.float32),
        "queries": np.concatenate([keys[:20], np.zeros((1, 300), np.float32)]),
        "label": rng.integers(0, 5, 30_000),
    }


@pytest.fixture(scope="module")
def path(arrays: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        arrays["values"],
        rows_per_step=100,
        shard_rows=7000,
        label=arrays["label"].tolist(),
    )


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("group_by", [None, "label"])
def test_top_k_is_the_cpus(
    path: Path, arrays: dict[str, np.ndarray], order: str, group_by: str | None
) -> None:
    with Index.open(path, device="cpu") as cpu, Index.open(path, device="cuda") as cuda:
        for ask in ({}, {"rank_by": "contribution", "unit": 3}):
            for k in (1, 100, 3000):
                a, b = (
                    index.top_k("fc", arrays["queries"], k, order=order, group_by=group_by, **ask)
                    for index in (cpu, cuda)
                )
                np.testing.assert_array_equal(a.rows, b.rows)
                np.testing.assert_array_equal(a.scores, b.scores)


def test_sums_and_outputs_are_the_cpus(path: Path, arrays: dict[str, np.ndarray]) -> None:
    terms = np.abs(arrays["queries"]).astype(np.float64) @ np.abs(arrays["keys"]).T.sum(1)
    with Index.open(path, device="cpu") as cpu, Index.open(path, device="cuda") as cuda:
        for absolute in (False, True):
            a, b = (
                index.sums("fc", arrays["queries"], "label", absolute=absolute)
                for index in (cpu, cuda)
            )
            assert (np.abs(a.values - b.values) <= 1e-6 * terms[:, None]).all()
        for group_by in (None, "label"):
            x, y = (
                index.dual_output("fc", arrays["queries"], group_by=group_by)
                for index in (cpu, cuda)
            )
            np.testing.assert_allclose(x.values, y.values, rtol=1e-5, atol=1e-3)


def test_sums_over_distinct_keys_are_the_cpus(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    keys, label = arrays["keys"][np.arange(30_000) % 5000].copy(), arrays["label"]
    keys[7::5000, 3] = np.nan
    path = make_index(tmp_path, keys, None, shard_rows=7000, label=label.tolist())
    with Index.open(path, device="cpu") as cpu, Index.open(path, device="cuda") as cuda:
        for group_by in ("label", "step"):
            a, b = (
                index.sums(
                    "fc", arrays["queries"], group_by, absolute=True, strategy="distinct_keys"
                )
                for index in (cpu, cuda)
            )
            np.testing.assert_allclose(a.values, b.values, rtol=1e-5, atol=1e-3)


def test_a_recording_from_the_gpu_rebuilds_the_weights(tmp_path: Path) -> None:
    data, model = digits.load(), digits.network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(50):
            ids = torch.arange(step * 32, (step + 1) * 32) % len(data.labels)
            recorder.annotate(label=data.labels[ids].cuda(), example=ids)
            output = model(data.images[ids].cuda())
            loss = nn.functional.cross_entropy(output, data.labels[ids].cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok
    assert all(layer.exact_steps == 50 for layer in report.layers)
    assert max(layer.weight_error or 0 for layer in report.layers) < 1e-5
