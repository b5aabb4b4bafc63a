"""A build in somebody's process leaves BLAS one thread while it works, and what it had after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import warm
from synthetic import make_recording

PROGRAM = """
import sys
import numpy
from threadpoolctl import threadpool_info, threadpool_limits
from dualform.index import build_index

def threads():
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

seen = set()
def progress(done, total):
    seen.update(threads())
    if sys.argv[3] == "fails":
        raise SystemError("as a progress bar may")

with threadpool_limits(3, user_api="blas"):
    before = threads()
    try:
        build_index(sys.argv[1], sys.argv[2], progress=progress)
    except SystemError:
        pass
    print(sorted(before), sorted(seen), sorted(threads()))
"""


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_build_leaves_blas_one_thread_and_gives_back_what_it_had(
    tmp_path: Path, how: str
) -> None:
    keys = np.ones((100, 4), np.float32)
    recording = make_recording(tmp_path / "recording", keys, keys, 10, 0.1, 0.0, {})
    done = warm.run(PROGRAM, recording, tmp_path / "index", how)
    assert done.stdout.split() == ["[3]", "[1]", "[3]"], done.stderr
