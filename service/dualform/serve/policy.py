"""The thread policy of a process that dualform owns, set before torch or FAISS is imported.

torch and faiss-cpu bring an OpenMP runtime each. With the default policy the idle threads of one
spin on the cores that the other needs; both read the variables below once, when they are loaded.
Only commands call this: the recorder and `Client.local` live in somebody else's process.
"""

from __future__ import annotations

import os
import sys

WAIT_POLICY = "OMP_WAIT_POLICY"
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def apply(threads: int | None = None) -> None:
    """Set the policy for this process; what the environment already says stays.

    Args:
        threads: Size of each thread pool; by default the cores that this process may use.

    Raises:
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


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
