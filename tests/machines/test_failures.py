"""Machines that are killed, stopped, or without their files: real processes, real signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from serve.serving import NOT_SERVING, SERVING, Served, array, refusal, serving, tensor

from dualform.engine import Index
from dualform.engine.errors import CancelledError
from dualform.engine.messages.catalog import Catalog
from dualform.engine.messages.versions import version_at
from dualform.machines import asked
from dualform.machines.fleet import Fleet
from dualform.machines.machine import Machine, Refused, Settings, packed, unpacked
from dualform.machines.parts import Part
from dualform.questions import TopKQuestion
from dualform.store import IndexManifest
from dualform.v1 import attribution_pb2 as pb

from .test_ray import Kept

pytestmark = pytest.mark.slow
LAYER = "2"
QUERIES = np.random.default_rng(5).standard_normal((3, 48)).astype(np.float32)
REQUEST = pb.TopKRequest(layer=LAYER, queries=tensor(QUERIES), k=40)


@pytest.fixture(scope="module")
def folder(sharded_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the index that loses files."""
    path = tmp_path_factory.mktemp("losing") / "index"
    shutil.copytree(sharded_index, path)
    return path


@pytest.fixture(scope="module")
def served(fleet: Fleet, folder: Path) -> Iterator[Served]:
    """A server whose shards are with three actors."""
    catalog: Any = partial(Catalog, opener=Kept(fleet, "cpu", 3))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    with serving({"digits": folder}, catalog_type=catalog, metrics=metrics) as found:
        yield found


@pytest.fixture(scope="module")
def expected(sharded_index: Path) -> np.ndarray:
    with Index.open(sharded_index, device="cpu") as index:
        return np.asarray(index.ask(TopKQuestion(LAYER, QUERIES, k=40)).rows)


@pytest.fixture(autouse=True)
def _all_there(fleet: Fleet) -> Iterator[None]:
    yield
    until(lambda: all(machine is not None for machine in fleet.machines()))


def until(met: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)


def process(fleet: Fleet, seat: int) -> int:
    machine = fleet.machines()[seat]
    assert machine is not None
    return machine.process


def test_a_killed_machine_is_replaced_and_nobody_notices(
    served: Served, fleet: Fleet, expected: np.ndarray
) -> None:
    def ask(_: int) -> np.ndarray:
        return array(served.stub.TopK(REQUEST, timeout=60).rows)

    killed = process(fleet, 1)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(ask, number) for number in range(40)]
        until(lambda: sum(each.done() for each in found) > 5)
        os.kill(killed, signal.SIGKILL)
        for each in found:
            np.testing.assert_array_equal(each.result(), expected)
    until(lambda: fleet.machines()[1] is not None and process(fleet, 1) != killed)
    before = fleet.traffic.requests
    np.testing.assert_array_equal(ask(0), expected)
    assert fleet.traffic.requests == before + 3


def test_a_slow_machine_costs_the_caller_its_deadline_and_nobody_else(
    served: Served, fleet: Fleet, expected: np.ndarray
) -> None:
    stopped = process(fleet, 2)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.TopK(REQUEST, timeout=2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        # What is stored of all rows is answered meanwhile, and so is what is known.
        output = pb.DualOutputRequest(layer=LAYER, queries=tensor(QUERIES))
        assert served.stub.DualOutput(output, timeout=30).values.data
        assert served.stub.GetIndex(pb.GetIndexRequest(), timeout=30).index.name == "digits"
    finally:
        os.kill(stopped, signal.SIGCONT)
    np.testing.assert_array_equal(array(served.stub.TopK(REQUEST, timeout=60).rows), expected)
    assert process(fleet, 2) == stopped


def test_a_silent_machine_is_given_up(
    served: Served, fleet: Fleet, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_patience", replace(fleet._patience, silent=3.0))
    stopped = process(fleet, 0)
    os.kill(stopped, signal.SIGSTOP)
    np.testing.assert_array_equal(array(served.stub.TopK(REQUEST, timeout=60).rows), expected)
    until(lambda: fleet.machines()[0] is not None and process(fleet, 0) != stopped)


def exported(served: Served) -> dict[str, float]:
    """What Prometheus finds, by name and labels."""
    assert served.config.metrics is not None
    with urllib.request.urlopen(f"http://{served.config.metrics}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_machines_are_counted(served: Served, fleet: Fleet) -> None:
    served.stub.TopK(REQUEST, timeout=60)
    before = exported(served)
    assert before["dualform_machines"] == fleet.count
    shards = [value for name, value in before.items() if name.startswith("dualform_machine_shards")]
    assert (len(shards), sum(shards)) == (3, 7)
    killed = process(fleet, 1)
    os.kill(killed, signal.SIGKILL)
    served.stub.TopK(REQUEST, timeout=60)
    until(lambda: fleet.machines()[1] is not None and process(fleet, 1) != killed)
    after = exported(served)
    assert after["dualform_machines_lost_total"] == before["dualform_machines_lost_total"] + 1
    for name in ("machines_requests", "machines_sent_bytes", "machines_received_bytes"):
        assert after[f"dualform_{name}_total"] > before[f"dualform_{name}_total"]
    for seat in range(3):
        name = f'dualform_machine_seconds_total{{machine="{seat}"}}'
        assert after[name] >= before[name] > 0
    assert after['dualform_machine_up{machine="1"}'] == 1


def test_a_shard_that_is_nowhere_and_comes_back(
    served: Served, folder: Path, expected: np.ndarray
) -> None:
    manifest = IndexManifest.load(folder)
    layer = manifest.layers[LAYER]
    keys = folder / layer.shards[-1].keys.name
    away = keys.with_suffix(".away")
    keys.rename(away)
    try:
        refused = refusal(lambda: served.stub.TopK(REQUEST, timeout=60))
        assert refused.code is grpc.StatusCode.DATA_LOSS
        assert "rows of layer '2' are nowhere" in refused.message
        assert "partial=True" in refused.message
        request = pb.TopKRequest()
        request.CopyFrom(REQUEST)
        request.partial = True
        answer = served.stub.TopK(request, timeout=60)
        rows = array(answer.rows)
        shards = manifest.spaces[layer.space].shards
        missing = answer.coverage.missing
        assert missing >= shards[-1].rows
        assert answer.coverage.rows == 1920 - missing
        assert rows.min() >= 0
        assert rows.max() < 1920 - missing
        for query, wanted in zip(rows, expected, strict=True):
            left = wanted[wanted < 1920 - missing]
            np.testing.assert_array_equal(query[: len(left)], left)
        until(lambda: served.health("dualform.index.digits") == NOT_SERVING)
        told = served.stub.ListIndexes(pb.ListIndexesRequest()).indexes[0]
        assert told.health == pb.HEALTH_DAMAGED
        assert "rows, of 1 of 3 parts, are nowhere" in told.health_reason
        nowhere = f'dualform_rows_nowhere{{version="{told.version}"}}'
        assert exported(served)[nowhere] >= missing
    finally:
        away.rename(keys)
    # Nobody has to ask for it.
    until(lambda: served.health("dualform.index.digits") == SERVING)
    assert exported(served)[nowhere] == 0
    np.testing.assert_array_equal(array(served.stub.TopK(REQUEST, timeout=60).rows), expected)


def test_a_caller_who_gives_up_ends_what_the_machine_does(sharded_index: Path) -> None:
    machine = Machine(Settings(), 1)
    version = version_at(sharded_index)
    spaces = IndexManifest.load(sharded_index).spaces
    part = Part(version.path, version.name, tuple(((0, len(s.shards)),) for s in spaces), "cpu")
    request = packed(asked.rows_or_sums, TopKQuestion(LAYER, QUERIES, strategy="scan"))
    machine.stop(7)  # which may come before the request does
    refused = unpacked(machine.ask(7, part, request))
    assert isinstance(refused, Refused)
    assert refused.kind is CancelledError
    assert not isinstance(unpacked(machine.ask(8, part, request)), Refused)
