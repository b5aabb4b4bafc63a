"""One small memory with pictures, and a client on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dualform.client import Client

from .memory import Pictures, make


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return make(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def client(pictures: Pictures) -> Iterator[Client]:
    with Client.local(pictures.path) as client:
        yield client


@pytest.fixture(scope="session")
def query_files(pictures: Pictures, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each layer's queries in a .npy file."""
    folder = tmp_path_factory.mktemp("queries")
    for layer, queries in pictures.queries.items():
        np.save(folder / f"q{layer}.npy", queries)
    return {layer: folder / f"q{layer}.npy" for layer in pictures.queries}
