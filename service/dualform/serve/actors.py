"""The machines that open shards in place of the server's process: what `ray:` asks for.

What their processes run before torch is loaded is here too; importing this loads it no more than
`dualform.serve` does.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from dualform.serve import policy
from dualform.serve.config import ConfigError, RayActors, ServerConfig

if TYPE_CHECKING:
    from dualform.machines.spread import Machines
    from dualform.serve.budget import MemoryBudget


def machines(config: ServerConfig, ray: RayActors) -> Machines:
    """Start them, each with the server's limit of memory for itself.

    Raises:
        ConfigError: There is no Ray, or no room for so many.
    """
    from dualform.machines.fleet import Fleet, FleetError
    from dualform.machines.machine import Settings
    from dualform.machines.spread import Machines

    memory = None if config.memory is None else partial(budget, config.memory)
    # The cheap place of the queue has a scan too.
    threads = config.limits.concurrent_scans + 1
    try:
        settings = Settings(prepare, memory)
        fleet = Fleet(ray.address, ray.actors, settings, threads, device=config.device)
    except FleetError as error:
        raise ConfigError(f"ray: {error}") from None
    return Machines(fleet, config.device, gpu_memory=config.gpu_memory)


def prepare(sharing: int) -> None:
    """Set a machine's process up; before torch is imported.

    Args:
        sharing: How many machines share the cores that it may use.
    """
    cores = len(os.sched_getaffinity(0))
    for pool in policy.POOLS:
        os.environ.pop(pool, None)  # Ray gives each process as many threads as "CPUs", which is one
    policy.apply(max(1, cores // sharing))


def budget(memory: int) -> MemoryBudget:
    """A machine's memory budget, of so many bytes."""
    from dualform.serve.budget import MemoryBudget

    return MemoryBudget(memory)
