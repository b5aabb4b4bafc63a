"""Who gets which GPUs of a cluster: Ray shows a process those that it asked for, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dualform.machines.cluster import LOCAL, FleetError, connect, seats


class Cluster:
    """A Ray whose nodes have so many GPUs."""

    def __init__(self, *gpus: int) -> None:
        self.gpus = gpus

    def nodes(self) -> list[dict[str, Any]]:
        found = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": float(g)}} for g in self.gpus]
        return [*found, {"Alive": True, "Resources": {}}, {"Alive": False, "Resources": {"GPU": 8}}]


def test_one_machine_for_each_gpu_and_for_each_node_without() -> None:
    assert seats(Cluster(2, 0, 3), 4, "auto", fixed=False) == [1, 1, 1, 1, 1, 0, 0]
    assert seats(Cluster(2, 0, 3), 4, ("cuda:0",), fixed=False) == [1] * 5
    assert seats(Cluster(2, 0, 3), 4, ("cuda:1", "cuda:0"), fixed=False) == [2, 2]


def test_so_many_machines_share_the_gpus_that_there_are() -> None:
    """Each as many as the others, of its own node; of more machines than GPUs some have none."""
    assert seats(Cluster(8), 2, "auto", fixed=True) == [4, 4]
    assert seats(Cluster(3, 3), 3, "auto", fixed=True) == [1, 1, 1]
    assert seats(Cluster(3, 3), 2, "auto", fixed=True) == [3, 3]
    assert seats(Cluster(1, 1), 3, "auto", fixed=True) == [1, 1, 0]
    assert seats(Cluster(4, 4), 3, ("cuda:0",), fixed=True) == [1, 1, 1]


def test_without_gpus_nobody_asks_for_any() -> None:
    assert seats(Cluster(), 3, "auto", fixed=False) == [0, 0, 0]
    assert seats(Cluster(4), 3, "cpu", fixed=False) == [0, 0, 0]


def test_gpus_that_are_named_and_not_there() -> None:
    for cluster, count, device, fixed in (
        (Cluster(), 2, ("cuda:0",), False),
        (Cluster(2, 1), 2, ("cuda:1",), True),
        (Cluster(1, 1), 1, ("cuda:0", "cuda:1"), False),
    ):
        with pytest.raises(FleetError, match=r"are enough for [01] actors; ask for as many, or"):
            seats(cluster, count, device, fixed=fixed)


def test_a_ray_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray has it: an Exception of no kind."""
    import ray

    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(FleetError, match=r"cannot be reached on this machine: The current node"):
        connect(ray, LOCAL, 1)


PROGRAM = """
import ray, sys
ray.init(address="local", num_cpus=3, num_gpus=3, include_dashboard=False,
         object_store_memory=100 << 20, log_to_driver=False, configure_logging=False)
from dualform.machines.fleet import LOCAL, Fleet
from dualform.machines.machine import Settings
from dualform.serve.actors import prepare
fleet = Fleet(LOCAL, 2, Settings(prepare), device="auto")
print(sorted(machine.gpus for machine in fleet.machines()))
fleet.close()
"""


@pytest.mark.slow
def test_each_process_sees_its_own(ray_folder: Path) -> None:
    """Of a Ray that was told of GPUs which are not there: it numbers them all the same."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "['0', '1']"
