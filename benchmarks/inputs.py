"""What recording convolutions' inputs once saves, beside recording every patch.

    python -m benchmarks inputs [--pixels 64] [--batch 16] [--rounds 4] [--steps 4]
        [--optimizer sgd] [--pack] [--build]

One process trains three identical resnet18 in turns, the order changing from round to round:
without a recorder, recorded with patches as before, and recorded with inputs. Processor time is
the whole process's, the writing thread and everything on disk included; beside it what copying
keys, checking the gradient and digests take of it. Then each recording's bytes a step, and with
--build what an index of it takes. Machines are noisy: read the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.stack_models import resnet
from dualform.index import build_index
from dualform.record import Recorder
from dualform.record import capture as capturing
from dualform.record.buffers import Buffer
from dualform.record.check import Sides
from dualform.store.patches import Patches

WAYS = ("no recorder", "patches", "inputs")
_MEASURED = (
    ("keys", capturing, "keys_of"),
    ("check", Sides, "__init__"),
    ("digest", Buffer, "seal"),
)


@contextlib.contextmanager
def _as_way(way: str) -> Iterator[None]:
    if way != "patches":
        yield
        return
    with mock.patch.object(Patches, "pays", False):
        yield


@contextlib.contextmanager
def _timed(spent: Counter[str]) -> Iterator[None]:
    """Add up what the measured functions take, by name."""

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return call(*arguments)
            finally:
                spent[name] += time.process_time() - start  # type: ignore[assignment]

        return timed

    with contextlib.ExitStack() as stack:
        for name, holder, function in _MEASURED:
            there = around(name, getattr(holder, function))
            stack.enter_context(mock.patch.object(holder, function, there))
        yield


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--pack", action="store_true", help="record packed")
    parser.add_argument("--build", action="store_true", help="build an index of each, twice")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="dualform-benchmark-"))
    try:
        _measure(arguments, folder)
    finally:
        shutil.rmtree(folder)


def _measure(arguments: argparse.Namespace, folder: Path) -> None:
    runs = {way: _Run(way, arguments, folder / way) for way in WAYS}
    rounds: dict[str, list[Counter[str]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds + 1):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            taken = runs[way].train(arguments.steps)
            if number:  # the first one warms up
                rounds[way].append(taken)
    for run in runs.values():
        run.close()
    ends = [list(runs[way].model.parameters()) for way in WAYS]
    for parameters in zip(*ends, strict=True):
        assert all(torch.equal(parameters[0], p) for p in parameters), "training was changed"
    print(
        "recorded  CPU ratio (range)  ms a step: all, keys, check, digest  MB a step  build CPU s"
    )
    for way in WAYS:
        files = (folder / way).rglob("*.bin")
        size = sum(f.stat().st_size for f in files) / 1e6 / runs[way].steps
        times = 2 if arguments.build and runs[way].recorder is not None else 0
        build = min((_built(folder / way, folder / "index") for _ in range(times)), default=0.0)
        spent = _times(rounds[way], rounds[WAYS[0]], arguments.steps)
        print(f"{way}  {spent}  {size:.1f}  {build:.2f}", flush=True)


def _times(spent: Sequence[Counter[str]], plain: Sequence[Counter[str]], steps: int) -> str:
    ratios = [one["all"] / other["all"] for one, other in zip(spent, plain, strict=True)]
    ms = [
        1e3 * statistics.median(each[name] for each in spent) / steps
        for name in ("all", "keys", "check", "digest")
    ]
    low, high = min(ratios), max(ratios)
    times = ", ".join(f"{each:.1f}" for each in ms)
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})  {times}"


class _Run:
    """One network and its loop."""

    def __init__(self, way: str, arguments: argparse.Namespace, path: Path) -> None:
        self._way, self.steps = way, 0
        size = arguments.batch, 3, arguments.pixels, arguments.pixels
        self._images = torch.randn(size, generator=torch.Generator().manual_seed(0))
        self._labels = torch.arange(arguments.batch) % 3
        torch.manual_seed(0)
        self.model = resnet(arguments.width)
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[arguments.optimizer]
        self._optimizer = kind(self.model.parameters(), lr=1e-3)
        self.recorder: Recorder | None = None
        if way != WAYS[0]:
            self.recorder = Recorder(self.model, self._optimizer, path, pack=arguments.pack)

    def train(self, steps: int) -> Counter[str]:
        """Take some steps, to the disk; what took how long, in seconds."""
        spent: Counter[str] = Counter()
        self.steps += steps
        with _as_way(self._way), _timed(spent):
            start = time.process_time()
            for _ in range(steps):
                if self.recorder is not None:
                    self.recorder.annotate(label=self._labels)
                self._optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(self._images), self._labels).backward()
                self._optimizer.step()
            if self.recorder is not None:
                self.recorder._sink.commit()
            spent["all"] = time.process_time() - start  # type: ignore[assignment]
        return spent

    def close(self) -> None:
        if self.recorder is not None:
            with _as_way(self._way):
                self.recorder.close()


def _built(path: Path, index: Path) -> float:
    """Processor seconds that an index takes."""
    start = time.process_time()
    build_index(path, index)
    shutil.rmtree(index)
    return time.process_time() - start


if __name__ == "__main__":
    main()
