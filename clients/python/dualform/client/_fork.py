"""What a forked process can't use of what its parent had started: refused, for it would hang.

Threads do not survive a fork, what waits for them does. torch's pool is one such thing: with one
thread it is not needed. gRPC's asyncio is another; its blocking channels are none.
"""

from __future__ import annotations

import os
import sys

from dualform.client.errors import FailedPreconditionError

# Since the process began, and before it was forked from its parent.
_asyncio_used = False
_lost: frozenset[str] = frozenset()


def use_asyncio() -> None:
    """To be called before a channel of an event loop is opened.

    Raises:
        FailedPreconditionError: A process above this one had opened one.
    """
    global _asyncio_used
    if "asyncio" in _lost:
        raise FailedPreconditionError(
            "this process was forked from one that had used an AsyncClient, and gRPC's asyncio "
            "does not survive that; use a Client here, or start the process with 'spawn' instead "
            "of 'fork'",
            reason="FORKED",
        )
    _asyncio_used = True


def use_torch() -> None:
    """To be called before torch computes.

    Raises:
        FailedPreconditionError: A process above this one had loaded torch, and this one may use
            more than one thread.
    """
    if "torch" not in _lost:
        return
    import torch

    if torch.get_num_threads() > 1:
        raise FailedPreconditionError(
            "this process was forked from one that had loaded torch, whose threads do not survive "
            "that: what computes here would wait for them for ever. Call "
            "torch.set_num_threads(1) in this process first (a DataLoader's workers do), start it "
            "with 'spawn' instead of 'fork', or ask a server with Client(\"HOST:PORT\")",
            reason="FORKED",
        )


def _remember() -> None:
    global _lost
    _lost |= {"torch"} & set(sys.modules)
    _lost |= {"asyncio"} if _asyncio_used else set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)
