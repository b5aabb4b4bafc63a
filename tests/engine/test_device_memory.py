"""What lies on devices: by use, as budgets allow, let go of in the end; host memory stands in."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standing_in import FAST, WAIT, Failing, repeats, tf32
from synthetic import make_index

from dualform.client import Residence, parse_filter
from dualform.client._info import index_of
from dualform.engine import Index
from dualform.engine.devices import gpu, self_test
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.place import Pace, Paces
from dualform.engine.devices.placement import Wish, placed
from dualform.engine.devices.stand_in import StandIn
from dualform.engine.errors import (
    DataLossError,
)
from dualform.engine.messages.catalog import Catalog
from dualform.questions import IndexQuestion


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    return repeats(tmp_path_factory.mktemp("memory"))


def test_what_is_asked_for_most_lies_there(
    memory: tuple[Path, np.ndarray], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two layers, and room for one: the one that is asked for takes the other's place."""
    path, keys = memory
    other = make_index(tmp_path, keys[:9000], None, rows_per_step=4500, shard_rows=1500)
    devices = Devices([StandIn()], 64 << 20, paces=FAST)
    devices.places[0].budget = keys.nbytes + 1000
    with Index.open(path, devices=devices) as first, Index.open(other, devices=devices) as second:
        assert devices.settle(WAIT)
        layers = first.layers["fc"], second.layers["fc"]
        assert [bool(devices.residences(layer)) for layer in layers] == [True, False]
        first.top_k("fc", keys[:1], 3)
        with caplog.at_level(logging.INFO, "dualform.engine"):
            for _ in range(30):
                second.top_k("fc", keys[:30], 3, strategy="scan")
            assert devices.settle(WAIT)
        assert "its rows leave stand-in:0" in caplog.text
        (residence,) = devices.residences(layers[1])
        assert (residence.device, residence.rows) == ("stand-in:0", 9000)
        assert residence.key_bytes == 9000 * 40 * 4
        assert sum(each.rows for each in devices.residences(layers[0])) <= 1000  # one shard
        found = second.top_k("fc", keys[:3], 3, strategy="device")
        assert found.plan.strategy == "device"
    assert devices.settle(WAIT)
    assert devices.states()[0].used == 0


def test_an_index_that_nobody_has_any_more_leaves_the_devices(
    memory: tuple[Path, np.ndarray],
) -> None:
    """As a catalog lets go of an older version: without a word."""
    devices = Devices([StandIn()], 64 << 20, paces=FAST)
    index: Index | None = Index.open(memory[0], devices=devices)
    assert devices.settle(WAIT)
    assert devices.states()[0].used > 0
    assert index is not None
    index = None
    gc.collect()
    assert devices.settle(WAIT)
    assert devices.states()[0].used == 0


def test_damage_is_told_to_whoever_asks(memory: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    copy = tmp_path / "index"
    shutil.copytree(memory[0], copy)
    file = sorted(copy.glob("**/*.faiss"))[0]
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    devices = Devices([StandIn()], 64 << 20, paces=FAST)
    with Index.open(copy, devices=devices) as index:
        assert devices.settle(WAIT)
        assert not devices.residences(index.layers["fc"])
        with pytest.raises(DataLossError):
            index.top_k("fc", memory[1][:1], 3)


def test_the_catalog_tells_what_lies_where(memory: tuple[Path, np.ndarray]) -> None:
    devices = Devices([StandIn(0, rounded=tf32), StandIn(1)], 64 << 20, paces=FAST)
    catalog = Catalog({"i": memory[0]}, devices=devices)
    assert devices.settle(WAIT)
    info = index_of(catalog.answer(IndexQuestion("i")).index)
    refused, used = info.devices
    assert (refused.name, used.name) == ("stand-in:0", "stand-in:1")
    assert "further from float64's than allowed" in refused.refused
    assert not used.refused
    (residence,) = info.layers["fc"].residences
    assert residence == Residence("stand-in:1", 10_000, 10_000 * 160, 10_000 * 24)
    assert used.used_bytes == residence.key_bytes + residence.value_bytes <= used.budget_bytes
    catalog.close()


def test_devices_that_are_not_there(memory: tuple[Path, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="gpu_memory is 103,809,024 bytes"):
        Devices([StandIn(memory=1 << 20)], 99 << 20, paces=FAST)
    if torch.cuda.is_available():
        return
    for device in ("cuda", "cuda:3", ["cuda:0", "cuda:1"]):
        with pytest.raises(ValueError, match="torch finds no GPU; allowed are auto"):
            Index.open(memory[0], device=device)
    with Index.open(memory[0], device="auto") as index:
        assert index.devices.why_not() == "torch finds no GPU"
        assert index.top_k("fc", memory[1][:1], 3).plan.strategy != "device"


def test_a_faiss_that_cannot_be_loaded_leaves_the_cpu(
    memory: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """faiss-gpu without the CUDA libraries that it needs raises a RuntimeError, not ImportError."""

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "faiss":
                raise RuntimeError("faiss-gpu installed but nvidia-cublas-cu12 is missing")

    monkeypatch.setattr(gpu, "gpus", lambda: 1)
    monkeypatch.delitem(sys.modules, "faiss", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert "nvidia-cublas-cu12 is missing" in str(Devices.find("auto").why_not())
    with pytest.raises(ValueError, match=r"nvidia-cublas-cu12 is missing.*; or use device: cpu"):
        Devices.find("cuda:0")


def test_rows_that_leave_give_their_memory_back(memory: tuple[Path, np.ndarray]) -> None:
    """To whoever else uses the GPU, once nobody computes there; torch would keep it."""
    device = StandIn()
    given: list[int] = []
    device.give_back = lambda: given.append(device.free())  # type: ignore[method-assign]
    devices = Devices([device], 64 << 20, paces=FAST)
    with Index.open(memory[0], devices=devices) as index:
        assert devices.settle(WAIT)
        assert given == []
        devices.remove(index.layers.values())
        assert devices.settle(WAIT)
        assert given == [device.memory]
    devices.close()


def test_a_device_without_room_for_itself_is_refused(memory: tuple[Path, np.ndarray]) -> None:
    failing = Failing()
    failing.at, failing.error = "prepare", RuntimeError("80 MiB of stand-in:0 are free")
    devices = Devices([StandIn(before=failing)], 64 << 20, paces=FAST)
    assert devices.places == []
    with Index.open(memory[0], devices=devices) as index:
        found = index.top_k("fc", memory[1][:1], 3)
        assert found.plan.strategy != "device"
        assert "80 MiB of stand-in:0 are free" in str(devices.why_not())


def test_paces_between_those_measured() -> None:
    """A GPU sorts what it finds: many rows take longer than few, by what was measured of both."""
    few, most, other = Pace(1.0, 2.0, 3.0), Pace(3.0, 2.0, 7.0), Pace(0.0, 0.0, 0.0)
    paces = Paces(few, most, other, other, upload=0.0)
    assert paces.finding(1) == paces.finding(10) == few
    assert paces.finding(2048) == most
    assert paces.finding(1029) == Pace(2.0, 2.0, 5.0)
    measured = self_test.measured(StandIn(), 8 << 20, 1 << 20)
    for pace in (measured.nearest, measured.furthest, measured.sums, measured.outputs):
        assert pace.call > 0
    assert measured.upload > 0


def test_values_follow_keys_and_leave_first(
    memory: tuple[Path, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs need values there; without room for them they are the CPU's, and top-k is not."""
    path, keys = memory
    devices = Devices([StandIn()], 64 << 20, paces=FAST)
    where = parse_filter("step > 1")
    with (
        caplog.at_level(logging.INFO, "dualform.engine"),
        Index.open(path, devices=devices) as index,
        Index.open(path, device="cpu") as cpu,
    ):
        layer = index.layers["fc"]
        assert devices.settle(WAIT)
        assert f"the keys of {len(keys)} rows lie on stand-in:0" in caplog.text
        assert f"the values of {len(keys)} rows lie on stand-in:0" in caplog.text
        output = index.dual_output("fc", keys[:2], where=where)
        assert output.plan.strategy == "device"
        devices.places[0].budget = keys.nbytes + 100
        devices.add("again", [layer])  # looks anew at what fits
        assert devices.settle(WAIT)
        (residence,) = devices.residences(layer)
        assert (residence.key_bytes, residence.value_bytes) == (keys.nbytes, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dualform.engine.plan.offer.Offer.streams", lambda *_: False)
            again = index.dual_output("fc", keys[:2], where=where)
            expected = cpu.dual_output("fc", keys[:2], where=where)
        np.testing.assert_allclose(again.values, expected.values, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(output.values, expected.values, rtol=1e-5, atol=1e-3)
        assert index.top_k("fc", keys[:2], 3).plan.strategy == "device"


def test_where_few_rows_remain_the_cpu_looks_at_them(memory: tuple[Path, np.ndarray]) -> None:
    """A call to a device takes a while however few rows it is for: by costs, as everywhere."""
    path, keys = memory
    paces = Paces(*[Pace(2e-4, 1e-13, 1e-14)] * 4, upload=1e-3)
    devices = Devices([StandIn()], 64 << 20, paces=paces)
    devices.cpu_pace = 1.0
    with Index.open(path, devices=devices) as index, Index.open(path, device="cpu") as cpu:
        assert devices.settle(WAIT)
        answered = {}
        for text in ("label >= 0", "step = 1 and label = 2 and step = 3", "label = 2 and step = 1"):
            where = parse_filter(text)
            found = index.top_k("fc", keys[:64], 10, where=where)
            expected = cpu.top_k("fc", keys[:64], 10, where=where)
            np.testing.assert_array_equal(found.rows, expected.rows)
            np.testing.assert_array_equal(found.scores, expected.scores)
            answered[text] = found.plan.strategy
            asked = index.top_k("fc", keys[:64], 10, where=where, strategy="device")
            np.testing.assert_array_equal(asked.rows, expected.rows)
        assert answered["label >= 0"] == "device"
        assert answered["step = 1 and label = 2 and step = 3"] != "device"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda scores, places: (scores, (places + 1) % 2048), "further from float64's"),
        (lambda scores, places: (scores, torch.full_like(places, -1)), "no rows of the memory"),
        (
            lambda scores, places: (scores[:, 1:], places[:, 1:]),
            "left out a row that is surely better",
        ),
    ],
)
def test_a_device_that_finds_other_rows_is_refused(wrong: Any, says: str) -> None:
    """As a kernel might that the driver compiled wrongly."""

    class Wrong(StandIn):
        def nearest(self, keys: torch.Tensor, queries: torch.Tensor, k: int) -> Any:
            more = min(k + 1, len(keys)) if says.startswith("left") else k
            return wrong(*super().nearest(keys, queries, more))

    devices = Devices([Wrong()], 64 << 20, paces=FAST)
    assert devices.places == []
    assert says in str(devices.why_not())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_placement(data: st.DataObject) -> None:
    """Budgets hold; every shard lies in one place at most; keys come before values; what is used
    more, byte for byte, is not left out for what is used less."""
    size = st.integers(0, 20)
    wishes = []
    for _ in range(data.draw(st.integers(0, 4))):
        keys = data.draw(st.lists(size, max_size=5))
        values = [key and data.draw(size) for key in keys]
        wishes.append(Wish(keys, values, use=data.draw(st.sampled_from([0.0, 1.0, 5.0]))))
    budgets = data.draw(st.lists(st.integers(0, 60), max_size=3))
    lots = placed(wishes, budgets)
    again = [
        replace(wish, held={place: lot.shards for place, lot in lot_of.items()})
        for wish, lot_of in zip(wishes, lots, strict=True)
    ]
    whole = [
        {number for lot in lot_of.values() for number in lot.shards}
        == {number for number, size in enumerate(wish.keys) if size}
        for wish, lot_of in zip(wishes, lots, strict=True)
    ]
    if all(whole):
        assert placed(again, budgets) == lots
    for place, budget in enumerate(budgets):
        used = 0
        for wish, lot_of in zip(wishes, lots, strict=True):
            lot = lot_of.get(place)
            for number in () if lot is None else lot.shards:
                assert wish.keys[number]
                used += wish.keys[number] + (wish.values[number] if lot.values else 0)
        assert used <= budget
    for lot_of in lots:
        numbers = [number for lot in lot_of.values() for number in lot.shards]
        assert len(set(numbers)) == len(numbers)
    best = max(range(len(wishes)), key=lambda i: wishes[i].density, default=None)
    if best is not None and sum(wishes[best].keys) <= max(budgets, default=-1):
        assert whole[best]
