"""What AdamW costs: building, masked outputs and contributions; and how exact its outputs are.

The paper's network on MNIST with AdamW (weight decay 0.1, warm-up and cosine, clipped to 1), beside
the same training with SGD for what is compared with it. On a machine that does other things read
the second of each pair, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.memories import BATCH, images, network
from dualform.client import parse_filter
from dualform.engine import Index
from dualform.index import build_index
from dualform.record import Recorder

LAYERS = ("0", "2", "4")
UNIT = 3


def train(data: Path, steps: int, path: Path | None, adamw: bool) -> tuple[nn.Sequential, Timed]:
    """Train the network; returns it and what the loop took, recorded where there is a path."""
    inputs, labels = images(data, "train")
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    if adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1.0, (s + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * s / steps)),
    )
    random = np.random.default_rng(0)

    def loop(annotate: Callable[..., None]) -> None:
        for _ in range(steps):
            ids = torch.from_numpy(random.integers(0, len(labels), BATCH))
            annotate(label=labels[ids], example=ids)
            loss = nn.functional.cross_entropy(model(inputs[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if adamw:
                schedule.step()

    if path is None:
        return model, timed(lambda: loop(lambda **_: None))
    with Recorder(model, optimizer, path) as recorder:
        found = timed(lambda: loop(recorder.annotate))
    return model, found


class Timed(NamedTuple):
    """Seconds that something took: by the clock, and of all processors."""

    wall: float
    cpu: float

    def to(self, other: Timed) -> tuple[float, float]:
        """How many times the other's it is."""
        return self.wall / other.wall, self.cpu / other.cpu


def timed(call: Callable[[], object]) -> Timed:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Timed(time.perf_counter() - wall, time.process_time() - cpu)


def least(call: Callable[[], object], times: int = 9) -> Timed:
    """The quickest of some calls, by the clock and by the processors."""
    found = [timed(call) for _ in range(times)]
    return Timed(min(each.wall for each in found), min(each.cpu for each in found))


def median(calls: Sequence[Callable[[], object]]) -> Timed:
    found = [timed(call) for call in calls]
    return Timed(*(float(np.median(each)) for each in zip(*found, strict=True)))


def measured(data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Everything, in one run; pairs are by the clock and of processor time."""
    found: dict[str, Any] = {"steps": steps, "rows": steps * BATCH}
    _, trained = train(data, steps, None, adamw=True)
    train(data, steps, folder / "sgd", adamw=False)
    sgd = timed(lambda: build_index(folder / "sgd", folder / "sgd-index"))
    shutil.rmtree(folder / "sgd")
    shutil.rmtree(folder / "sgd-index")
    model, _ = train(data, steps, folder / "adamw", adamw=True)
    built = timed(lambda: build_index(folder / "adamw", folder / "index"))
    found["train_s"], found["build_s"], found["build_sgd_s"] = trained, built, sgd
    found["build_of_sgd"] = built.to(sgd)
    x, labels = images(data, "t10k")
    queries, at = {}, x
    with torch.no_grad():
        for module, name in zip(model, map(str, range(len(model))), strict=True):
            if name in LAYERS:
                queries[name] = at.numpy()
            at = module(at)
    found["accuracy"] = float((at.argmax(1) == labels).float().mean())
    with Index.open(folder / "index", device="cpu") as index:
        ask_outputs(index, model, queries, trained, found)
        ask_contributions(index, queries["0"], found)
    shutil.rmtree(folder / "index")
    parts = timed(lambda: build_index(folder / "adamw", folder / "parts", parts=["label"]))
    found["build_parts_of_plain"] = parts.to(built)
    with Index.open(folder / "parts", device="cpu") as index:
        for name in LAYERS:
            one = queries[name][:1]
            found[f"stored_parts_{name}_ms"] = milliseconds(
                least(partial(index.dual_output, name, one, group_by="label"))
            )
    return found


def ask_outputs(
    index: Index,
    model: nn.Sequential,
    queries: Mapping[str, np.ndarray],
    trained: Timed,
    found: dict[str, Any],
) -> None:
    """Outputs whole, masked and in parts, and how far they are from the trained layers'."""

    def error(name: str, values: np.ndarray) -> float:
        with torch.no_grad():
            expected = model[int(name)](torch.from_numpy(queries[name])).double().numpy()
        length = np.linalg.norm(expected, axis=1)
        return float((np.linalg.norm(values - expected, axis=1) / length).max())

    for name in LAYERS:
        found[f"output_error_{name}"] = error(name, index.dual_output(name, queries[name]).values)
    where = parse_filter("label != 6")
    masked = partial(index.dual_output, "0", queries["0"][:1], where=where)
    found["masked_of_training"] = timed(masked).to(trained)
    found["masked_again_ms"] = milliseconds(least(masked))
    classes = index.dual_output("4", queries["4"], group_by="label")
    total = classes.initial + classes.values.sum(1, dtype=np.float64)
    found["classes_error_4"] = error("4", total)


def ask_contributions(index: Index, queries: np.ndarray, found: dict[str, Any]) -> None:
    """The largest contributions to a unit of layer 0, in plain scans of its keys."""
    scan = partial(index.top_k, "0", queries[:1], 10, strategy="scan")
    scan()
    plain = median([scan] * 5)

    def best(query: int) -> Callable[[], object]:
        asked = queries[query : query + 1]
        return partial(index.top_k, "0", asked, 10, rank_by="contribution", unit=UNIT)

    found["contributions_first_scans"] = timed(best(0)).to(plain)
    found["contributions_again_scans"] = median([best(query) for query in range(1, 6)]).to(plain)


def milliseconds(taken: Timed) -> Timed:
    return Timed(1e3 * taken.wall, 1e3 * taken.cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks adamw")
    parser.add_argument("--data", type=Path, required=True, help="a folder with MNIST's .gz files")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (default 5000)")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(options.data, Path(folder), options.steps)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
