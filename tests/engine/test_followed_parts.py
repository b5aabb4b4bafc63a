"""The parts of followed layers are made once: by a mask that comes again, by two that ask at once.

Counted are passes over the steps, not seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualform.client import Client, parse_filter
from dualform.engine import Index
from dualform.engine.errors import CancelledError, ResourceExhaustedError
from dualform.engine.memory import shards
from dualform.engine.totals import followed

MASK = "label = 3 and step < 40"


class Passes:
    """Passes over the steps that began; the first is held back until `go`."""

    def __init__(self) -> None:
        self.count = 0
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Event()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    passes, original = Passes(), followed.steps_in_order

    def counted(*arguments: Any) -> Iterator[Any]:
        passes.count += 1
        passes.began.set()
        assert passes.go.wait(20)
        return original(*arguments)

    monkeypatch.setattr(followed, "steps_in_order", counted)
    return passes


def queries(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 48)).astype(np.float32)


def test_a_mask_again_is_no_further_pass(adamw_index: Path, passes: Passes) -> None:
    """Whatever is asked of it, and however it is written."""
    with Client.local(adamw_index, device="cpu") as client:
        client.dual_output("2", queries(0), where=MASK)
        assert passes.count == 1
        client.dual_output("2", queries(1), where=MASK)
        client.dual_output("2", queries(1), where="step between 0 and 39 and not label != 3")
        assert passes.count == 1
        client.dual_output("2", queries(1), where="label = 4")
        client.dual_output("4", queries(1), where=MASK)
        assert passes.count == 3
        client.dual_output("2", queries(2), where=MASK)
        assert passes.count == 3


def test_a_mask_again_reads_no_row(adamw_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keys nor values, of any shard."""
    read, rows = [], shards.ShardFile.rows

    def counted(self: shards.ShardFile) -> Any:
        read.append(self.path)
        return rows(self)

    monkeypatch.setattr(shards.ShardFile, "rows", counted)
    with Client.local(adamw_index, device="cpu") as client:
        client.dual_output("2", queries(0), where=MASK, group_by="label")
        assert len(read) > 1
        read.clear()
        client.dual_output("2", queries(1), where=MASK, group_by="label")
        assert read == []


def _wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def _ask(index: Index, seed: int, stop: Callable[[], bool] | None = None) -> np.ndarray:
    return index.dual_output("2", queries(seed), where=parse_filter(MASK), stop=stop).values


def _together(index: Index, passes: Passes, first: Any, second: Any) -> tuple[Any, Any]:
    """Two questions, the second while the first makes its parts; what their futures hold."""
    asked = threading.Event()

    def waiting() -> bool:
        asked.set()
        return bool(second())

    passes.go.clear()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(_ask, index, 0, first)
        assert passes.began.wait(20)
        two = pool.submit(_ask, index, 0, waiting)
        _wait_until(lambda: asked.is_set() or two.done())
        assert passes.count == 1
        if not second():
            assert not two.done()
        else:
            _wait_until(two.done)
        passes.go.set()
    return one, two


def test_two_at_once_are_one_pass(adamw_index: Path, passes: Passes) -> None:
    with Index.open(adamw_index, device="cpu") as index:
        one, two = _together(index, passes, lambda: False, lambda: False)
        np.testing.assert_array_equal(one.result(), two.result())
        assert passes.count == 1


def test_who_waits_may_give_up(adamw_index: Path, passes: Passes) -> None:
    with Index.open(adamw_index, device="cpu") as index:
        one, two = _together(index, passes, lambda: False, lambda: True)
        assert isinstance(two.exception(), CancelledError)
        assert len(one.result()) == 2


def test_who_waits_takes_over_from_one_that_gave_up(adamw_index: Path, passes: Passes) -> None:
    with Index.open(adamw_index, device="cpu") as index:
        one, two = _together(index, passes, passes.began.is_set, lambda: False)
        assert isinstance(one.exception(), CancelledError)
        np.testing.assert_array_equal(two.result(), _ask(index, 0))
        assert passes.count == 2


def test_more_groups_than_memory_are_refused_before_a_row_is_read(
    adamw_index: Path, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Index.open(adamw_index, device="cpu") as index:
        layer = index.layers["2"]
        groups = len(layer.space.grouping("label").values)
        # Of each number: the initial part in float64, three buffers of Adam's and four tensors on
        # the way in float32; of each part itself in float64, moves and momentum in float32.
        needed = layer.d_in * layer.d_out * (8 + (3 + 4) * 4 + groups * (8 + 2 * 4))
        monkeypatch.setattr(followed, "FOLLOWED_BYTES", needed)
        found = index.dual_output("2", queries(0), group_by="label", at_step=5)
        assert (found.values.shape[1], passes.count) == (groups, 1)
        monkeypatch.setattr(followed, "FOLLOWED_BYTES", needed - 1)
        with pytest.raises(ResourceExhaustedError, match="fewer values"):
            index.dual_output("2", queries(0), group_by="label", at_step=3)
        assert passes.count == 1
