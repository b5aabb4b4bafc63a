"""Ray: imported, and connected to."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

from dualform._errors import DualformError
from dualform._install import pip_install

LOCAL = "local"
"""In place of a cluster's address: Ray is started on this machine, and ends with the process."""
_KNOCK_S = 10.0
_OBJECT_STORE = 256 << 20


class FleetError(DualformError):
    """The machines cannot be had; the message says what to do."""


def imported() -> Any:
    """Ray.

    Raises:
        FleetError: It is not installed.
    """
    # Before Ray is imported: it would tell its makers about every cluster.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise FleetError(
            f"several machines need Ray, which is not installed: {pip_install('ray')}"
        ) from None
    return ray


def seats(ray: Any, count: int, device: str | Sequence[str], *, fixed: bool) -> list[int]:
    """How many GPUs each process of a cluster takes.

    Ray shows a process those that it asked for, and no others. "auto" shares all out that there
    are, to processes that may be more; of GPUs that are named each process takes as many as make
    the last of them there.

    Args:
        ray: What `imported` gives, connected.
        count: How many processes there would be without GPUs.
        device: As `dualform.questions.placement.device_names` gives it.
        fixed: So many there must be; else with GPUs one for each, and for each node without.

    Returns:
        For each process.

    Raises:
        FleetError: There are not GPUs enough that are named.
    """
    of_nodes = [int(node["Resources"].get("GPU", 0)) for node in nodes(ray)]
    if device == "cpu" or (device == "auto" and not any(of_nodes)):
        return [0] * count
    if device == "auto":
        return _shared_out(of_nodes, count if fixed else sum(of_nodes) + of_nodes.count(0))
    each = 1 + max(int(name.partition(":")[2]) for name in device)
    most = sum(gpus // each for gpus in of_nodes)
    if most < (count if fixed else 1):
        raise FleetError(
            f"device is {', '.join(device)}, of each actor's own GPUs, and the cluster's "
            f"{sum(of_nodes)} are enough for {most} actors; ask for as many, or say device: auto"
        )
    return [each] * (count if fixed else most)


def _shared_out(of_nodes: Sequence[int], count: int) -> list[int]:
    """As many of nodes' GPUs for each process as can be; of more processes some have none."""
    each = max(of_nodes)
    while each and sum(gpus // each for gpus in of_nodes) < count:
        each -= 1
    there = sum(of_nodes)
    return [each] * count if each else [1] * there + [0] * (count - there)


def connect(ray: Any, address: str, count: int | None) -> int:
    """Connect to a cluster, unless this process is.

    Args:
        ray: What `imported` gives.
        address: Of a Ray cluster, "auto" for the one that this machine belongs to, or LOCAL.
        count: How many processes there are to be; None for one on each node, or of LOCAL one for
            each core.

    Returns:
        How many there are to be.

    Raises:
        FleetError: It is not there.
    """
    if ray.is_initialized():
        return count or max(1, len(nodes(ray)))
    common = {"log_to_driver": False, "configure_logging": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address == LOCAL:
            count = count or len(os.sched_getaffinity(0))
            ray.init(
                # Also where this machine belongs to a cluster.
                address=LOCAL,
                # As many as there are machines: they share what cores there are.
                num_cpus=count,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE,
                **common,
            )
        else:
            _knock(address)
            ray.init(address=address, **common)
    except Exception as error:  # a start that takes Ray too long is one, and of no kind
        where = "on this machine" if address == LOCAL else f"at {address}"
        raise FleetError(
            f"Ray cannot be reached {where}: {error}; start a cluster with `ray start --head` "
            f"and say its address, or say `{LOCAL}`"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray takes it, and ends the process its own way
    return count or max(1, len(nodes(ray)))


def nodes(ray: Any) -> list[Any]:
    """Those of the cluster that are there."""
    return [node for node in ray.nodes() if node["Alive"]]


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
