"""What the server's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .serving import Served, serving


@pytest.fixture(scope="session")
def digits_server(digits_index: Path) -> Iterator[Served]:
    """The small published index, served alone as "digits"."""
    with serving({"digits": digits_index}) as served:
        yield served
