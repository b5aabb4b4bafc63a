"""Machines for tests: real processes by Ray, started once, and the same code in this process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import digits
import pytest

from dualform.machines.cluster import LOCAL, connect, imported
from dualform.machines.fleet import Fleet, Patience
from dualform.machines.machine import Settings
from dualform.serve.actors import prepare

ACTORS = 5
"""So many processes; tests use the first 2, the first 3, or all."""
SPARE = 3
"""CPUs that are left for what tests build."""


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """Where Ray keeps sockets and logs: under a short name, since a socket's is at most 107."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["RAY_TMPDIR"]
    else:
        os.environ["RAY_TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(ray_folder: Path) -> Iterator[str]:
    """The address of a Ray of this process, which the tests share: starting one takes ten seconds
    of a core. It stays to the end: a worker died a minute after its cluster had gone."""
    ray = imported()
    connect(ray, LOCAL, ACTORS + SPARE)
    yield str(ray.get_runtime_context().gcs_address)
    ray.shutdown()


@pytest.fixture(scope="session")
def fleet(cluster: str) -> Iterator[Fleet]:
    """Five actors of it."""
    patience = Patience(start=240.0, silent=60.0, replaced=60.0)
    found = Fleet(cluster, ACTORS, Settings(prepare), threads=2, patience=patience)
    yield found
    found.close()


@pytest.fixture(scope="session")
def sharded_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network trained on digits, in seven shards; read-only."""
    return digits.publish(tmp_path_factory.mktemp("sharded"), shard_rows=300)
