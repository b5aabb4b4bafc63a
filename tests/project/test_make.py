"""The Makefile and what it runs: every target explained, set-up idempotent, stubs fresh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _needs_make() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    # Not as a part of the make that runs the tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, env=env)


def test_help_lists_every_target_with_a_line() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = {
        line.split()[1]: line.split(maxsplit=2)[2] for line in make("help").stdout.splitlines()
    }
    assert set(targets) == set(lines)
    assert {"help", "setup", "demo", "test", "lint", "stubs"} <= set(targets)


def test_setup_refuses_an_unsupported_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 9, 1)\nsys.version = '3.9.1'\n"
        "exec(sys.argv[2])\n"
    )
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "dualform needs Python 3.10 to 3.13; this is 3.9.1" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_every_check() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for target in ("setup", "lint", "stubs-check", "demo", "dist-check", "test-slow", "test"):
        assert re.search(rf"^step {target}$", script, re.MULTILINE), target
    assert script.rstrip().endswith("step test")


def test_the_forge_runs_what_ci_runs_on_a_python_that_can() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    # stubs-check has no tool for later ones.
    assert set(job["strategy"]["matrix"]["python"]) <= {"3.10", "3.11", "3.12"}


def test_a_commit_is_checked_by_what_lint_runs() -> None:
    """Each hook is a line of `make lint`, but for the files that pre-commit names."""
    recipe = make("--dry-run", "lint").stdout
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["entry"].removesuffix(" --force-exclude") in recipe, hook["id"]
    tools = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert tools == set(re.findall(r"^(\S+)", recipe, re.MULTILINE))


def test_two_processes_share_the_tests_unless_one_is_asked_for() -> None:
    assert "--numprocesses=2 --dist=loadscope" in make("--dry-run", "test").stdout
    assert "--numprocesses=0 " in make("--dry-run", "test", "WORKERS=0").stdout


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """With the options of `make test` and this project's order."""
    words = make("--dry-run", "test").stdout.split()
    options = [each for each in words if each.startswith(("--numprocesses", "--dist", "--max-w"))]
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(
            "import os, time\n\n\ndef test_before():\n    time.sleep(0.2)\n\n\n"
            f"def test_dies():\n    if {number} == 1:\n        os._exit(1)\n"
        )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout
    assert re.search(r"crashed while running 'test_1.py::test_dies'", done.stdout), done.stdout


def test_every_test_is_run_by_one_of_two_targets() -> None:
    assert ' -m "not slow" ' in make("--dry-run", "test").stdout
    assert " -m slow " in make("--dry-run", "test-slow").stdout
    soaked = make("--dry-run", "soak").stdout
    for path in (ROOT / "tests").rglob("*.py"):
        assert "mark.slow" not in path.read_text() or str(path.relative_to(ROOT)) in soaked, path


def test_lint_holds_the_boundaries() -> None:
    assert "tests/project/test_layout.py" in make("--dry-run", "lint").stdout


@pytest.mark.slow
def test_the_committed_stubs_are_what_the_proto_gives(tmp_path: Path) -> None:
    if sys.version_info >= (3, 13):
        pytest.skip("the oldest supported grpcio-tools has no wheel for Python 3.13")
    fresh = subprocess.run(
        ["bash", "scripts/stubs.sh", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(Path.home())},
    )
    assert fresh.returncode == 0, fresh.stderr
