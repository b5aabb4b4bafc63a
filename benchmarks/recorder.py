"""What the recorder adds to a training loop: the same training with and without it, alternated.

    python -m benchmarks recorder [--data MNIST_DIR] [--blocks 10] [--steps 100]
        [--momentum 0.9 --clip 1] [--optimizer adamw] [--pack] [--json OUT]

One process trains two identical copies of the paper's network (784-800-800-10, batch 128) in
alternating blocks, the order of the two changing from block to block; only one of them is recorded.
With momentum 0.9 and clipping at 1 the loop is that of experiments/mnist_single.yaml. CPU time is
the whole process's, the writing thread included. The final flush is timed apart. Machines are
noisy: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.memories import BATCH, images, network
from dualform.record import Recorder


@dataclass(frozen=True)
class Result:
    """Milliseconds per step, medians over blocks; ratios are medians of the blocks' own ratios."""

    blocks: int
    steps_per_block: int
    threads: int
    plain_cpu_ms: float
    recorded_cpu_ms: float
    cpu_ratio: float
    plain_wall_ms: float
    recorded_wall_ms: float
    wall_ratio: float
    cpu_ratio_quartiles: tuple[float, float]
    wall_ratio_quartiles: tuple[float, float]
    flush_seconds: float
    recording_mb_per_step: float
    identical: bool


class Run:
    """One copy of the network and its training loop."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        optimizer: str,
        momentum: float,
        clip: float,
    ) -> None:
        self.clip = clip
        self.model = network()
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=momentum)
        self.images, self.labels = images, labels
        self.order = np.random.default_rng(0)
        self.recorder: Recorder | None = None

    def train(self, steps: int) -> tuple[float, float]:
        """Train; returns CPU and wall milliseconds per step."""
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            ids = torch.from_numpy(self.order.integers(0, len(self.labels), BATCH))
            x, y = self.images[ids], self.labels[ids]
            if self.recorder is not None:
                self.recorder.annotate(label=y, example=ids, task="mnist")
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return 1000 * cpu / steps, 1000 * wall / steps


def measure(
    plain: Run, recorded: Run, out: Path, blocks: int, steps: int, pack: bool = False
) -> Result:
    """Alternate blocks of both loops, which must be alike, and compare them."""
    recorded.recorder = Recorder(recorded.model, recorded.optimizer, out, pack=pack)
    runs = (plain, recorded)
    for run in runs:
        run.train(max(20, steps // 4))
    times: list[list[tuple[float, float]]] = [[], []]
    for block in range(blocks):
        for i in (0, 1) if block % 2 == 0 else (1, 0):
            times[i].append(runs[i].train(steps))
    start = time.perf_counter()
    recorded.recorder.close()
    flush = time.perf_counter() - start
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    identical = all(
        torch.equal(a, b)
        for a, b in zip(plain.model.parameters(), recorded.model.parameters(), strict=True)
    )
    cpu, wall = ([r[kind] / p[kind] for p, r in zip(*times, strict=True)] for kind in (0, 1))
    return Result(
        blocks=blocks,
        steps_per_block=steps,
        threads=torch.get_num_threads(),
        plain_cpu_ms=statistics.median(t[0] for t in times[0]),
        recorded_cpu_ms=statistics.median(t[0] for t in times[1]),
        cpu_ratio=statistics.median(cpu),
        plain_wall_ms=statistics.median(t[1] for t in times[0]),
        recorded_wall_ms=statistics.median(t[1] for t in times[1]),
        wall_ratio=statistics.median(wall),
        cpu_ratio_quartiles=_quartiles(cpu),
        wall_ratio_quartiles=_quartiles(wall),
        flush_seconds=flush,
        recording_mb_per_step=total / 1e6 / (max(20, steps // 4) + blocks * steps),
        identical=identical,
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST's .gz files")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--momentum", type=float, default=0.0, help="SGD's")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradient")
    parser.add_argument("--pack", action="store_true", help="record packed")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, help="where to record (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    folder = Path(tempfile.mkdtemp(prefix="dualform-benchmark-", dir=arguments.out))
    try:
        inputs, labels = _inputs(arguments.data)
        plain, recorded = (
            Run(inputs, labels, arguments.optimizer, arguments.momentum, arguments.clip)
            for _ in range(2)
        )
        result = measure(
            plain, recorded, folder / "run", arguments.blocks, arguments.steps, arguments.pack
        )
    finally:
        shutil.rmtree(folder)
    for name, value in asdict(result).items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1) + "\n")


def _inputs(data: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST's training set where its files are given, else random data of the same shape."""
    if data is not None:
        return images(data, "train")
    random = np.random.default_rng(1)
    pixels = random.random((60_000, 784), np.float32)
    return torch.from_numpy(pixels), torch.from_numpy(random.integers(0, 10, 60_000))


def _quartiles(ratios: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return low, high


if __name__ == "__main__":
    main()
