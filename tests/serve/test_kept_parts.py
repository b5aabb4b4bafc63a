"""Parts of followed layers, on the server: made once for all of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualform.client import Client, InvalidArgumentError
from dualform.engine.memory import shards
from dualform.engine.totals import followed
from dualform.index import build_index

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
            query = queries[number : number + 1]
            return client.dual_output("2", query, where="label in (3, 5) and step > 7").values

    with serving({"digits": adamw_index}) as served, ThreadPoolExecutor(6) as pool:
        found = np.concatenate(list(pool.map(ask, range(6))))
        assert passes == ["2"]
        monkeypatch.setattr(shards.ShardFile, "rows", None)  # the same mask again reads no row
        again = np.concatenate([ask(number) for number in range(6)])
    assert passes == ["2"]
    np.testing.assert_array_equal(found, again)


def test_stored_parts_over_the_wire(adamw_recording: Path, tmp_path: Path) -> None:
    build_index(adamw_recording, tmp_path / "index", parts=["label"])
    queries = np.random.default_rng(0).standard_normal((2, 48)).astype(np.float32)
    with serving({"digits": tmp_path / "index"}) as served, Client(served.address) as client:
        found = client.dual_output("2", queries, group_by="label", explain_plan=True)
        assert found.plan is not None
        assert found.plan.strategy == "parts"
        assert set(found.plan.costs) == {"parts", "scan"}
        scan = client.dual_output("2", queries, group_by="label", strategy="scan")
        np.testing.assert_allclose(found.values, scan.values, atol=2e-6)
        with pytest.raises(InvalidArgumentError, match="whole groups of label"):
            client.dual_output("2", queries, where="step < 3", strategy="parts")
