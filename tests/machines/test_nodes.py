"""A node of a real Ray cluster that goes, and one that comes in its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from ray.cluster_utils import Cluster
from dualform.engine import Index
from dualform.engine.messages.versions import version_at
from dualform.machines.fleet import Fleet, Patience
from dualform.machines.machine import Settings
from dualform.machines.spread import Machines
from dualform.questions import TopKQuestion
from dualform.serve.actors import prepare

def node():
    return cluster.add_node(num_cpus=1, object_store_memory=80 << 20)

def until(met):
    end = time.monotonic() + 120
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)

cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20}
)
second = node()
fleet = Fleet(cluster.address, None, Settings(prepare), patience=Patience(replaced=60.0))
path, question = Path(sys.argv[1]), TopKQuestion("2", np.ones((2, 48), np.float32), k=50)
with Index.open(path, device="cpu") as one:
    expected = one.ask(question).rows
with Machines(fleet, "cpu").open(version_at(path)) as index:
    def same():
        np.testing.assert_array_equal(index.ask(question).rows, expected)
    assert fleet.count == 2
    same()
    cluster.remove_node(second, allow_graceful=False)
    same()
    until(lambda: fleet.traffic.lost == 1)
    same()
    assert [each is None for each in fleet.machines()].count(True) == 1
    node()
    until(lambda: None not in fleet.machines())
    before = fleet.traffic.moved
    same()
    assert fleet.traffic.moved == before  # each has its own shards again
fleet.close()
cluster.shutdown()
print("came back")
"""


@pytest.mark.slow
def test_a_node_that_goes_and_one_that_comes_in_its_place(
    sharded_index: Path, ray_folder: Path
) -> None:
    """With its processes killed; the other node answers for its shards, at first within the same
    question, until there is a machine for them again."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(sharded_index)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "came back"
