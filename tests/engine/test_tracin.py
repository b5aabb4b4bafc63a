"""Against an independent implementation: captum's TracInCPFast at the last layer of a checkpoint.

TracIn's influence of a training example on a test example is the product of their gradients. At a
linear layer that is (x.x')(e.e'): the attention weight times the product of the values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from captum.influence import TracInCPFast
from digits import load, network
from torch import nn
from torch.utils.data import TensorDataset

from dualform.engine import Index
from dualform.index import build_index
from dualform.record import Recorder

TRAINING, TEST, LAST = 96, 20, "4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has learned something, its state and an index of the step that follows.

    The step's two passes are the training examples and the test examples, both at these weights.
    """
    path = tmp_path_factory.mktemp("tracin")
    digits, model = load(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for start in range(0, 1500, 100):
        optimizer.zero_grad()
        part = slice(start, start + 100)
        nn.functional.cross_entropy(model(digits.images[part]), digits.labels[part]).backward()
        optimizer.step()
    torch.save(model.state_dict(), path / "model.pt")
    optimizer.zero_grad()
    with Recorder(model, optimizer, path / "recording") as recorder:
        for task, (first, count) in {"train": (0, TRAINING), "test": (1500, TEST)}.items():
            part = slice(first, first + count)
            recorder.annotate(task=task)
            # The mean of the losses, as everyone trains: its values are 1/count of the sum's.
            nn.functional.cross_entropy(model(digits.images[part]), digits.labels[part]).backward()
        optimizer.step()
    build_index(path / "recording", path / "index")
    return path


def test_tracin_is_the_weight_times_the_values_product(checkpoint: Path) -> None:
    digits, model = load(), network()

    def load_checkpoint(model: nn.Module, path: str) -> float:
        model.load_state_dict(torch.load(path))
        return 1.0  # the learning rate, which TracIn multiplies with

    tracin = TracInCPFast(
        model,
        list(model.children())[-1],
        TensorDataset(digits.images[:TRAINING], digits.labels[:TRAINING]),
        [str(checkpoint / "model.pt")],
        load_checkpoint,
        nn.CrossEntropyLoss(reduction="sum"),
        batch_size=32,
    )
    test = slice(1500, 1500 + TEST)
    influence = tracin.influence((digits.images[test], digits.labels[test])).double().numpy()

    with Index.open(checkpoint / "index", device="cpu") as index:
        layer = index.layers[LAST]
        rows = np.arange(layer.rows)
        ids = layer.space.ids
        keys, values = (np.empty((len(rows), d), np.float32) for d in (layer.d_in, layer.d_out))
        keys[ids] = layer.keys_at(rows).numpy()
        for unit in range(layer.d_out):
            values[ids, unit] = layer.values_at(rows, unit)
        # Row ids are the order of the passes: the training examples, then the test examples.
        hits = index.top_k(LAST, keys[TRAINING:], k=len(rows))
    weights = np.empty((TEST, len(rows)), np.float32)
    np.put_along_axis(weights, hits.rows, hits.scores, axis=1)
    e = values.astype(np.float64)
    e[:TRAINING] *= TRAINING
    e[TRAINING:] *= TEST
    ours = weights[:, :TRAINING] * (e[TRAINING:] @ e[:TRAINING].T)

    # What float32 rounds is relative to the factors' norms.
    x = np.linalg.norm(keys.astype(np.float64), axis=1)
    sizes = x * np.linalg.norm(e, axis=1)
    error = np.abs(ours - influence) / np.outer(sizes[TRAINING:], sizes[:TRAINING])
    assert influence.shape == ours.shape == (TEST, TRAINING)
    assert error.max() <= 1e-6
    assert np.abs(influence).max() > 0.1
