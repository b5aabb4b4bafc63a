"""Parts of followed layers, on the server: made once for all of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualform.client import Client
from dualform.engine.totals import followed

from .serving import serving


def test_clients_share_the_parts_of_a_mask(
    adamw_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, original = [], followed.steps_in_order

    def counted(*arguments: Any) -> Iterator[Any]:
        passes.append(arguments[0].name)
        return original(*arguments)

    monkeypatch.setattr(followed, "steps_in_order", counted)
    queries = np.random.default_rng(0).standard_normal((6, 48)).astype(np.float32)

    def ask(number: int) -> np.ndarray:
        with Client(served.address) as client:
            own = queries[number : number + 1]
            return client.dual_output("2", own, where="label in (3, 5) and step > 7").values

    with serving({"digits": adamw_index}) as served, ThreadPoolExecutor(6) as pool:
        found = np.concatenate(list(pool.map(ask, range(6))))
        assert passes == ["2"]
        again = np.concatenate([ask(number) for number in range(6)])
    assert passes == ["2"]
    np.testing.assert_array_equal(found, again)
