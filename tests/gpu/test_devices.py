"""What only hardware can show of devices: skipped without a GPU, or where FAISS has no GPU part."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.devices import gpu, self_test
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.held import load, streamed
from dualform.engine.devices.place import Pace, Paces, Place
from dualform.engine.devices.work import Block, Nearest, Part

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gpu.without_faiss() is not None,
    reason="needs a CUDA GPU, and faiss-gpu",
)
WAIT = 120.0
SCRATCH = 256 << 20
UNKNOWN = Paces(*[Pace(0.0, 0.0, 0.0)] * 4, upload=0.0)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """60,000 rows, half of them repeats."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((60_000, 300)).astype(np.float32)
    keys[30_000:] = keys[:30_000]
    path = make_index(
        tmp_path_factory.mktemp("index"),
        keys,
        rng.standard_normal((60_000, 20)).astype(np.float32),
        rows_per_step=1000,
        shard_rows=16_000,
        label=rng.integers(0, 5, 60_000),
    )
    return path, keys


@pytest.fixture(scope="module")
def device() -> gpu.Gpu:
    found = gpu.Gpu(0)
    found.prepare(SCRATCH)
    return found


def test_the_self_test_passes(device: gpu.Gpu) -> None:
    assert self_test.wrong(device) is None


def test_tf32_is_found_out(device: gpu.Gpu) -> None:
    """torch's products are part of the test; FAISS's math mode is its own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert "torch's products" in str(self_test.wrong(device))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_faiss_reads_what_torch_wrote_without_a_copy(device: gpu.Gpu) -> None:
    """Rows written just before on torch's stream are found, and the memory in use is torch's."""
    keys = device.empty(200_000, 256)
    queries = torch.randn(4, 256)
    free = 0
    with device.current():
        for turn in range(20):
            keys.normal_()
            keys[turn] = 100 * queries[0].to(device.where)
            work = Nearest(device, queries, 5, SCRATCH)
            for _ in work.take(Part(Block(keys, None))):
                pass
            assert work.result()[1][0, 0] == turn
            free = free or device.free()  # with all that CUDA's libraries take once
    assert free - device.free() < keys.nbytes // 2


def test_a_search_takes_no_more_than_its_scratch(
    device: gpu.Gpu, capfd: pytest.CaptureFixture[str]
) -> None:
    """FAISS says so where it takes memory beside what it has at hand."""
    keys = device.empty(600_000, 40).normal_()
    device._resources.setLogMemoryAllocations(True)
    try:
        with device.current():
            for n, k in ((1, 10), (700, 10), (300, 2048)):
                work = Nearest(device, torch.randn(n, 40), k, SCRATCH)
                for _ in work.take(Part(Block(keys, None))):
                    pass
                assert work.result()[1].shape == (n, k)
    finally:
        device._resources.setLogMemoryAllocations(False)
    said = capfd.readouterr().out
    assert "alloc ok" in said  # it does say what it takes
    assert "no temp space" not in said


def test_rows_come_to_memory_that_is_not_in_use_any_more(
    memory: tuple[Path, np.ndarray], device: gpu.Gpu
) -> None:
    """What was computed with a tensor that is no more goes on when its memory is given to rows."""
    path, keys = memory
    place = Place(device, 1 << 30, SCRATCH, UNKNOWN)
    with Index.open(path, device="cpu") as index:
        layer = index.layers["fc"]
        for _ in range(5):
            with place.used():
                before = device.empty(*keys.shape).fill_(1.0)
                busy = torch.ones((4096, 4096), device=device.where)
                for _ in range(20):  # the GPU is at work for a while
                    busy = busy @ busy * 1e-4
                total = before.sum(dtype=torch.float64)
                del before
            rows = load(place, layer, [0, 1, 2, 3], values=False)
            assert float(total) == keys.size
            for first, shard in zip((0, 16_000, 32_000, 48_000), layer.shards, strict=True):
                found = rows[first : first + shard.rows].cpu()
                assert torch.equal(found, shard.keys.pick(slice(None)))
            del rows


def test_rows_stream_through_while_others_are_computed_with(
    memory: tuple[Path, np.ndarray], device: gpu.Gpu
) -> None:
    path, keys = memory
    place = Place(device, 1 << 30, 8 << 20, UNKNOWN)
    sums = []
    with Index.open(path, device="cpu") as index, place.used():
        for _, block in streamed(place, index.layers["fc"], [0, 1, 2, 3], values=True):
            assert block.values is not None
            # Both are read long after they came, if the GPU is as slow as that.
            busy = torch.ones((2048, 2048), device=device.where)
            for _ in range(5):
                busy = busy @ busy * 1e-4
            sums.append(torch.stack([block.keys.double().sum(), block.values.double().sum()]))
        found = torch.stack(sums).sum(dim=0).cpu().numpy()
        layer = index.layers["fc"]
        values = np.concatenate([each.values.pick(slice(None)) for each in layer.shards])
    assert len(sums) > 10
    np.testing.assert_allclose(
        found, [keys.sum(dtype=np.float64), values.sum(dtype=np.float64)], rtol=1e-9
    )


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rows_and_scores_are_the_cpus(
    memory: tuple[Path, np.ndarray], device: gpu.Gpu, order: str, share: float
) -> None:
    path, keys = memory
    devices = Devices([device], 0.5)
    devices.places[0].budget = int(share * 1.1 * keys.nbytes)
    queries = np.concatenate([keys[:70], np.zeros((1, 300), np.float32)])
    with Index.open(path, device="cpu") as cpu, Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        assert devices.residences(index.layers["fc"])
        for k in (1, 100, 1900):
            for text in (None, "label = 2", "label != 2"):
                where = None if text is None else parse_filter(text)
                found = index.top_k("fc", queries, k, order=order, where=where, strategy="device")
                expected = cpu.top_k("fc", queries, k, order=order, where=where)
                np.testing.assert_array_equal(found.rows, expected.rows)
                np.testing.assert_array_equal(found.scores, expected.scores)
    devices.close()


def test_sums_and_outputs_are_the_cpus(memory: tuple[Path, np.ndarray], device: gpu.Gpu) -> None:
    path, keys = memory
    terms = np.abs(keys[:9]).astype(np.float64) @ np.abs(keys).astype(np.float64).T
    devices = Devices([device], 0.5)
    with Index.open(path, device="cpu") as cpu, Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        for absolute in (False, True):
            found = index.sums("fc", keys[:9], "label", absolute=absolute, strategy="device")
            expected = cpu.sums("fc", keys[:9], "label", absolute=absolute, strategy="scan")
            off = np.abs(found.values - expected.values)
            assert (off <= 1e-6 * terms.sum(axis=1, keepdims=True)).all()
        for ask in ({}, {"group_by": "label"}, {"where": parse_filter("label < 3")}):
            x = index.dual_output("fc", keys[:9], strategy="device", **ask)
            y = cpu.dual_output("fc", keys[:9], strategy="scan", **ask)
            np.testing.assert_allclose(x.values, y.values, rtol=1e-5, atol=1e-3)
    devices.close()


def test_what_is_let_go_of_is_free_again(memory: tuple[Path, np.ndarray], device: gpu.Gpu) -> None:
    path, keys = memory
    torch.cuda.empty_cache()
    before = device.free()
    devices = Devices([device], 0.5)
    for _ in range(5):
        with Index.open(path, devices=devices) as index:
            assert devices.settle(WAIT)
            index.top_k("fc", keys[:8], 10, strategy="device")
        assert devices.settle(WAIT)
    torch.cuda.empty_cache()
    assert before - device.free() < keys.nbytes
    devices.close()


def test_threads_ask_at_once(memory: tuple[Path, np.ndarray], device: gpu.Gpu) -> None:
    path, keys = memory
    devices = Devices([device], 0.5)
    with Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        expected = index.top_k("fc", keys[:64], 10, strategy="device").rows
        wrong = []

        def ask(turn: int) -> None:
            for _ in range(20):
                rows = index.top_k("fc", keys[turn : turn + 8], 10, strategy="device").rows
                if not np.array_equal(rows, expected[turn : turn + 8]):
                    wrong.append(turn)

        threads = [threading.Thread(target=ask, args=(8 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
    devices.close()


def test_a_budget_beyond_the_memory_is_an_error(memory: tuple[Path, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="gpu_memory"):
        Index.open(memory[0], device="cuda", gpu_memory="900TiB")
    with pytest.raises(ValueError, match="torch finds"):
        Index.open(memory[0], device="cuda:99")
