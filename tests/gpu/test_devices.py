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
from dualform.engine.devices.work import Block, Nearest, Part

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gpu.without_faiss() is not None,
    reason="needs a CUDA GPU, and faiss-gpu",
)
WAIT = 120.0


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
    return gpu.Gpu(0)


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
    free = device.free()
    queries = torch.randn(4, 256)
    with device.current():
        for turn in range(20):
            keys.normal_()
            keys[turn] = 100 * queries[0].to(device.where)
            work = Nearest(device, queries, 5, 64 << 20)
            for _ in work.take(Part(Block(keys, None))):
                pass
            assert work.result()[1][0, 0] == turn
    assert free - device.free() < keys.nbytes // 2


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
