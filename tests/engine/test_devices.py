"""Answers by devices, held against the CPU's: host memory stands in for GPUs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standing_in import FAST, SLOW, WAIT, Failing, repeats, tf32
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.stand_in import StandIn
from dualform.engine.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from dualform.engine.topk import on_devices

ORDERS = ("largest", "smallest", "absolute")


@pytest.fixture(scope="module")
def two() -> Devices:
    """Two devices, tested and taken for fast, that tests share; budgets are theirs to set."""
    return Devices([StandIn(0), StandIn(1)], 256 << 20, paces=FAST)


def test_rows_between_shards_that_devices_leave_out_are_kept(tmp_path: Path) -> None:
    """Shards with keys that are not finite are the CPU's: what its sketches offer first, and give
    up, is not what devices found in the shard between."""
    rng = np.random.default_rng(0)
    keys = np.maximum(rng.standard_normal((1500, 8)) @ rng.standard_normal((8, 300)), 0)
    keys = keys.astype(np.float32)
    keys[7, 3], keys[1100, 0] = np.nan, np.inf
    queries = rng.standard_normal((3, 300)).astype(np.float32)
    path = make_index(tmp_path, keys, np.ones((1500, 1), np.float32), shard_rows=500)
    devices = Devices([StandIn(0)], 256 << 20, paces=FAST)
    finite = np.isfinite(keys).all(axis=1)
    scores = reference.exact_scores(np.where(finite[:, None], keys, 0), queries)
    with Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        found = index.top_k("fc", queries, 20, strategy="device")
    for query in range(len(queries)):
        expected, _ = reference.top_k(scores[query], 20, "largest", finite)
        np.testing.assert_array_equal(found.rows[query], expected)


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """A memory full of ties, near-ties, zeros and keys that are not finite, in part on devices."""
    rows, d = draw(st.integers(1, 80)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["integers", "normal", "near-ties", "scales"]))
    if kind == "integers":
        keys = rng.integers(-2, 3, (rows, d)).astype(np.float32)
    elif kind == "normal":
        keys = rng.standard_normal((rows, d)).astype(np.float32)
    elif kind == "near-ties":
        keys = (1 + rng.integers(-2, 3, (rows, d)) * 2.0**-23).astype(np.float32)
    else:
        scale = 10.0 ** rng.integers(-44, 38, (rows, 1))
        keys = (rng.standard_normal((rows, d)) * scale).astype(np.float32)
    if draw(st.booleans()):
        keys[rng.random(rows) < 0.03, 0] = rng.choice([np.nan, np.inf])
    sure = kind != "scales" and bool(np.isfinite(keys).all())  # others may be the CPU's alone
    queries = np.concatenate([keys[rng.integers(0, rows, 2)], np.zeros((1, d), np.float32)])
    return {
        "keys": keys,
        "queries": queries[np.isfinite(queries).all(axis=1)],
        "label": rng.integers(0, 3, rows),
        "k": draw(st.sampled_from([1, 2, 7, 100])),
        "order": draw(st.sampled_from(ORDERS)),
        "shard_rows": draw(st.sampled_from([1, 7, 1000])),
        "budgets": [draw(st.sampled_from([0, 4 * d * rows // 3, 1 << 20])) for _ in range(2)],
        "most": draw(st.sampled_from([8, 100, 2048])),
        "strategy": "device" if sure else "auto",
        "stream": draw(st.booleans()),
    }


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_whatever_lies_on_devices_rows_and_scores_are_the_exact_ones(
    two: Devices, case: dict
) -> None:
    keys, queries, k, order = case["keys"], case["queries"], case["k"], case["order"]
    finite, label = np.isfinite(keys).all(axis=1), case["label"]
    scores = reference.exact_scores(np.where(finite[:, None], keys, 0), queries)
    for place, budget in zip(two.places, case["budgets"], strict=True):
        place.budget = budget
    k = min(k, case["most"] - 1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_devices, "_SLACK", 1)
        patch.setattr(on_devices, "MAX_K", case["most"])
        if not case["stream"]:
            patch.setattr("dualform.engine.plan.offer.Offer.streams", lambda *_: False)
        path = make_index(
            Path(folder),
            keys,
            None,
            rows_per_step=40,
            shard_rows=case["shard_rows"],
            label=label,
        )
        with Index.open(path, devices=two) as index:
            assert two.settle(WAIT)
            for where in (None, "label = 1", "label != 1"):
                mask = finite & {None: True, "label = 1": label == 1}.get(where, label != 1)
                hits = index.top_k(
                    "fc",
                    queries,
                    k,
                    order=order,
                    where=None if where is None else parse_filter(where),
                    strategy=case["strategy"],
                )
                for i, row in enumerate(scores):
                    rows, best = reference.top_k(row, k, order, mask)
                    np.testing.assert_array_equal(hits.rows[i], rows)
                    np.testing.assert_array_equal(hits.scores[i], best)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    return repeats(tmp_path_factory.mktemp("memory"))


@pytest.fixture
def cpu(memory: tuple[Path, np.ndarray]) -> Iterator[Index]:
    with Index.open(memory[0], device="cpu") as index:
        yield index


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [1, 10, 500, 1900])
def test_many_queries_get_what_the_cpu_gives(
    two: Devices, memory: tuple[Path, np.ndarray], cpu: Index, order: str, k: int
) -> None:
    path, keys = memory
    for place in two.places:
        place.budget = 800_000  # half of the keys' bytes, and a little
    queries = np.concatenate([keys[:40], np.zeros((1, 40), np.float32)])
    with Index.open(path, devices=two) as index:
        assert two.settle(WAIT)
        found = index.top_k("fc", queries, k, order=order, strategy="device")
        expected = cpu.top_k("fc", queries, k, order=order, strategy="scan")
        alone = index.top_k("fc", queries[:1], k, order=order, strategy="device")
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(alone.rows[0], expected.rows[0])
    assert found.plan.strategy == "device"


def test_what_devices_do_not_do_is_said(
    two: Devices, memory: tuple[Path, np.ndarray], cpu: Index
) -> None:
    path, keys = memory
    with Index.open(path, devices=two) as index:
        assert two.settle(WAIT)
        for ask, words in (
            ({"group_by": "label"}, "without group_by"),
            ({"k": 2020}, "at most 2,016"),
        ):
            with pytest.raises(InvalidArgumentError, match=words):
                index.top_k("fc", keys[:1], **{"k": 3, "strategy": "device", **ask})
    with pytest.raises(InvalidArgumentError, match="device is cpu"):
        cpu.top_k("fc", keys[:1], 3, strategy="device")


def test_the_faster_one_answers(memory: tuple[Path, np.ndarray]) -> None:
    path, keys = memory
    for paces, answers in ((FAST, True), (SLOW, False)):
        devices = Devices([StandIn()], 64 << 20, paces=paces)
        with Index.open(path, devices=devices) as index:
            assert devices.settle(WAIT)
            plan = index.top_k("fc", keys[:4], 10).plan
        assert (plan.strategy == "device") == answers
        assert plan.costs[plan.strategy] == min(plan.costs.values())
        devices.close()


def test_a_device_that_rounds_is_refused_with_the_reason(
    memory: tuple[Path, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    path, keys = memory
    with caplog.at_level(logging.WARNING, "dualform.engine"):
        devices = Devices([StandIn(0, rounded=tf32), StandIn(1)], 64 << 20, paces=FAST)
    assert [place.name for place in devices.places] == ["stand-in:1"]
    assert "times further from float64's than allowed" in str(devices.states()[0].refused)
    assert "stand-in:0 (host memory) is not used, the CPU answers" in caplog.text
    with Index.open(path, devices=Devices([StandIn(rounded=tf32)], paces=FAST)) as index:
        assert index.top_k("fc", keys[:1], 3).plan.strategy != "device"


def test_a_device_that_fails_while_it_is_asked_is_asked_no_more(
    memory: tuple[Path, np.ndarray], cpu: Index, caplog: pytest.LogCaptureFixture
) -> None:
    path, keys = memory
    failing = Failing()
    devices = Devices([StandIn(0, before=failing)], 64 << 20, paces=FAST)
    with Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        assert index.top_k("fc", keys[:3], 5).plan.strategy == "device"
        failing.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        with caplog.at_level(logging.WARNING, "dualform.engine"):
            found = index.top_k("fc", keys[:3], 5)
        np.testing.assert_array_equal(found.rows, cpu.top_k("fc", keys[:3], 5).rows)
        assert found.plan.strategy != "device"
        assert "illegal memory access" in str(devices.states()[0].refused)
        assert "stand-in:0 is not used any more" in caplog.text
        failing.error = None
        with pytest.raises(InvalidArgumentError, match="illegal memory access"):
            index.top_k("fc", keys[:3], 5, strategy="device")


def test_whoever_asked_for_the_device_is_told_that_it_failed(
    memory: tuple[Path, np.ndarray],
) -> None:
    path, keys = memory
    failing = Failing()
    devices = Devices([StandIn(0, before=failing)], 64 << 20, paces=FAST)
    with Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        failing.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        with pytest.raises(ResourceExhaustedError, match="not enough memory") as refused:
            index.top_k("fc", keys[:3], 5, strategy="device")
        assert refused.value.reason == "OUT_OF_MEMORY"
        failing.error = RuntimeError("CUDA error: unspecified launch failure")
        with pytest.raises(FailedPreconditionError, match="launch failure") as failed:
            index.top_k("fc", keys[:3], 5, strategy="device")
        assert failed.value.reason == "DEVICE_FAILED"


def test_a_device_out_of_memory_holds_less_and_stays(
    memory: tuple[Path, np.ndarray], cpu: Index
) -> None:
    path, keys = memory
    failing = Failing()
    devices = Devices([StandIn(0, before=failing)], 64 << 20, paces=FAST)
    with Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        before = devices.states()[0]
        failing.error = RuntimeError("StandardGpuResources: alloc fail type FlatData dev 0")
        found = index.top_k("fc", keys[:3], 5)
        np.testing.assert_array_equal(found.rows, cpu.top_k("fc", keys[:3], 5).rows)
        failing.error = None
        assert devices.settle(WAIT)
        after = devices.states()[0]
        assert after.refused is None
        assert after.used <= after.budget < before.used
        assert index.top_k("fc", keys[:3], 5, strategy="device").plan.strategy == "device"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(case=cases(), absolute=st.booleans())
def test_sums_and_outputs_are_float64s(two: Devices, case: dict, absolute: bool) -> None:
    """Within the rule: 1e-6 of the sum of absolute terms."""
    keys, queries = np.nan_to_num(case["keys"], posinf=1.0).clip(-1e9, 1e9), case["queries"]
    queries = queries.clip(-1e9, 1e9)
    label, rng = case["label"], np.random.default_rng(1)
    values = rng.standard_normal((len(keys), 3)).astype(np.float32)
    for place, budget in zip(two.places, case["budgets"], strict=True):
        place.budget = budget
    weights = queries.astype(np.float64) @ keys.astype(np.float64).T
    sizes = np.abs(queries.astype(np.float64)) @ np.abs(keys.astype(np.float64)).T
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not case["stream"]:
            patch.setattr("dualform.engine.plan.offer.Offer.streams", lambda *_: False)
        shard_rows = case["shard_rows"]
        path = make_index(
            Path(folder), keys, values, rows_per_step=40, shard_rows=shard_rows, label=label
        )
        with Index.open(path, devices=two) as index:
            assert two.settle(WAIT)
            for where, mask in (("label != 1", label != 1), (None, np.ones(len(keys), bool))):
                ask = {"where": None if where is None else parse_filter(where)}
                sums = index.sums(
                    "fc", queries, "label", absolute=absolute, strategy="device", **ask
                )
                assert sums.plan.strategy == "device"
                added = np.abs(weights) if absolute else weights
                for place, group in enumerate(sums.groups.to_pylist()):
                    inside = mask & (label == group)
                    off = np.abs(sums.values[:, place] - added[:, inside].sum(axis=1))
                    assert (off <= 1e-6 * sizes[:, inside].sum(axis=1) + 1e-30).all()
                output = index.dual_output(
                    "fc", queries, strategy="device", group_by="label", max_residual=np.inf, **ask
                )
                assert output.plan.strategy == "device"
                for place, group in enumerate(output.groups.to_pylist()):
                    inside = mask & (label == group)
                    expected = 0.1 * weights[:, inside] @ values[inside].astype(np.float64)
                    most = 0.1 * sizes[:, inside] @ np.abs(values[inside]).astype(np.float64)
                    assert (np.abs(output.values[:, place] - expected) <= 2e-6 * most + 1e-30).all()


def test_outputs_without_groups_and_at_a_step(
    two: Devices, memory: tuple[Path, np.ndarray], cpu: Index
) -> None:
    path, keys = memory
    for place in two.places:
        place.budget = 700_000  # keys of all rows, values of some
    with Index.open(path, devices=two) as index:
        assert two.settle(WAIT)
        for ask in ({}, {"at_step": 2}, {"where": parse_filter("step > 1 and label < 3")}):
            found = index.dual_output("fc", keys[:9], strategy="device", **ask)
            expected = cpu.dual_output("fc", keys[:9], strategy="scan", **ask)
            np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=1e-3)
            np.testing.assert_array_equal(found.initial, expected.initial)


def test_many_groups_are_added_up_row_by_row(
    two: Devices, tmp_path: Path, memory: tuple[Path, np.ndarray]
) -> None:
    keys = memory[1][:3000]
    ids = np.arange(3000) % 700
    path = make_index(tmp_path, keys, None, rows_per_step=1500, shard_rows=1000, example=ids)
    for place in two.places:
        place.budget = 1 << 20
    with Index.open(path, devices=two) as index:
        assert two.settle(WAIT)
        sums = index.sums("fc", keys[:5], "example", strategy="device")
        best = index.top_groups("fc", keys[:5], "example", 3, strategy="device")
    weights = keys[:5].astype(np.float64) @ keys.astype(np.float64).T
    expected = np.stack([weights[:, ids == each].sum(axis=1) for each in range(700)], axis=1)
    np.testing.assert_allclose(sums.values, expected, atol=1e-4)
    np.testing.assert_array_equal(
        np.array(best.groups.to_pylist()).reshape(5, 3), np.argsort(-expected, axis=1)[:, :3]
    )


def test_sums_and_outputs_go_on_without_a_device_that_fails(
    memory: tuple[Path, np.ndarray], cpu: Index
) -> None:
    path, keys = memory
    failing = Failing()
    failing.at = "current"
    devices = Devices([StandIn(0, before=failing)], 64 << 20, paces=FAST)
    with Index.open(path, devices=devices) as index:
        assert devices.settle(WAIT)
        ask = {"where": parse_filter("step > 1")}
        assert index.dual_output("fc", keys[:2], **ask).plan.strategy == "device"
        failing.error = RuntimeError("CUDA error: device-side assert triggered")
        found = index.dual_output("fc", keys[:2], **ask)
        expected = cpu.dual_output("fc", keys[:2], strategy="scan", **ask)
        np.testing.assert_array_equal(found.values, expected.values)
        assert "device-side assert" in str(devices.states()[0].refused)
        assert index.sums("fc", keys[:2], "label").plan.strategy != "device"
