"""MNIST as the authors' program used it: their split, their normalisation, their sampling."""

from __future__ import annotations

import io
import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.datasets import MNIST


@dataclass(frozen=True)
class Images:
    """Normalised images, their labels and their ids.

    Attributes:
        inputs: float32 [n, 784].
        labels: int64 [n].
        ids: int64 [n], places in MNIST's own file.
        pixels: uint8 [n, 28, 28].
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    pixels: np.ndarray


def load(data: Path, scratch: Path) -> tuple[Images, Images]:
    """The 40,053 training images and the 10,000 test images.

    torchvision unpacks beside the files, so they are copied to `scratch` first.

    Args:
        data: Folder with MNIST/*.gz or MNIST/raw/*.gz.
        scratch: Writable folder.

    Raises:
        FileNotFoundError: A file of the data set is missing.
    """
    raw = scratch / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for source in _archives(data):
        if not (raw / source.name).exists():
            shutil.copyfile(source, raw / source.name)
    # "download" finds the archives in place, checks their md5 and unpacks them.
    training = MNIST(str(scratch), train=True, download=True)
    test = MNIST(str(scratch), train=False)
    kept, chosen = split()
    mean, deviation = _moments(training.data[kept])
    return (
        _normalised(training, torch.from_numpy(chosen), mean, deviation),
        _normalised(test, torch.arange(len(test.data)), mean, deviation),
    )


def split() -> tuple[np.ndarray, np.ndarray]:
    """The authors' split of the 60,000 training images.

    Returns:
        The 50,000 images that are not held out (they give the normalisation), and the 40,053 of
        them that are trained on; both int64 places in MNIST's training file.
    """
    kept = np.random.RandomState(0x1234).permutation(60_000)[:50_000]
    chosen = np.random.RandomState(0xC1CAFA52).rand(len(kept)) > 0.2
    return kept, kept[chosen]


def batches(n: int, size: int, steps: int, seed: int) -> np.ndarray:
    """Which of n images each step sees: shuffled per epoch, batches cross epoch borders.

    Returns:
        int64 [steps, size].
    """
    random = np.random.default_rng(seed)
    epochs = -(-steps * size // n)
    stream = np.concatenate([random.permutation(n) for _ in range(epochs)])
    return stream[: steps * size].reshape(steps, size)


def network(hidden: tuple[int, ...]) -> nn.Sequential:
    """784 inputs, ReLU layers of these widths, 10 outputs; PyTorch's default initialisation."""
    widths = [784, *hidden, 10]
    layers: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def png(pixels: np.ndarray) -> bytes:
    """A grey image, uint8 [28, 28], as PNG bytes."""
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, format="PNG")
    return sink.getvalue()


def _archives(data: Path) -> list[Path]:
    names = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"]
    found = []
    for name in names:
        places = [data / "MNIST" / folder / f"{name}-ubyte.gz" for folder in ("", "raw")]
        existing = [place for place in places if place.is_file()]
        if not existing:
            raise FileNotFoundError(
                f"{places[0]} is missing: --data is the folder that holds MNIST/"
            )
        found.append(existing[0])
    return found


def _moments(pixels: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of all pixels, exact sums of uint8 without a large copy."""
    counts = np.zeros(256, np.int64)
    for part in pixels.flatten().split(1 << 20):
        counts += np.bincount(part.numpy(), minlength=256)
    values, total = np.arange(256), counts.sum()
    mean = float(counts @ values / total)
    return mean, float(np.sqrt(counts @ values**2 / total - mean**2))


def _normalised(source: MNIST, ids: torch.Tensor, mean: float, deviation: float) -> Images:
    pixels = source.data[ids]
    inputs = pixels.flatten(1).float().sub_(mean).div_(deviation)
    return Images(inputs, source.targets[ids], ids, pixels.numpy())
