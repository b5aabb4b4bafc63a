"""The two memories, made once, and a way to await."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dualform.client import AsyncClient

from .memory import Digits, Many, make_digits, make_many, make_texts

T = TypeVar("T")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return make_digits(tmp_path_factory.mktemp("explore"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("explore"))


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Many:
    return make_many(tmp_path_factory.mktemp("explore"))


@pytest.fixture(scope="session")
def client(digits: Digits) -> Iterator[AsyncClient]:
    """On the digits."""
    client = AsyncClient.local(digits.path)
    yield client
    asyncio.run(client.close())


@pytest.fixture(scope="session")
def reader(texts: Path) -> Iterator[AsyncClient]:
    """On the texts."""
    client = AsyncClient.local(texts)
    yield client
    asyncio.run(client.close())


def wait(steps: Coroutine[Any, Any, T]) -> T:
    """What comes of a coroutine."""
    return asyncio.run(steps)
