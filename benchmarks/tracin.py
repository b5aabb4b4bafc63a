"""The examples behind a prediction by the last layer alone, beside captum's TracInCPFast.

One network is trained as `memories.trained` has it, twice in turn, block by block: recorded, its
last layer alone, and with ten checkpoints. Set-up is what comes on top of the plain loop:
recording, building and opening the index with its first answer, or writing checkpoints. Both are
then asked for the ten training images that lowered the losses of some test images most; TracIn adds
up what ten checkpoints say, an index what every step did.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.memories import BATCH, images, network
from dualform.client import Client
from dualform.index import build_index
from dualform.record import Recorder

CHECKPOINTS, K, LAST, RATE = 10, 10, "4", 3e-3


class Loop:
    """A network on its way through training.

    Args:
        inputs, labels: What it learns.
    """

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self._random = np.random.default_rng(0)

    def train(self, steps: int, recorder: Recorder | None = None) -> float:
        """So many steps; processor seconds."""
        start = time.process_time()
        for _ in range(steps):
            ids = torch.from_numpy(self._random.integers(0, len(self.labels), BATCH))
            if recorder is not None:
                recorder.annotate(example=ids)
            loss = nn.functional.cross_entropy(self.model(self.inputs[ids]), self.labels[ids])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return time.process_time() - start


def beside_captum(
    data: Path, scratch: Path | None, steps: int, examples: int, rounds: int
) -> list[dict[str, Any]]:
    """Set-up and questions of one and 64 images, processor seconds, ours and captum's.

    Args:
        data: MNIST's folder.
        scratch: Where recording, index and checkpoints go for a while.
        steps, examples: Of training.
        rounds: Of questions.
    """
    inputs, labels = (each[:examples] for each in images(data, "train"))
    tests, truths = images(data, "t10k")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        setup, model, index, paths = _set_up(inputs, labels, Path(folder), steps)
        with Client.local(index) as client:
            options: dict[str, Any] = {"layers": LAST, "by": "example", "k": K}
            options |= {"target": "loss", "order": "smallest"}

            def ours(n: int) -> object:
                return client.attribute(model, tests[:n], labels=truths[:n], **options)

            start = time.process_time()
            ours(1)
            setup["ours"] += time.process_time() - start
            peer = _captum(inputs, labels, paths)

            def theirs(n: int) -> object:
                return peer.influence((tests[:n], truths[:n]), k=K, proponents=True)

            found = [_line("set-up of the last layer", [setup["ours"]], [setup["theirs"]])]
            for n in (1, 64):
                taken = [(_seconds(partial(ours, n)), _seconds(partial(theirs, n)))
                         for _ in range(rounds)]  # fmt: skip
                what = f"{K} best examples by the last layer, {n} image{'s' if n > 1 else ''}"
                found.append(_line(what, *(list(each) for each in zip(*taken, strict=True))))
    return found


def _set_up(
    inputs: torch.Tensor, labels: torch.Tensor, folder: Path, steps: int
) -> tuple[dict[str, float], nn.Module, Path, list[str]]:
    """Seconds of either, the trained model, its index, and the checkpoints of its twin."""
    recorded, kept = Loop(inputs, labels), Loop(inputs, labels)
    theirs = plain = beside = 0.0
    paths = []
    with Recorder(
        recorded.model, recorded.optimizer, folder / "recording", layers=[LAST]
    ) as recorder:
        for number in range(CHECKPOINTS):
            plain += kept.train(steps // CHECKPOINTS)
            beside += recorded.train(steps // CHECKPOINTS, recorder)
            paths.append(str(folder / f"checkpoint-{number}.pt"))
            theirs += _seconds(lambda: torch.save(kept.model.state_dict(), paths[-1]))
        beside += _seconds(recorder.close)
    ours = beside - plain
    ours += _seconds(lambda: build_index(folder / "recording", folder / "index"))
    for one, other in zip(recorded.model.parameters(), kept.model.parameters(), strict=True):
        assert torch.equal(one, other)  # the same network, recorded or not
    return {"ours": ours, "theirs": theirs}, recorded.model.eval(), folder / "index", paths


def _captum(inputs: torch.Tensor, labels: torch.Tensor, paths: list[str]) -> Any:
    """captum's, of the checkpoints that are given."""
    from captum.influence import TracInCPFast

    model = network().eval()

    def load(into: nn.Module, path: str) -> float:
        into.load_state_dict(torch.load(path, weights_only=True))
        return RATE

    loss = nn.CrossEntropyLoss(reduction="sum")
    return TracInCPFast(
        model, model[4], TensorDataset(inputs, labels), paths, load, loss, batch_size=2000
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _line(what: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    taken, least = statistics.median(ours), statistics.median(theirs)
    beside = f"captum TracInCPFast, {CHECKPOINTS} checkpoints"
    return {
        "what": what,
        "beside": beside,
        "seconds": taken,
        "least": least,
        "ratio": taken / least,
    }
