"""Memory that scans freed goes back to the system, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import threading
from dualform.serve.memory import anonymous_bytes, heap

heap.give_back()
before = anonymous_bytes()
# 180 MB, each too small to be mapped by itself.
blocks = [b"x" * (60_000 + i % 2) for i in range(3000)]
last = b"x" * 60_002  # the top of the heap is in use
held = anonymous_bytes()
blocks.clear()
kept = anonymous_bytes()
heap.give_back()
print(held - before, kept - before, anonymous_bytes() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    held, kept, left = map(int, done.stdout.split())
    assert held > 170e6
    assert kept > 50e6  # glibc keeps much of it
    assert left < 20e6


NO_FILE = """
import os
from dualform.serve.memory import anonymous_bytes, heap

heap.give_back()
try:
    while True:
        os.dup(0)
except OSError:
    pass
heap.give_back(always=True)
print(anonymous_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_known_where_no_file_can_be_opened() -> None:
    """Clients may have taken all descriptors; a limit of memory holds nevertheless."""
    done = subprocess.run(
        [sys.executable, "-c", NO_FILE], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 1e6
