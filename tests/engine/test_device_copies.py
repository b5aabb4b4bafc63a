"""What a device's rows go through: copies of an order of their own, pinned buffers, searches that
FAISS takes at their word. Host memory stands in, with copies that come as late as they can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from standing_in import FAST
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.devices import held
from dualform.engine.devices.device import MAX_K, check_search, queries_at_a_time
from dualform.engine.devices.place import Place
from dualform.engine.devices.stand_in import StandIn
from dualform.engine.devices.work import Block, Nearest, Part
from dualform.engine.errors import CancelledError

ROWS, D_IN, D_OUT = 700, 12, 5


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """Shards of 300, 300 and 100 rows."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    path = make_index(tmp_path_factory.mktemp("i"), keys, values, shard_rows=300, rows_per_step=70)
    return path, keys, values


@pytest.fixture
def index(memory: tuple[Path, np.ndarray, np.ndarray]) -> Iterator[Index]:
    with Index.open(memory[0], device="cpu") as found:
        yield found


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """One whose buffers hold 25 keys, and whose rooms 64 rows, where they stream."""
    monkeypatch.setattr(held, "STAGING_BYTES", 4 * D_IN * 25)
    return Place(StandIn(), 1 << 20, 1 << 10, FAST)


@pytest.mark.parametrize("values", [False, True])
def test_what_is_brought_is_what_the_files_hold(
    memory: tuple[Path, np.ndarray, np.ndarray], index: Index, place: Place, values: bool
) -> None:
    """Through two buffers that are filled again many times, into memory that was used before."""
    layer = index.layers["fc"]
    block = held.load(place, layer, [0, 2], values=values)
    expected = memory[2 if values else 1]
    np.testing.assert_array_equal(block.numpy(), expected[[*range(300), *range(600, 700)]])
    assert isinstance(place.device, StandIn)
    assert place.device.waits >= 400 // 60 - 2


def test_a_stream_brings_a_piece_while_another_is_computed_with(
    memory: tuple[Path, np.ndarray, np.ndarray], index: Index, place: Place
) -> None:
    """Each piece is there when it is its turn, and stays while the next one is on its way."""
    _, keys, values = memory
    layer, rows, before = index.layers["fc"], [], None
    queries = torch.from_numpy(keys[:3])
    for span, block in held.streamed(place, layer, [0, 1, 2], values=True):
        first = layer.shards[span.shard].start + span.first
        assert block.values is not None
        np.testing.assert_array_equal(block.keys.numpy(), keys[first : first + span.rows])
        np.testing.assert_array_equal(block.values.numpy(), values[first : first + span.rows])
        scores, _ = place.device.nearest(block.keys, queries, 1)  # from now on its memory is in use
        np.testing.assert_allclose(
            scores[:, 0].numpy(), (keys[first : first + span.rows] @ keys[:3].T).max(0), rtol=1e-5
        )
        if before is not None:  # nothing has come into the other room meanwhile
            assert before[0].keys.data_ptr() != block.keys.data_ptr()
        before = block, span
        rows.append(span.rows)
    assert sum(rows) == ROWS
    assert max(rows) <= 64
    assert len(rows) > 10


def test_whoever_gives_up_leaves_no_copy_behind(index: Index, place: Place) -> None:
    asked = iter([False] * 4)
    with pytest.raises(CancelledError):
        held.load(place, index.layers["fc"], [0, 1], values=False, stop=lambda: next(asked, True))
    assert place.refused is None
    assert place.device.free() == place.device.memory
    stream = held.streamed(place, index.layers["fc"], [0, 1], values=False)
    next(stream)
    stream.close()
    assert place.device.free() == place.device.memory


def test_the_stand_in_minds_what_a_gpu_would_not_forgive() -> None:
    """Copies that are not waited for have not come; memory in use is not to be copied to."""
    device = StandIn()
    stream, room, host = device.stream(), device.empty(4, 3), torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="the stream is to follow first"):
        stream.copy(host, room)
    stream.follow(stream.computed())
    copied = stream.copy(host[:2], room[:2])
    assert torch.isnan(room).all()
    copied.synchronize()
    assert (room[:2] == 1).all()
    stream.copy(host[2:], room[2:])
    stream.lead()
    assert (room == 1).all()
    device.nearest(room, host[:1], 1)
    with pytest.raises(RuntimeError, match="the stream is to follow first"):
        stream.copy(host, room)


def test_a_search_that_faiss_would_take_other_numbers_for_is_refused() -> None:
    where, keys, queries = torch.device("cpu"), torch.ones(5, 4), torch.ones(2, 4)
    check_search(keys, queries, 5, where)
    for given, k, words in (
        ((keys.double(), queries), 1, "keys are torch.float64"),
        ((keys.T, torch.ones(2, 5)), 1, "must lie one after the other on cpu"),
        ((torch.ones(10, 4)[::2], queries), 1, "must lie one after the other"),
        ((keys, queries[0]), 1, r"queries are torch.float32 \[4\]"),
        ((keys[:0], queries), 1, r"keys are torch.float32 \[0, 4\]"),
        ((keys, torch.ones(2, 3)), 1, "keys have 4 numbers, queries 3"),
        ((keys, queries), 0, "k is 0; of 5 keys it is 1 to 5"),
        ((keys, queries), 6, "k is 6; of 5 keys it is 1 to 5"),
        ((torch.ones(3000, 4), queries), MAX_K + 1, "it is 1 to 2048"),
        ((torch.ones(5, 4, device="meta"), queries), 1, "on meta; they must lie"),
    ):
        with pytest.raises(ValueError, match=words):
            check_search(*given, k, where)
        if given[0].device == where:
            with pytest.raises(ValueError, match=words):
                StandIn().nearest(*given, k)


def test_so_many_queries_are_searched_at_a_time_as_fit_into_what_faiss_takes() -> None:
    """FAISS holds two tiles of products, and the best of each, whatever it was told to take."""
    for rows, k, scratch in ((10**8, 2048, 256 << 20), (10**6, 10, 256 << 20), (70, 5, 1 << 14)):
        n = queries_at_a_time(rows, k, scratch)
        tile = min(rows, 1 << 18)
        taken = n * (2 * 4 * tile + 2 * (4 + 8) * k * -(-rows // tile))
        assert 0.4 * scratch < taken <= scratch
    assert queries_at_a_time(10**9, 2048, 1 << 20) == 1


def test_queries_in_several_searches_are_those_of_one(
    memory: tuple[Path, np.ndarray, np.ndarray],
) -> None:
    calls: list[str] = []
    device = StandIn(before=calls.append)
    keys = device.empty(ROWS, D_IN)
    keys.copy_(torch.from_numpy(memory[1]))
    queries = torch.from_numpy(memory[1][:50]).T.contiguous().T  # column by column in memory
    found = []
    for scratch in (1 << 30, 1 << 16):
        calls.clear()
        work = Nearest(device, queries, 7, scratch)
        for _ in work.take(Part(Block(keys, None), np.arange(0, ROWS, 3))):
            pass
        found.append(work.result())
        found.append(calls.count("nearest"))
    assert found[1] == 1
    assert found[3] > 1
    np.testing.assert_array_equal(found[0][1], found[2][1])
    exact = memory[1][:50].astype(np.float64) @ memory[1][::3].astype(np.float64).T
    np.testing.assert_array_equal(found[2][1], 3 * np.argsort(-exact, axis=1)[:, :7])
