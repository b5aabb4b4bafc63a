"""One small memory, served on a real socket and opened locally."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dualform.client import Client

from .memory import D_IN, Memory, make_memory
from .serving import serving


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("DUALFORM_TOKEN", raising=False)


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    return make_memory(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="session")
def queries() -> np.ndarray:
    """float32 [9, D_IN]"""
    return np.random.default_rng(8).standard_normal((9, D_IN)).astype(np.float32)


@pytest.fixture(scope="session")
def server(memory: Memory) -> Iterator[str]:
    """HOST:PORT of a server with that index alone."""
    with serving({"memory": memory.path}) as address:
        yield address


@pytest.fixture
def remote(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture(scope="session")
def local(memory: Memory) -> Iterator[Client]:
    with Client.local(memory.path) as client:
        yield client
