"""MNIST and Fashion-MNIST as the authors' program used them: split, normalisation, sampling."""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.datasets import MNIST, FashionMNIST

from runner.config import Study


@dataclass(frozen=True)
class Images:
    """Normalised images, their labels and their ids.

    Attributes:
        inputs: float32 [n, 784].
        labels: int64 [n].
        ids: int64 [n], places in the data set's own file plus the data set's offset.
        pixels: uint8 [n, 28, 28].
        tasks: str [n], the data set's name.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    pixels: np.ndarray
    tasks: np.ndarray


# By task: the data set, and what is added to its images' places so that ids don't collide.
_SETS: Mapping[str, tuple[type[MNIST], int]] = {
    "mnist": (MNIST, 0),
    "fashion": (FashionMNIST, 100_000),
}


def load(data: Path, scratch: Path, task: str = "mnist") -> tuple[Images, Images]:
    """The 40,053 training images and the 10,000 test images.

    torchvision unpacks beside the files, so they are copied to `scratch` first.

    Args:
        data: Folder with MNIST/*.gz or MNIST/raw/*.gz, and FashionMNIST likewise.
        scratch: Writable folder.
        task: "mnist" or "fashion".

    Raises:
        FileNotFoundError: A file of the data set is missing.
    """
    training, test, normalised = _read(data, scratch, task)
    return normalised(training, torch.from_numpy(split()[1])), normalised(test, _every(test))


def held_out(data: Path, scratch: Path, task: str = "mnist") -> Images:
    """The 10,000 test images alone, in less time and memory; as for `load`."""
    _, test, normalised = _read(data, scratch, task)
    return normalised(test, _every(test))


def _every(images: MNIST) -> torch.Tensor:
    return torch.arange(len(images.data))


def _read(
    data: Path, scratch: Path, task: str
) -> tuple[MNIST, MNIST, Callable[[MNIST, torch.Tensor], Images]]:
    """Training and test files, and what makes images of some places of one of them."""
    source, offset = _SETS[task]
    raw = scratch / source.__name__ / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for archive in _archives(data / source.__name__):
        if not (raw / archive.name).exists():
            shutil.copyfile(archive, raw / archive.name)
    # "download" finds the archives in place, checks their md5 and unpacks them.
    training = source(str(scratch), train=True, download=True)
    test = source(str(scratch), train=False)
    mean, deviation = _moments(training.data[split()[0]])

    def normalised(images: MNIST, places: torch.Tensor) -> Images:
        pixels = images.data[places]
        inputs = pixels.flatten(1).float().sub_(mean).div_(deviation)
        tasks = np.full(len(places), task, object)
        return Images(inputs, images.targets[places], places + offset, pixels.numpy(), tasks)

    return training, test, normalised


def split() -> tuple[np.ndarray, np.ndarray]:
    """The authors' split of the 60,000 training images, the same for both data sets.

    Returns:
        The 50,000 images that are not held out (they give the normalisation), and the 40,053 of
        them that are trained on; both int64 places in the training file.
    """
    kept = np.random.RandomState(0x1234).permutation(60_000)[:50_000]
    chosen = np.random.RandomState(0xC1CAFA52).rand(len(kept)) > 0.2
    return kept, kept[chosen]


def joined(parts: Iterable[Images]) -> Images:
    """Several sets as one, in this order."""
    sets = list(parts)
    if len(sets) == 1:
        return sets[0]
    return Images(
        torch.cat([each.inputs for each in sets]),
        torch.cat([each.labels for each in sets]),
        torch.cat([each.ids for each in sets]),
        np.concatenate([each.pixels for each in sets]),
        np.concatenate([each.tasks for each in sets]),
    )


def phases(
    study: Study, training: Mapping[str, Images], seed: int
) -> Iterator[tuple[Images, torch.Tensor]]:
    """What each phase of a study's training sees.

    Args:
        study: Its phases.
        training: Training images by task.
        seed: Of the order of the images, throughout.

    Yields:
        The phase's images, and int64 [steps, batch size]: which of them each step sees.
    """
    random = np.random.default_rng(seed)
    for phase in study.phases:
        images = joined(training[task] for task in phase.tasks)
        plan = batches(len(images.ids), study.batch_size, phase.steps, random)
        yield images, torch.from_numpy(plan)


def batches(n: int, size: int, steps: int, random: np.random.Generator) -> np.ndarray:
    """Which of n images each step sees: shuffled per epoch, batches cross epoch borders.

    Returns:
        int64 [steps, size].
    """
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


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers in the order of the forward pass: the paper's layer 0, 1, 2."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def accuracy(model: nn.Module, test: Images) -> float:
    """Share of a test set that a model classifies rightly."""
    with torch.no_grad():
        right = model(test.inputs).argmax(1) == test.labels
    return float(right.double().mean())


def png(pixels: np.ndarray) -> bytes:
    """A grey image, uint8 [28, 28], as PNG bytes."""
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, format="PNG")
    return sink.getvalue()


def _archives(folder: Path) -> list[Path]:
    names = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"]
    found = []
    for name in names:
        places = [folder / below / f"{name}-ubyte.gz" for below in ("", "raw")]
        existing = [place for place in places if place.is_file()]
        if not existing:
            raise FileNotFoundError(
                f"{places[0]} is missing: --data is the folder that holds {folder.name}/"
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
