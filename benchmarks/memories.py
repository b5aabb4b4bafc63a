"""Memories to ask: recorded keys of the paper's network on MNIST, and isotropic random keys."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dualform.engine import Index
from dualform.index import SHARD_ROWS, build_index
from dualform.record import Recorder

BATCH = 128
QUERIES = 1024


@dataclass(frozen=True)
class Memory:
    """One layer of an index, and what to ask it.

    Attributes:
        title: For people.
        path: The index.
        layer: Its name there.
        queries: float32 [1024, d_in], activations of test images, or noise.
    """

    title: str
    path: Path
    layer: str
    queries: np.ndarray

    def open(self) -> Index:
        return Index.open(self.path, device="cpu")


def images(data: Path, which: str) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST's "train" or "t10k" images, float32 [n, 784] with mean 0 and deviation 1, and labels.

    Args:
        data: A folder that holds the .gz files, at any depth.
    """
    found = sorted(data.rglob(f"{which}-images-idx3-ubyte.gz"))
    if not found:
        raise SystemExit(f"{data} holds no {which}-images-idx3-ubyte.gz: say --data MNIST_DIR")
    path = next((each for each in found if "Fashion" not in str(each)), found[0])
    labels = path.with_name(path.name.replace("images-idx3", "labels-idx1"))
    pixels = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16)
    digits = np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)
    inputs = (pixels.reshape(-1, 784).astype(np.float32) - 33.3) / 78.5
    return torch.from_numpy(inputs), torch.from_numpy(digits.astype(np.int64))


def network() -> nn.Sequential:
    """The paper's: 784-800-800-10."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10)
    )


def trained(
    data: Path, folder: Path, steps: int, shards: int | None = None, *, adamw: bool = False
) -> Path:
    """Train the paper's network with the authors' settings, and publish what it recorded.

    Args:
        data: As for `images`.
        folder: Where the index goes.
        steps: How many.
        shards: In so many, all of one size; None leaves it to the build.
        adamw: By AdamW, in place of the authors' SGD.

    Returns:
        The index, in `folder`; the recording is gone.
    """
    name = f"adamw-{steps}" if adamw else f"{steps}"
    index = folder / f"mnist-{name}"
    if index.exists():
        return index
    inputs, labels = images(data, "train")
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    if adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = np.random.default_rng(0)
    recording = folder / f"recording-{name}"
    with Recorder(model, optimizer, recording) as recorder:
        for _ in range(steps):
            ids = torch.from_numpy(random.integers(0, len(labels), BATCH))
            recorder.annotate(label=labels[ids], example=ids, task="mnist")
            loss = nn.functional.cross_entropy(model(inputs[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    rows = SHARD_ROWS if shards is None else -(-steps * BATCH // shards)
    build_index(recording, index, shard_rows=rows)
    shutil.rmtree(recording)
    return index


def recorded(path: Path, data: Path) -> list[Memory]:
    """The layers of such an index, each with what 1,024 test images give it."""
    x, _ = images(data, "t10k")
    x = x[:QUERIES]
    found = []
    with Index.open(path, device="cpu") as index:
        for name, layer in index.layers.items():
            found.append(Memory(f"layer {name}", path, name, x.numpy()))
            state = index.state(name, "final")
            assert state is not None
            weight = torch.from_numpy(state[layer.manifest.weight])
            x = torch.relu(x @ weight.T + torch.from_numpy(state[str(layer.manifest.bias)]))
    return found


def isotropic(folder: Path, rows: int) -> Memory:
    """A layer of 800 inputs that saw nothing but noise: what sketches can't help with."""
    index = folder / f"isotropic-{rows}"
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(QUERIES, 800, generator=generator).numpy()
    if not index.exists():
        model = nn.Sequential(nn.Linear(800, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with Recorder(model, optimizer, folder / "noise", values=False) as recorder:
            for _ in range(rows // 1000):
                recorder.annotate(label=0)
                optimizer.zero_grad()
                model(torch.randn(1000, 800, generator=generator)).mean().backward()
                optimizer.step()
        build_index(folder / "noise", index)
        shutil.rmtree(folder / "noise")
    return Memory("isotropic", index, "0", queries)
