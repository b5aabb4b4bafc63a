"""The thread policy, in processes of its own: it only counts before the first import of torch."""

from __future__ import annotations

import os
import subprocess
import sys


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True
    )


def test_sets_what_torch_then_obeys() -> None:
    code = (
        "from dualform.serve import policy; policy.apply(threads=1); import os, torch; "
        "print(os.environ['OMP_WAIT_POLICY'], torch.get_num_threads())"
    )
    done = python(code)
    assert done.stdout.split() == ["PASSIVE", "1"], done.stderr


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


def test_too_late_is_an_error() -> None:
    done = python("import torch; from dualform.serve import policy; policy.apply()")
    assert done.returncode != 0
    assert "torch was imported before the thread policy was set" in done.stderr


def test_a_second_call_does_nothing() -> None:
    code = "from dualform.serve import policy; policy.apply(); import torch; policy.apply()"
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
