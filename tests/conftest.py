"""What all tests share: the data sets, found or skipped for, and a skip that hides nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dualform.serve import policy

LEFT_TO_US = [pool for pool in policy.POOLS if pool not in os.environ]
policy.apply()  # before any test imports torch; the processes that tests start inherit it

# A shell starts what it puts in the background with Ctrl-C ignored, and every child of such a
# process ignores it too: tests that interrupt a command would wait for its own end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that stay with one worker: what they share takes long to make: Ray's processes, a demo.
TOGETHER = {
    "tests/machines/": "tests/machines",
    "tests/project/test_demo.py": "the demo",
    "tests/project/test_wheel.py": "the demo",
}
# What takes longest, longest first.
LONGEST = (
    "tests/machines",
    "tests/project/test_experiments.py",
    "tests/project/test_site.py",
    "tests/project/test_release.py",
    "tests/record/test_compiled.py",
    "tests/integrations/test_stacks.py",
    "tests/explore/test_browser.py",
)

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("DUALFORM_DATA", ROOT.parent / "shared" / "data"))


def pytest_configure(config: pytest.Config) -> None:
    """Side by side, pytest-xdist's workers share the cores: none waits for another's threads.

    Tests that are about threads set how many they want.
    """
    workers = getattr(config.option, "numprocesses", None) or 0
    if workers > 1:
        share = max(1, (os.cpu_count() or 1) // workers)
        os.environ.update(dict.fromkeys(LEFT_TO_US, str(share)))


def unit(nodeid: str) -> str:
    """The tests that one worker runs in a row: those of a file, or what is named in TOGETHER."""
    file = nodeid.split("::")[0]
    return next((name for path, name in TOGETHER.items() if file.startswith(path)), file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left with it at the end."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(unit(item.nodeid), len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take a file at a time: none trains again for a part of one what its fixtures hold."""
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # the files in the order they are in, longest first
    return InOrder(config, log)


def pytest_collection_finish() -> None:
    """Garbage collections look at what tests make, not at a million objects that were imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with MNIST/; tests that ask for it skip where it is not.

    Where it is, such a test may not skip: `pytest_runtest_makereport` makes that a failure.
    """
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA}: set DUALFORM_DATA")
    return DATA


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and DATA.is_dir() and "data_dir" in getattr(item, "fixturenames", ()):
        report.outcome = "failed"
        report.longrepr = f"skipped, although the data sets are in {DATA}: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """No test changes what `warm` may fork: every later one would start fresh processes, in seconds
    each, and none would tell."""
    yield
    warm = sys.modules.get("warm")
    assert warm is None or warm.fits(), f"{item.nodeid} leaves its variables in the environment"


@pytest.fixture(scope="session")
def digits_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small published index of a network trained on digits (tests/digits.py); read-only."""
    import digits

    return digits.publish(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def adamw_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network trained by AdamW; read-only."""
    import digits

    path = tmp_path_factory.mktemp("adamw") / "recording"
    digits.record(path, make=digits.adamw)
    return path


@pytest.fixture(scope="session")
def adamw_index(adamw_recording: Path) -> Path:
    """Its index; read-only."""
    from dualform.index import build_index

    path = adamw_recording.parent / "index"
    build_index(adamw_recording, path, shard_rows=500)
    return path
