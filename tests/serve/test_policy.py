"""The thread policy, in processes of its own: it only counts before the first import of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm
from synthetic import make_index

from dualform.client import Client
from dualform.serve import policy


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("OMP_WAIT_POLICY", *policy.POOLS, policy.ARROW_POOL, policy.HEAPS)
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True
    )


def test_sets_what_torch_then_obeys_and_a_second_call_does_nothing() -> None:
    code = (
        "from dualform.serve import policy; policy.apply(threads=1); import os, torch; "
        "policy.apply(); print(os.environ['OMP_WAIT_POLICY'], torch.get_num_threads())"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["PASSIVE", "1"]


def test_default_is_the_cores_of_this_process() -> None:
    code = (
        "import os; from dualform.serve import policy; policy.apply(); "
        "print(os.environ['OMP_NUM_THREADS'], len(os.sched_getaffinity(0)))"
    )
    pool, cores = python(code).stdout.split()
    assert pool == cores


def test_what_the_user_set_stays() -> None:
    code = (
        "import os; from dualform.serve import policy; policy.apply(threads=1); "
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['OMP_NUM_THREADS'])"
    )
    done = python(code, OMP_WAIT_POLICY="ACTIVE", OMP_NUM_THREADS="7")
    assert done.stdout.split() == ["ACTIVE", "7"]


def test_too_late_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # it is enough that something of this name was imported
    done = python(
        "import torch; from dualform.serve import policy; policy.apply()", PYTHONPATH=str(tmp_path)
    )
    assert done.returncode != 0
    assert "torch was imported before the thread policy was set" in done.stderr


def test_arrow_takes_the_system_s_memory() -> None:
    code = (
        "from dualform.serve import policy; policy.apply(); import pyarrow; "
        "print(pyarrow.default_memory_pool().backend_name)"
    )
    assert python(code).stdout.strip() == "system"


def test_threads_share_two_heaps() -> None:
    """A heap beyond the main one is mapped, so threads that allocate add address space for each."""
    code = """
import threading
def heaps():
    done, hold = threading.Barrier(9), threading.Event()
    def work():
        kept = [bytes(100_000 + i) for i in range(50)]
        done.wait(); hold.wait(); del kept
    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    done.wait()
    # glibc keeps 64 MiB for the heap of a thread, aligned, of which it uses the beginning.
    spans = [line.split()[:2] for line in open("/proc/self/maps")]
    spans = [(*(int(end, 16) for end in span.split("-")), mode) for span, mode in spans]
    heaps = [
        first[0] for first, then in zip(spans, spans[1:])
        if first[2] == "rw-p" and then[2] == "---p" and first[1] == then[0]
        and first[0] % (64 << 20) == 0 and then[1] - first[0] == 64 << 20
    ]
    hold.set(); [t.join() for t in threads]
    return len(heaps)
print(heaps())
"""
    applied = "from dualform.serve import policy; policy.apply()"
    without, with_policy = int(python(code).stdout), int(python(applied + code).stdout)
    assert with_policy <= 1 < without


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    done = python(
        "import resource; from dualform.serve import policy; "
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)); policy.apply(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65536))"
    )
    assert done.stdout == "True\n", done.stderr


def test_collections_do_not_look_at_what_was_imported() -> None:
    code = """
import gc, sys
from dualform.serve import policy
import dualform.serve.server
gc.unfreeze()
gc.collect()
before = len(gc.get_objects())
policy.settle()
print(before, len(gc.get_objects()), sys.getswitchinterval())
"""
    done = warm.run(code)
    before, after, interval = done.stdout.split()
    assert int(before) > 100_000
    assert int(after) < int(before) / 100
    assert float(interval) < 0.001


@pytest.mark.slow
def test_a_system_without_threads_to_give_ends_no_server(tmp_path: Path) -> None:
    """Every kind of question, each from all cores, is asked for the first time without any."""
    anyone = ["setpriv", "--reuid=61234", "--clear-groups"]
    reach = "+dac_override,+dac_read_search"  # the interpreter may lie where root alone looks
    anyone_here = [*anyone, f"--inh-caps={reach}", f"--ambient-caps={reach}"]
    if os.geteuid() or subprocess.run([*anyone_here, "true"], capture_output=True).returncode:
        pytest.skip("needs root, who may become a user that no other process has")
    rng = np.random.default_rng(1)
    index = make_index(tmp_path, rng.standard_normal((30_000, 64)).astype(np.float32), None)
    (tmp_path / "server.yaml").write_text(f"listen: 127.0.0.1:0\nindexes: {{i: {index}}}\n")
    serve = [sys.executable, "-m", "dualform.cli", "serve", "--config", tmp_path / "server.yaml"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [*anyone_here, *map(str, serve)], stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("listening on ").strip()
            assert address, (tmp_path / "log").read_text()
            until = time.monotonic() + 60
            while "all files are as written" not in (tmp_path / "log").read_text():
                assert time.monotonic() < until
                time.sleep(0.1)
            threads = len(os.listdir(f"/proc/{server.pid}/task"))
            limit = ["prlimit", "--pid", str(server.pid), f"--nproc={threads}:{threads}"]
            subprocess.run([*anyone, *limit], check=True)
            with Client(address, retry=None, timeout=120) as client:
                for n in (1, 40, 200):
                    queries = rng.standard_normal((n, 64)).astype(np.float32)
                    assert client.top_k("fc", queries, k=3).rows.shape == (n, 3)
                    assert client.top_k("fc", queries, k=100, where="step > 7").rows.shape[0] == n
                    sums = client.sums("fc", queries, group_by="step", absolute=True)
                    assert sums.values.shape[0] == n
            assert len(os.listdir(f"/proc/{server.pid}/task")) <= threads
        finally:
            server.terminate()
            assert server.wait(60) == 0


def test_few_files_to_open_are_told_before_anything_ends_the_process(tmp_path: Path) -> None:
    few = ["bash", "-c", 'ulimit -n 12; exec "$@"', "bash"]
    done = subprocess.run(
        [*few, sys.executable, "-m", "dualform.cli", "serve", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dualform: 12 files may be open, and at least 64 are needed")
    assert "ulimit -n" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_without_space_is_told(tmp_path: Path) -> None:
    index = make_index(tmp_path, np.ones((5, 3), np.float32), None)
    command = [sys.executable, "-m", "dualform.cli", "serve", index, "--port", "0"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "what is written to, standard output perhaps: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
