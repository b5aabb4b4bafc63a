"""A small memory with pictures: digits that the first layer saw as they are, in two tasks."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import digits
import numpy as np
import torch
from PIL import Image
from torch import nn

from dualform.client import capture_queries
from dualform.index import build_index
from dualform.record import Recorder

STEPS, BATCH, IMAGES = 12, 32, 96
WITHOUT_PAYLOAD, TEXT_PAYLOAD = 7, 8


@dataclass(frozen=True)
class Pictures:
    """The index at `path`, and per row of layer "0" what it was made of.

    Attributes:
        keys: float32 [rows, 64].
        example, label, step: int64 [rows].
        task: str [rows]: "later" for the second half of training, "early" for the first.
        queries: By layer, float32 [3, d_in], of images that training did not see.
        outputs: float32 [3, 10], the trained network's.
        pixels: uint8 [1797, 8, 8].
    """

    path: Path
    keys: np.ndarray
    example: np.ndarray
    label: np.ndarray
    task: np.ndarray
    step: np.ndarray
    queries: dict[str, np.ndarray]
    outputs: np.ndarray
    pixels: np.ndarray

    def weights(self, number: int) -> np.ndarray:
        """float64 [rows]: layer "0"'s attention weights for one of the queries."""
        weights: np.ndarray = self.keys.astype(np.float64) @ self.queries["0"][number]
        return weights

    def one(self, number: int, *layers: str) -> dict[str, np.ndarray]:
        """One of the queries of these layers."""
        return {layer: self.queries[layer][number : number + 1] for layer in layers}


def png(pixels: np.ndarray) -> bytes:
    """An image as the recorder keeps it."""
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, format="PNG")
    return sink.getvalue()


def make(directory: Path) -> Pictures:
    """Train for STEPS steps on IMAGES images, each seen four times."""
    data, model = digits.load(), digits.network()
    # Signed, so that absolute and signed answers differ.
    inputs = data.images - data.images.mean()
    pixels = (data.images.reshape(-1, 8, 8) * 255).numpy().astype(np.uint8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rng = np.random.default_rng(3)
    plan = np.concatenate([rng.permutation(IMAGES) for _ in range(STEPS * BATCH // IMAGES)])
    tasks = []
    with Recorder(model, optimizer, directory / "recording") as recorder:
        for step, ids in enumerate(torch.from_numpy(plan).split(BATCH)):
            tasks += ["early" if step < STEPS // 2 else "later"] * BATCH
            recorder.annotate(label=data.labels[ids], example=ids, task=tasks[-1])
            loss = nn.functional.cross_entropy(model(inputs[ids]), data.labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        kept = [each for each in range(IMAGES) if each not in (WITHOUT_PAYLOAD, TEXT_PAYLOAD)]
        recorder.add_examples(kept, [png(pixels[each]) for each in kept])
        recorder.add_examples([TEXT_PAYLOAD], ["an eight"])
    build_index(directory / "recording", directory / "index", shard_rows=100)
    asked = inputs[1700:1703]
    with torch.no_grad():
        outputs = model(asked).numpy()
    return Pictures(
        path=directory / "index",
        keys=inputs[plan].numpy(),
        example=plan,
        label=data.labels[plan].numpy(),
        task=np.array(tasks),
        step=np.arange(len(plan)) // BATCH,
        queries=capture_queries(model, asked),
        outputs=outputs,
        pixels=pixels,
    )
