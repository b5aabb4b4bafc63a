"""The log: nobody waits for whoever reads it, and every call and error can be found in it."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import shutil
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from synthetic import make_index

from dualform.client import Client
from dualform.client.errors import DataLossError, InternalError, InvalidArgumentError
from dualform.serve.handlers import _Found
from dualform.serve.logs import Lines, _JsonLines
from dualform.v1 import attribution_pb2 as pb

from .serving import serving, tensor

QUERIES = np.ones((1, 6), np.float32)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(3).standard_normal((40, 6)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("index"), keys, None)


def record(text: str, **more: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": text, **more})


def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    ours, theirs = os.pipe()
    lines = Lines(theirs, most=10)
    done = threading.Event()

    def log() -> None:
        for number in range(2000):  # 200 kB, where a pipe takes 64
            lines.handle(record(f"{number:04} " + "y" * 95))
        done.set()

    threading.Thread(target=log, daemon=True).start()
    assert done.wait(10)
    text = taken(ours, lines)
    lines.handle(record("the last"))
    text += taken(ours, lines)
    numbers = [int(line[:4]) for line in text.splitlines() if line.endswith("y")]
    lost = [
        int(n.replace(",", "")) for n in re.findall("([0-9,]+) lines of the log were lost", text)
    ]
    assert numbers == sorted(set(numbers))
    assert numbers[:10] == list(range(10))
    assert lost
    assert len(numbers) + sum(lost) == 2000
    assert "the last\n" in text
    for end in (ours, theirs):
        os.close(end)


def taken(pipe: int, lines: Lines) -> str:
    """All that waits, read."""
    text = b""
    end = time.monotonic() + 10
    while lines._waiting.unfinished_tasks or select.select([pipe], [], [], 0)[0]:
        assert time.monotonic() < end
        if select.select([pipe], [], [], 0.1)[0]:
            text += os.read(pipe, 1 << 16)
    return text.decode()


def test_a_full_disk_or_a_reader_that_has_gone_is_no_error() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    for descriptor in (os.open("/dev/full", os.O_WRONLY), theirs):
        lines = Lines(descriptor)
        for _ in range(100):
            lines.handle(record("one"))
        lines.flush()
        assert not lines._waiting.unfinished_tasks
        os.close(descriptor)


def test_json_lines_say_when_in_a_way_that_holds_everywhere() -> None:
    now = datetime.now(timezone.utc)
    line = json.loads(_JsonLines().format(record("\udcff", created=now.timestamp())))
    assert line["time"].endswith("Z")
    told = datetime.fromisoformat(line["time"].replace("Z", "+00:00"))
    assert abs((told - now).total_seconds()) <= 0.001


def test_errors_point_to_the_id(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dualform")
    with serving({"i": index}) as served:
        wrong = pb.TopKRequest(layer="nope", k=1, queries=tensor(QUERIES))
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.TopK(wrong, metadata=(("x-request-id", "mine-7"),))
        status = rpc_status.from_call(caught.value)
        named = error_details_pb2.RequestInfo()
        assert [detail.Unpack(named) for detail in status.details].count(True) == 1
        assert named.request_id == "mine-7"
        with Client(served.address) as client, pytest.raises(InvalidArgumentError) as refused:
            client.top_k("fc", QUERIES, k=1, where="nope = 1")
    assert refused.value.request_id
    told = {
        each.facts["id"]: (each.facts["code"], each.facts.get("reason"))
        for each in caplog.records
        if each.name == "dualform.calls"
    }
    assert told["mine-7"] == ("NOT_FOUND", "UNKNOWN_LAYER")
    assert told[refused.value.request_id] == ("INVALID_ARGUMENT", refused.value.reason)


def test_a_bug_outside_a_scan_is_told_as_one_inside(
    index: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "dualform")

    def failing(self: Any) -> Any:
        raise RuntimeError("words that nobody else should read")

    monkeypatch.setattr(_Found, "data", property(failing))
    with (
        serving({"i": index}) as served,
        Client(served.address) as client,
        pytest.raises(InternalError, match=r"internal error [0-9a-f]{8}") as refused,
    ):
        client.top_k("fc", QUERIES, k=1)
    assert "words" not in str(refused.value)
    ticket = str(refused.value).split()[2].rstrip(":")
    assert f"ListIndexes failed [{ticket}]" in caplog.text
    assert f"id={refused.value.request_id} code=INTERNAL" in caplog.text
    assert f"reason=INTERNAL ticket={ticket}" in caplog.text


def test_an_index_in_a_folder_whose_name_is_no_text(
    index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / os.fsdecode(b"n\xff")
    try:
        shutil.copytree(index, folder)
    except OSError:
        pytest.skip("this file system takes names of text alone")
    with serving({"odd": folder, "i": index}) as served, Client(served.address) as client:
        assert client.top_k("fc", QUERIES, k=1, index="odd").rows.shape == (1, 1)
        (file,) = folder.glob("layers/**/*.faiss")
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(DataLossError, match=r"xff|udcff"):
            client.top_k("fc", QUERIES, k=1, index="odd")
        listed = {each.name: each for each in client.indexes()}
        assert listed["i"].health == "serving"
        assert "udcff" in listed["odd"].health_reason
        served.reload()
    # Older grpcio logs a traceback of its own, through asyncio, where two loops are in one process.
    said = [each.getMessage() for each in caplog.records if each.name.startswith("dualform")]
    assert any("udcff" in each for each in said)
    assert all(each.isprintable() for each in said)
