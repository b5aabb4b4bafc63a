"""Payloads: read by id from the disk, a few at a time, whatever all of them weigh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm
from synthetic import make_recording

from dualform.engine import Index
from dualform.engine.errors import DataLossError
from dualform.index import build_index
from dualform.store import DamagedError, IndexManifest
from dualform.store.files import FileEntry, digest, read_json, write_sealed
from dualform.store.recording import Recording
from dualform.store.recording_writer import Examples

MIB = 1 << 20


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(MIB)


def record(path: Path, *batches: tuple[list[Any], list[bytes | str]]) -> None:
    rows = np.ones((1, 2), np.float32)
    examples = [
        Examples(
            ids,
            ["text" if isinstance(each, str) else "bytes" for each in payloads],
            [each.encode() if isinstance(each, str) else each for each in payloads],
        )
        for ids, payloads in batches
    ]
    make_recording(path, rows, rows, 1, 0.1, 0.0, {}, examples=examples)


def older(path: Path, rows: list[tuple[object, str, bytes]]) -> None:
    """An index of version 1: the payloads are in the table."""
    table = pa.table(dict(zip(("id", "kind", "data"), zip(*rows, strict=True), strict=True)))
    pq.write_table(table, path / "examples.parquet")
    (path / "examples.bin").unlink()
    data = (path / "examples.parquet").read_bytes()
    manifest = read_json(path / "manifest.json", "")
    for name in ("xxh3", "payloads"):
        manifest.pop(name)
    manifest["version"] = 1
    manifest["examples"] = FileEntry("examples.parquet", len(data), digest(data)).to_json()
    write_sealed(path / "manifest.json", manifest)


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("ids", [[7, 3, 2**62], ["seven", "three", "ü"]])
def test_the_last_payload_of_an_id_counts(
    tmp_path: Path, ids: list[int | str], version: int
) -> None:
    record(tmp_path / "r", (ids[:2], [b"one", "naïve"]), ([ids[0], ids[2]], [b"\0new", b""]))
    build_index(tmp_path / "r", tmp_path / "index")
    if version == 1:
        rows = [(ids[0], "bytes", b"one"), (ids[1], "text", "naïve".encode())]
        older(tmp_path / "index", [*rows, (ids[0], "bytes", b"\0new"), (ids[2], "bytes", b"")])
    with Index.open(tmp_path / "index", device="cpu") as index:
        unknown = 5 if isinstance(ids[0], int) else "five"
        expected = ["naïve", b"\0new", None, b"", "naïve"]
        assert index.examples([ids[1], ids[0], unknown, ids[2], ids[1]]) == expected
        index.verify_files()
    manifest = json.loads((tmp_path / "index/manifest.json").read_bytes())
    assert manifest["version"] == version


def test_a_flipped_byte_is_found_where_it_is_read(tmp_path: Path) -> None:
    record(tmp_path / "r", ([1, 2], [b"first", b"second"]))
    build_index(tmp_path / "r", tmp_path / "index")
    file = tmp_path / "index/examples.bin"
    file.write_bytes(file.read_bytes().replace(b"second", b"sEcond"))
    with Index.open(tmp_path / "index", device="cpu") as index:
        assert index.examples([1]) == [b"first"]
        with pytest.raises(DataLossError, match=r"examples\.bin.*byte 5"):
            index.examples([2])
        file.unlink()
        with pytest.raises(DataLossError, match=r"examples\.bin: missing"):
            index.examples([1])
        with pytest.raises(DataLossError, match=r"examples\.bin"):
            index.verify_files()
        assert index.damage is None  # no other answer is made of them


def hostile(old: bool) -> list[pa.Table]:
    """Tables of payloads whose columns are of no type that they may have, or say what can't be."""
    good: dict[str, Any] = {"id": pa.array([1, 2]), "kind": pa.array(["text", "bytes"])}
    if old:
        good |= {"data": pa.array([b"a", b"b"])}
    else:
        digests = pa.array([int(digest(each), 16) for each in (b"a", b"b")], pa.uint64())
        good |= {"offset": pa.array([0, 1]), "bytes": pa.array([1, 1]), "xxh3": digests}
    nested = pa.array([[1], [2]])
    for _ in range(110):
        nested = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), nested)
    wrong = [
        pa.array([0.0, 1.0]),
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([0, 2**31 - 1], pa.date32()),
        pa.array([0, 2**62], pa.duration("ms")),
        pa.array([1, 2]).cast(pa.decimal128(38, 0)),
        pa.array([1, 2], pa.timestamp("us", "no/where")),
        pa.array([None, 1]),
        pa.array([1, 2], pa.int8()),
        pa.array([[1], [2]]),
        nested,
    ]
    tables = [
        pa.table({**good, name: column})
        for name in good
        for column in wrong
        if column.type != good[name].type or column.null_count
    ]
    tables.append(pa.table({**good, "kind": pa.array(["text", "x"])}))
    if not old:
        tables.append(pa.table({**good, "id": pa.array([1, 1])}))
    return tables


@pytest.mark.parametrize("old", [False, True], ids=["table", "older index"])
def test_a_table_that_lies_is_damage(tmp_path: Path, old: bool) -> None:
    record(tmp_path / "r", ([1, 2], ["a", b"b"]))
    build_index(tmp_path / "r", tmp_path / "index")
    file = tmp_path / "index/examples.parquet"
    for table in hostile(old):
        pq.write_table(table, file)
        data = file.read_bytes()
        manifest = read_json(tmp_path / "index/manifest.json", "")
        del manifest["xxh3"]
        manifest["examples"] = FileEntry(file.name, len(data), digest(data)).to_json()
        if old:
            manifest["payloads"] = None
        write_sealed(tmp_path / "index/manifest.json", manifest)
        with (
            Index.open(tmp_path / "index", device="cpu") as index,
            pytest.raises(DataLossError, match=r"examples\.parquet: not payloads"),
        ):
            index.examples([1, 2])


def test_a_recordings_table_that_lies_is_damage(tmp_path: Path) -> None:
    record(tmp_path / "r", ([1, 2], ["a", b"b"]), ([3], [b"c"]))
    file = tmp_path / "r/examples/000001.parquet"
    words = pa.table({"id": ["3"], "kind": ["bytes"], "data": pa.array([b"c"])})
    recording = Recording.open(tmp_path / "r")
    (segment,) = recording.segments
    for table in (*hostile(old=True), words):
        pq.write_table(table, file)
        data = file.read_bytes()
        entries = [*segment.examples[:-1], FileEntry(file.name, len(data), digest(data))]
        replace(segment, examples=entries).save(tmp_path / "r/segments", recording.manifest.layers)
        with pytest.raises(DamagedError, match=r"000001\.parquet: not payloads"):
            build_index(tmp_path / "r", tmp_path / "index")


MEASURE = """
import re, sys, time
from pathlib import Path
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
if sys.argv[1] == "build":
    from dualform.index import build_index
    before = peak()
    build_index(sys.argv[2], sys.argv[3])
else:
    from dualform.engine import Index
    with Index.open(sys.argv[3], device="cpu") as index:
        index.examples([])
        before = peak()
        assert len(index.examples([17])[0]) == 1 << 20
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_that_of_a_few_payloads(tmp_path: Path) -> None:
    """60 or 240 MiB of payloads of one call: a build holds some of them, a question its own."""

    def grown(what: str, count: int) -> int:
        done = warm.run(MEASURE, what, tmp_path / f"r{count}", tmp_path / f"index{count}")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    for count in (60, 240):
        record(tmp_path / f"r{count}", (list(range(count)), [payload(i) for i in range(count)]))
    few, many = (grown("build", count) for count in (60, 240))
    assert many - few < 40
    assert grown("ask", 240) < 8
    assert IndexManifest.load(tmp_path / "index240").payloads is not None
    with Index.open(tmp_path / "index240", device="cpu") as index:
        assert index.examples([159, 0]) == [payload(159), payload(0)]
        assert index.example_bytes([1, 2, 999]) == 2 * MIB
