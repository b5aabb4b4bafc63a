"""Interleaved timing of contestants, and what the machine itself can do in the same process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Milliseconds over the rounds: the median and the whole range, and the median of what all
    processors took together, which counts where others want them too."""

    median: float
    low: float
    high: float
    cpu: float


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: bool = True,
    pause: float = 0.0,
) -> dict[str, Times]:
    """Run each once per round, in turn, after a round that warms up and does not count.

    Each round has an order of its own, so that threads that still spin, and caches that are another
    one's, do not always meet the same contestant. A pause of so many seconds before each lets them
    sleep, and makes what takes less than a few milliseconds slower.
    """
    return turns(contestants, rounds, 1, warm_up=warm_up, pause=pause)


def turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    *,
    warm_up: bool = True,
    pause: float = 0.0,
) -> dict[str, Times]:
    """As `interleaved`, with so many calls in each turn, timed one by one."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    of_cpu: dict[str, list[float]] = {name: [] for name in contestants}
    shuffled = random.Random(0)
    for number in range(0 if warm_up else 1, rounds + 1):
        for name in shuffled.sample(list(contestants), len(contestants)):
            time.sleep(pause)
            for _ in range(calls):
                start, cpu = time.perf_counter(), time.process_time()
                contestants[name]()
                if number:
                    seconds[name].append(1e3 * (time.perf_counter() - start))
                    of_cpu[name].append(1e3 * (time.process_time() - cpu))
    return {
        name: Times(
            statistics.median(taken), min(taken), max(taken), statistics.median(of_cpu[name])
        )
        for name, taken in seconds.items()
    }


def machine(keys: torch.Tensor) -> dict[str, float]:
    """GB/s read, GFLOP/s of a float32 product of 64 queries, and a GEMV over the keys in ms."""
    small, wide = keys[:100_000], torch.randn(64, keys.shape[1])
    times = interleaved(
        {
            "read": keys.sum,
            "gemm": lambda: wide @ small.T,
            "gemv": lambda: keys @ wide[0],
        },
        5,
    )
    return {
        "read_gb_s": keys.numel() * 4 / times["read"].low / 1e6,
        "gemm_gflop_s": 2 * 64 * small.numel() / times["gemm"].low / 1e6,
        "gemv_ms": times["gemv"].low,
    }
