"""A question for which there is no memory is refused as that, whoever could not allocate."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import ran_out_of_memory

# The limit is set once all that opens is open, so that the question alone is what does not fit.
PROGRAM = """
import resource, sys
import numpy as np
from dualform.client import Client, ResourceExhaustedError
with Client.local(sys.argv[1]) as client:
    one = np.ones((1, 8), np.float32)
    few = client.top_k("fc", one, k=3).rows.tolist()
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY))
    many = np.ones((4000, 8), np.float32)
    for ask in (
        lambda: client.top_k("fc", many, k=200, strategy="scan"),
        lambda: next(client.stream_weights("fc", np.ones((4096, 8), np.float32))),
        lambda: client.explain({"fc": many}, k=200),
    ):
        try:
            ask()
            print("answered")
        except ResourceExhaustedError as error:
            assert "fewer queries" in str(error), error
            print(error.reason)
    assert client.top_k("fc", one, k=3).rows.tolist() == few
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")
def test_a_question_beyond_the_memory_is_refused_and_the_next_answered(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((200_000, 8)).astype(np.float32)
    path = make_index(tmp_path, keys, None, rows_per_step=50_000)
    done = warm.run(PROGRAM, path)
    assert done.returncode == 0, done.stderr
    assert "OUT_OF_MEMORY" in done.stdout
    assert set(done.stdout.split()) <= {"OUT_OF_MEMORY", "answered"}


def test_what_torch_says_without_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as numpy:
        np.empty(1 << 50)
    for error in (
        cpu.value,
        numpy.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ):
        assert ran_out_of_memory(error), error
    for error in (RuntimeError("a bug"), OSError(errno.ENOENT, "x"), ValueError("memory")):
        assert not ran_out_of_memory(error), error


def test_an_index_is_not_called_damaged_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualform.engine.messages.catalog import Catalog

    path = make_index(tmp_path, np.ones((9, 2), np.float32), None)

    def full(*_: object, **__: object) -> None:
        torch.empty(1 << 50)

    monkeypatch.setattr(Index, "open", full)
    damage = Catalog({"a": path}, device="cpu").damage("a")
    assert damage is not None
    assert "memory" in damage
