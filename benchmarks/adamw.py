"""What AdamW costs: building, masked outputs and contributions; and how exact its outputs are.

The paper's network on MNIST with AdamW (weight decay 0.1, warm-up and cosine, clipped to 1), beside
the same training with SGD for what is compared with it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def train(data: Path, steps: int, path: Path | None, adamw: bool) -> tuple[nn.Sequential, float]:
    """Train the network; returns it and the seconds of the loop, recorded where there is a path."""
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

    def loop(annotate: Callable[..., None]) -> float:
        start = time.perf_counter()
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
        return time.perf_counter() - start

    if path is None:
        return model, loop(lambda **_: None)
    with Recorder(model, optimizer, path) as recorder:
        seconds = loop(recorder.annotate)
    return model, seconds


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measured(data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Everything, in one run."""
    found: dict[str, Any] = {"steps": steps, "rows": steps * BATCH}
    _, found["train_s"] = train(data, steps, None, adamw=True)
    _, _ = train(data, steps, folder / "sgd", adamw=False)
    found["build_sgd_s"] = seconds(lambda: build_index(folder / "sgd", folder / "sgd-index"))
    shutil.rmtree(folder / "sgd")
    shutil.rmtree(folder / "sgd-index")
    model, found["train_recorded_s"] = train(data, steps, folder / "adamw", adamw=True)
    found["build_adamw_s"] = seconds(lambda: build_index(folder / "adamw", folder / "index"))
    shutil.rmtree(folder / "adamw")
    found["build_ratio"] = found["build_adamw_s"] / found["build_sgd_s"]
    x, labels = images(data, "t10k")
    with Index.open(folder / "index", device="cpu") as index, torch.no_grad():
        queries, at = {}, x
        for module, name in zip(model, map(str, range(len(model))), strict=True):
            if name in LAYERS:
                queries[name] = at.numpy()
            at = module(at)
        found["accuracy"] = float((at.argmax(1) == labels).float().mean())
        for name in LAYERS:
            expected = model[int(name)](torch.from_numpy(queries[name])).double().numpy()
            out = index.dual_output(name, queries[name])
            length = np.linalg.norm(expected, axis=1)
            found[f"output_error_{name}"] = float(
                (np.linalg.norm(out.values - expected, axis=1) / length).max()
            )
        one = {name: batch[:1] for name, batch in queries.items()}
        where = parse_filter("label != 6")

        def masked() -> object:
            return index.dual_output("0", one["0"], where=where)

        found["masked_first_s"] = seconds(masked)
        found["masked_of_training"] = found["masked_first_s"] / found["train_s"]
        found["masked_again_ms"] = 1e3 * min(seconds(masked) for _ in range(5))
        classes = index.dual_output("4", queries["4"], group_by="label")
        expected = model[4](torch.from_numpy(queries["4"])).double().numpy()
        total = classes.initial + classes.values.sum(1, dtype=np.float64)
        found["classes_error_4"] = float(
            (np.linalg.norm(total - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()
        )

        def scan() -> object:
            return index.top_k("0", one["0"], 10, strategy="scan")

        scan()
        found["scan_s"] = float(np.median([seconds(scan) for _ in range(5)]))

        def best(query: int) -> Callable[[], object]:
            asked = queries["0"][query : query + 1]
            return lambda: index.top_k("0", asked, 10, rank_by="contribution", unit=UNIT)

        found["contributions_first_s"] = seconds(best(0))
        found["contributions_again_s"] = float(np.median([seconds(best(q)) for q in range(1, 4)]))
        for name in ("first", "again"):
            found[f"contributions_{name}_scans"] = (
                found[f"contributions_{name}_s"] / found["scan_s"]
            )
    return found


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
