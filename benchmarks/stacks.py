"""What recording costs in the stacks that people train in: time, bytes, and what is covered.

    python -m benchmarks stacks [--only ViT] [--optimizer adamw] [--rounds 5] [--steps 12]
        [--width 128] [--tokens 64] [--pixels 32] [--batch 16] [--json OUT]

Each stack of `benchmarks.stack_models` trains with and without the recorder in turns, by its own
loop from the same weights; a ratio is the median of the rounds' own ratios. Time begins with the
loop and ends when all is on disk. CPU time is the whole process's, the writing thread included.
Bytes per step are those of keys and values: each row of each layer by itself; as they lie on disk,
where what several layers see is written once, and of convolutions the input; and packed
(`pack=True`), in a run that is not timed.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.stack_models import Stack, stacks
from dualform.record.selection import select_layers
from dualform.store.recording import Recording
from dualform.store.segment_table import padded


@dataclass(frozen=True)
class Result:
    """One stack's row.

    Attributes:
        cpu_ratio, wall_ratio: Time with the recorder to that without.
        plain_cpu_ms: Of a step without.
        bytes_per_layer: Of a step's keys and values, each layer's by itself, of convolutions all
            patches.
        bytes_on_disk: As they are written.
        bytes_packed: With `pack=True`.
        covered: Elements of recorded weights among those of all matrices that train.
        layers: How many are recorded.
    """

    stack: str
    optimizer: str
    cpu_ratio: float
    cpu_range: tuple[float, float]
    wall_ratio: float
    plain_cpu_ms: float
    bytes_per_layer: int
    bytes_on_disk: int
    bytes_packed: int
    covered: float
    layers: int


def measure(name: str, stack: Stack, optimizer: str, width: int, rounds: int, steps: int) -> Result:
    """Alternate, after a round that warms up; both must end with the same weights."""
    folder = Path(tempfile.mkdtemp(prefix="dualform-benchmark-"))
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    try:
        for number in range(rounds + 1):
            ends: list[list[torch.Tensor]] = []
            for recorded in (False, True) if number % 2 else (True, False):
                path = folder / f"run-{number}" if recorded else None
                torch.manual_seed(0)
                model = stack.model(width)
                cpu, wall = time.process_time(), time.perf_counter()
                stack.train(model, optimizer, steps, folder / "out", path)
                if number:
                    taken = time.process_time() - cpu, time.perf_counter() - wall
                    times[recorded].append(taken)
                ends.append(list(model.parameters()))
            for one, other in zip(*ends, strict=True):
                assert torch.equal(one, other), "the recorder changed training"
            if number < rounds:
                shutil.rmtree(folder / f"run-{number}")
        per_layer, on_disk = _bytes(folder / f"run-{rounds}", steps)
        stack.train(model, optimizer, steps, folder / "out", folder / "packed", pack=True)
        _, packed = _bytes(folder / "packed", steps)
        coverage = select_layers(model, None, lambda p: p.requires_grad).coverage
    finally:
        shutil.rmtree(folder)
    pairs = list(zip(times[False], times[True], strict=True))
    ratios = [[with_[i] / without[i] for without, with_ in pairs] for i in (0, 1)]
    return Result(
        name,
        optimizer,
        statistics.median(ratios[0]),
        (min(ratios[0]), max(ratios[0])),
        statistics.median(ratios[1]),
        1e3 * statistics.median(without[0] for without, _ in pairs) / steps,
        per_layer,
        on_disk,
        packed,
        coverage.recorded_trained / coverage.trained,
        coverage.layers,
    )


def _bytes(path: Path, steps: int) -> tuple[int, int]:
    """Of keys and values a step: each layer's by itself, and on disk."""
    with Recording.open(path) as recording:
        each = 0
        for layer in recording.manifest.layers:
            for record in recording.passes(layer):
                spans = [record.keys] + ([record.values] if record.values is not None else [])
                each += sum(padded(span.whole) for span in spans)
        on_disk = sum(segment.bin_bytes for segment in recording.segments)
        return each // steps, on_disk // steps


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="stacks whose name begins with this")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    optimizer = {"sgd": "SGD", "adamw": "AdamW"}[arguments.optimizer]
    found = []
    for name, stack in stacks(arguments.tokens, arguments.pixels, arguments.batch).items():
        if not name.startswith(arguments.only):
            continue
        width = arguments.width // 2 if "resnet" in name else arguments.width
        result = measure(name, stack, optimizer, width, arguments.rounds, arguments.steps)
        found.append(result)
        print(_row(result), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def _row(each: Result) -> str:
    low, high = each.cpu_range
    sizes = (each.bytes_per_layer, each.bytes_on_disk, each.bytes_packed)
    return (
        f"| {each.stack} | {each.layers} | {100 * each.covered:.1f} % | {each.plain_cpu_ms:.0f} ms "
        f"| {each.cpu_ratio:.2f} ({low:.2f} to {high:.2f}) | {each.wall_ratio:.2f} "
        f"| {' | '.join(f'{size / 1e6:.2f} MB' for size in sizes)} |"
    )


if __name__ == "__main__":
    main()
