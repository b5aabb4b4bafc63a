"""The demo, run once for all tests here, and a server of its own on what it left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .demo_run import DUALFORM, Demo, run_demo, serving


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    folder.mkdir()
    (folder / "left-behind.txt").write_text("of an earlier run")
    return run_demo(folder)


@pytest.fixture(scope="session")
def server(demo: Demo) -> Iterator[str]:
    """HOST:PORT of a server on the demo's index."""
    command = [DUALFORM, "serve", demo.folder / "index", "--port", "0"]
    with serving(command, demo.folder / "test-serve.log") as address:
        yield address


@pytest.fixture(scope="session")
def queries(demo: Demo) -> Path:
    """The demo's query to layer 2, float32 [1, 256]."""
    return demo.folder / "query-2.npy"
