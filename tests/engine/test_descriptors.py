"""Open files: an index holds none once it is mapped, so that shards may be many and limits low."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import warm
from synthetic import make_index

from dualform.engine import Index

KEYS = np.random.default_rng(0).standard_normal((900, 8)).astype(np.float32)

ASK = """
import resource, sys
import numpy as np
import dualform.engine.api.index, faiss  # what they open once stays open
from dualform.engine import Index, verify_index
query = np.load(sys.argv[2])
import os
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, used + 12))
with Index.open(sys.argv[1], device="cpu") as index:
    index.verify_files()
    rows = index.top_k("fc", query, 5).rows.tolist()
    index.dual_output("fc", query, strategy="scan")
    print(rows)
print(len(verify_index(sys.argv[1]).damage))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 shards: 180 mapped files."""
    return make_index(tmp_path_factory.mktemp("many"), KEYS, KEYS[:, :2], shard_rows=10)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_nothing_stays_open(path: Path) -> None:
    with Index.open(path, device="cpu") as index:
        index.top_k("fc", KEYS[:1], 1)
        before = len(os.listdir("/proc/self/fd"))
        index.verify_files()
        index.dual_output("fc", KEYS[:1], strategy="scan")
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_dozen_descriptors_are_enough(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "query.npy", KEYS[:1])
    done = warm.run(ASK, path, tmp_path / "query.npy")
    assert done.returncode == 0, done.stderr
    scores = KEYS.astype(np.float64) @ KEYS[0].astype(np.float64)
    assert done.stdout.split("\n")[:2] == [str([np.argsort(-scores)[:5].tolist()]), "0"]


def test_too_many_open_files_are_named(path: Path) -> None:
    program = (
        "import os, sys, resource; from dualform.store import IndexManifest, TooManyFilesError\n"
        "own = len(os.listdir('/proc/self/fd')) - 1\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (own, own))\n"
        "try: IndexManifest.load(__import__('pathlib').Path(sys.argv[1]))\n"
        "except TooManyFilesError as error: print(error)\n"
    )
    done = warm.run(program, path)
    assert "manifest.json cannot be opened" in done.stdout, done.stderr
    assert "ulimit -n" in done.stdout
