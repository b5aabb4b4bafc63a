"""What a forked process can't use of what its parent had started: refused, for it would hang.

Threads do not survive a fork, what waits for them does. torch's pool is one such thing: with one
thread it is not needed. gRPC's asyncio is another; its blocking channels are none, but in older
versions they wait for what asyncio had.
"""

from __future__ import annotations

import os
import sys

from dualform.client.errors import FailedPreconditionError

_CHANNELS_SURVIVE = (1, 80)
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


def use_channels() -> None:
    """To be called before a blocking channel is opened.

    Raises:
        FailedPreconditionError: A process above this one had opened one of an event loop, and this
            grpcio's channels wait for it for ever: 1.78 does, 1.80 does not.
    """
    if "asyncio" not in _lost:
        return
    import grpc

    if tuple(map(int, grpc.__version__.split(".")[:2])) < _CHANNELS_SURVIVE:
        raise FailedPreconditionError(
            "this process was forked from one that had used an AsyncClient, which gRPC's channels "
            f"survive from grpcio 1.80 on, and this is {grpc.__version__}; update grpcio, start "
            "the process with 'spawn' instead of 'fork', or use a Client in the parent too",
            reason="FORKED",
        )


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
