"""The thread and memory policy of a process that dualform owns, set before torch is imported.

torch and faiss-cpu bring an OpenMP runtime each. With the default policy the idle threads of one
spin on the cores that the other needs; both read the variables below once, when they are loaded.

Scans run in threads, and glibc gives each thread a heap of its own that keeps what was freed; Arrow
has one more. With two heaps for all, the server's peak over top-k questions was 60 MB lower.

Only commands call this: the recorder and `Client.local` live in somebody else's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import sys

WAIT_POLICY = "OMP_WAIT_POLICY"
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ARROW_POOL = "ARROW_DEFAULT_MEMORY_POOL"
HEAPS = "MALLOC_ARENA_MAX"

_DESCRIPTORS = 1 << 16
_LEAST_DESCRIPTORS = 64
_SWITCH_S = 0.0005

# M_ARENA_MAX of glibc's malloc.h.
_M_ARENA_MAX = -8


def apply(threads: int | None = None) -> None:
    """Set the policy for this process; what the environment already says stays.

    Args:
        threads: Size of each thread pool; by default the cores that this process may use.

    Raises:
        OSError: Too few files may be open.
        RuntimeError: torch or FAISS is loaded already, so the policy would do nothing.
    """
    loaded = [name for name in ("torch", "faiss") if name in sys.modules]
    if loaded and WAIT_POLICY not in os.environ:
        raise RuntimeError(
            f"{' and '.join(loaded)} was imported before the thread policy was set: "
            f"call dualform.serve.policy.apply() first, or start Python with {WAIT_POLICY}=PASSIVE"
        )
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    for pool in POOLS:
        os.environ.setdefault(pool, str(threads or _usable_cores()))
    os.environ.setdefault(ARROW_POOL, "system")
    _allow_descriptors()
    if HEAPS not in os.environ:
        _limit_heaps(2)


def settle() -> None:
    """Once everything is imported and open: let nothing hold the event loop up for long.

    A thread that computes in Python hands the interpreter over after half a millisecond instead of
    five: between a health check's arrival and its answer the loop needs it several times. And a
    garbage collection that looks at all that was imported, a million objects, takes a quarter of a
    second in which nothing else runs: from here on it looks at what came later alone.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()


def make_teams() -> None:
    """Make the threads now with which torch and FAISS compute for the thread that calls this.

    OpenMP makes them at the first region that several threads share, keeps them, and ends the
    process where the system has none left.
    """
    import faiss
    import numpy as np
    import torch

    torch.ones(1 << 20).neg_()
    rows = np.ones((64, 4), np.float32)
    faiss.knn(rows[:8], rows, 1, metric=faiss.METRIC_INNER_PRODUCT)


def _allow_descriptors() -> None:
    """Let this process open as many files as the system allows it: the limit in force is a default
    for programs that count their descriptors in bits.

    Raises:
        OSError: The system allows it fewer than the libraries open without asking first.
    """
    soft = hard = -1
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if 0 <= hard < _LEAST_DESCRIPTORS:
        raise OSError(
            errno.EMFILE, f"{hard} files may be open, and at least {_LEAST_DESCRIPTORS} are needed"
        )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _limit_heaps(most: int) -> None:
    """What MALLOC_ARENA_MAX would have done, had it been set before the process started."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    # Other C libraries than glibc have one heap anyway.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, most)
