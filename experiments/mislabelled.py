"""Wrong labels planted in MNIST, and found again from test errors and from training's own examples.

    python experiments/mislabelled.py --data DIR --out DIR [--seeds 3] [--examples 6000]

DIR/MNIST/raw holds the .gz files. One in a hundred labels is changed to another class; an MLP
784-128-64-10 is trained, recorded and indexed; and every way of ranking training examples is asked
for the wrong ones: precision at k is the part of its first k that are, k as many as were planted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dualform.client import Client
from dualform.index import build_index
from dualform.record import Recorder

LR, MOMENTUM, BATCH, EPOCHS, CHECKPOINTS, VALIDATION = 0.05, 0.9, 64, 8, 8, 500
Ranking = Callable[[], np.ndarray]
"""A score for each training example: the largest are suspected first."""


def main() -> int:
    """Run it for every seed, and write the table."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=6000)
    arguments = parser.parse_args()
    images, labels = read(arguments.data, "train")
    tests, truths = read(arguments.data, "t10k")
    chosen = slice(0, arguments.examples)
    found = []
    for seed in range(arguments.seeds):
        folder = arguments.out / f"seed-{seed}"
        case = Case(images[chosen], labels[chosen], tests[:VALIDATION], truths[:VALIDATION], seed)
        found.append(case.run(folder))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    (arguments.out / "mislabelled.json").write_text(json.dumps(found, indent=1) + "\n")
    print("| asked | ranked by | precision | seconds |")
    print("|---|---|---:|---:|")
    for name in found[0]["precision"]:
        asked, _, ranked = name.partition(": ")
        precisions = [one["precision"][name] for one in found]
        seconds = np.median([one["seconds"][name] for one in found])
        spread = f"{np.mean(precisions):.2f} ({min(precisions):.2f} to {max(precisions):.2f})"
        print(f"| {asked} | {ranked} | {spread} | {seconds:.1f} |")
    return 0


def read(data: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32 [n, 784] from 0 to 1, and labels, int64 [n]."""
    raw = data / "MNIST" / "raw"
    with gzip.open(raw / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(raw / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.from_numpy(pixels / np.float32(255)), torch.from_numpy(labels.astype(np.int64))


class Case:
    """One training set with wrong labels.

    Args:
        images, labels: Of training, the labels right.
        tests, truths: Of the test images that are asked about.
        seed: Of labels, weights and batches.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        tests: torch.Tensor,
        truths: torch.Tensor,
        seed: int,
    ) -> None:
        self.images, self.tests, self.truths, self.seed = images, tests, truths, seed
        drawn = np.random.default_rng(seed)
        self.wrong = drawn.choice(len(labels), len(labels) // 100, replace=False)
        self.labels = labels.clone()
        shift = torch.from_numpy(drawn.integers(1, 10, len(self.wrong)))
        self.labels[self.wrong] = (labels[self.wrong] + shift) % 10
        self.checkpoints: list[dict[str, torch.Tensor]] = []

    def run(self, folder: Path) -> dict[str, Any]:
        """Train, index, ask; precision and seconds by way of ranking."""
        model = self.train(folder / "recording")
        build_index(folder / "recording", folder / "index")
        with torch.no_grad():
            errors = torch.nonzero(model(self.tests).argmax(1) != self.truths)[:, 0]
        precision, seconds = {}, {}
        with Client.local(folder / "index") as client:
            for name, rank in self.rankings(model, client, errors, folder).items():
                start = time.process_time()
                scores = rank()
                seconds[name] = time.process_time() - start
                first = np.argsort(-scores, kind="stable")[: len(self.wrong)]
                precision[name] = float(np.isin(first, self.wrong).mean())
        return {
            "seed": self.seed,
            "planted": len(self.wrong),
            "errors": len(errors),
            "precision": precision,
            "seconds": seconds,
        }

    def train(self, recording: Path) -> nn.Sequential:
        """The model, recorded; checkpoints at the end of each epoch."""
        torch.manual_seed(self.seed)
        model = nn.Sequential(
            nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        with Recorder(model, optimizer, recording) as recorder:
            for _ in range(EPOCHS):
                for batch in torch.randperm(len(self.images)).split(BATCH):
                    recorder.annotate(example=batch, label=self.labels[batch])
                    loss = F.cross_entropy(model(self.images[batch]), self.labels[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                state = {name: value.clone() for name, value in model.state_dict().items()}
                self.checkpoints.append(state)
        return model.eval()

    def rankings(
        self, model: nn.Sequential, client: Client, errors: torch.Tensor, folder: Path
    ) -> dict[str, Ranking]:
        """Every way, by name."""
        everything = torch.arange(len(self.tests))

        def harm(which: torch.Tensor) -> np.ndarray:
            found = client.scores(
                model, self.tests[which], target="loss", labels=self.truths[which]
            )
            assert found.values is not None
            summed: np.ndarray = found.values.sum(axis=0)
            return summed

        def self_influence() -> np.ndarray:
            found = client.scores(
                model, self.images, target="loss", labels=self.labels, out=folder / "scores.npy"
            )
            assert found.values is not None
            lowered = -np.diagonal(found.values)
            (folder / "scores.npy").unlink()
            return lowered

        ways: dict[str, Ranking] = {}
        last = self.checkpoints[-1:]
        kept = self.checkpoints[:: len(self.checkpoints) // CHECKPOINTS]
        for asked, which in (("test errors", errors), ("500 test images", everything)):
            ways[f"{asked}: dualform, all layers"] = lambda which=which: harm(which)  # type: ignore[misc]
            for title, states, cosine in (
                (f"TracInCP, {len(kept)} checkpoints", kept, False),
                ("gradient dot", last, False),
                ("gradient cosine", last, True),
            ):
                ways[f"{asked}: {title}"] = lambda w=which, s=states, c=cosine: self.products(
                    s, w, c
                )  # type: ignore[misc]
        ways["the examples themselves: dualform, self-influence in the end"] = self_influence
        ways["the examples themselves: dualform, self-influence in their own steps"] = lambda: (
            client.self_influence().scores
        )
        ways[f"the examples themselves: TracInCP, self-influence, {len(kept)} checkpoints"] = (
            lambda: self.norms(kept)
        )
        ways["the examples themselves: loss in the end"] = lambda: self.losses(model)
        return ways

    def products(
        self, states: Sequence[dict[str, torch.Tensor]], which: torch.Tensor, cosine: bool
    ) -> np.ndarray:
        """Minus the products of each example's gradient with the sum of the test images', over all
        parameters and some checkpoints: what TracIn says an example does to raise their loss."""
        total = torch.zeros(len(self.images), dtype=torch.float64)
        for state in states:
            model = network_of(state)
            keys, values = rows(model, self.images, self.labels)
            theirs = rows(model, self.tests[which], self.truths[which])
            dots = torch.zeros(len(self.images), dtype=torch.float64)
            square = torch.zeros(len(self.images), dtype=torch.float64)
            for key, value, k, v in zip(keys, values, *theirs, strict=True):
                whole = v.T @ k  # the sum of the test gradients at this layer, with the bias
                dots += ((value @ whole) * key).sum(1).double()
                square += (key.square().sum(1) * value.square().sum(1)).double()
            total -= dots / square.sqrt().clamp(min=1e-30) if cosine else dots
        return total.numpy()

    def norms(self, states: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
        """TracIn's self-influence: the squared length of each example's gradient."""
        total = torch.zeros(len(self.images), dtype=torch.float64)
        for state in states:
            model = network_of(state)
            for key, value in zip(*rows(model, self.images, self.labels), strict=True):
                total += (key.square().sum(1) * value.square().sum(1)).double()
        return total.numpy()

    def losses(self, model: nn.Module) -> np.ndarray:
        """Of the trained model."""
        with torch.no_grad():
            found = F.cross_entropy(model(self.images), self.labels, reduction="none")
        return found.numpy()


def network_of(state: dict[str, torch.Tensor]) -> nn.Sequential:
    """The model of a checkpoint."""
    model = nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    model.load_state_dict(state)
    return model


def rows(
    model: nn.Sequential, images: torch.Tensor, labels: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By layer what it sees, with a 1 for the bias, and each example's gradient at its output: the
    example's gradient at the weight is the product of both."""
    keys, outputs, seen = [], [], images
    for layer in model:
        before, seen = seen, layer(seen)
        if isinstance(layer, nn.Linear):
            seen.retain_grad()
            keys.append(torch.cat([before.detach(), torch.ones(len(before), 1)], 1))
            outputs.append(seen)
    F.cross_entropy(seen, labels, reduction="sum").backward()
    return keys, [output.grad for output in outputs if output.grad is not None]


if __name__ == "__main__":
    raise SystemExit(main())
