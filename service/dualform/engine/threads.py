"""Work in as many threads as torch has, where nothing else shares it out.

FAISS and BLAS share a batch of queries out among their threads; a single query over several shards
gets one thread, and so does what comes to many small steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from dualform.engine.context import own_settings

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 8
"""So many threads take part in what is shared out at most: each needs memory of its own."""

_FEW = 4
"""Fewer items are not worth a thread of their own."""

_NAME = "dualform-query"


def over_shards(
    work: Callable[[Item], Result], shards: Sequence[Item], queries: int
) -> list[Result]:
    """What `work` makes of each shard, in order.

    Args:
        work: Spends its time outside Python.
        shards: What belongs to each.
        queries: How many; with more than one, the work brings threads of its own.
    """
    return _in_threads(work, shards) if queries == 1 else [work(shard) for shard in shards]


def shared_out(work: Callable[[Sequence[Item]], object], items: Sequence[Item]) -> None:
    """Have every thread work on some of the items, neighbours in their order.

    Args:
        work: Spends its time outside Python.
        items: About as much work each.
    """
    threads = max(1, min(torch.get_num_threads(), MOST, len(items) // _FEW))
    ends = [len(items) * number // threads for number in range(threads + 1)]
    _in_threads(work, [items[first:last] for first, last in itertools.pairwise(ends)])


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    threads = min(torch.get_num_threads(), len(items))
    # What is part of something that was shared out already has all threads that there are.
    if threads < 2 or threading.current_thread().name.startswith(_NAME):
        return [work(item) for item in items]
    apart = own_settings()(work)  # settings are the calling thread's
    with ThreadPoolExecutor(threads, _NAME) as pool:
        try:
            found = pool.map(apart, items)
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            found = map(work, items)
        return list(found)
