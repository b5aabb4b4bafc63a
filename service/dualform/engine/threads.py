"""A single query over several shards, in as many threads as torch has.

FAISS and BLAS share a batch of queries out among their threads; a single query gets one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def over_shards(
    work: Callable[[Item], Result], shards: Sequence[Item], queries: int
) -> list[Result]:
    """What `work` makes of each shard, in order.

    Args:
        work: Spends its time outside Python.
        shards: What belongs to each.
        queries: How many; with more than one, the work brings threads of its own.
    """
    threads = min(torch.get_num_threads(), len(shards))
    if queries > 1 or threads < 2:
        return [work(shard) for shard in shards]
    with ThreadPoolExecutor(threads, "dualform-query") as pool:
        try:
            found = pool.map(work, shards)
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            found = map(work, shards)
        return list(found)
