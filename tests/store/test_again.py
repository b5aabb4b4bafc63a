"""Rows that come again: written once, and read where they came again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualform.optimizers import SGDSettings
from dualform.store import DamagedError, recording_records
from dualform.store.files import digest, write_sealed
from dualform.store.ledger import LedgerRow
from dualform.store.packing import PLAIN, PLANES, ZSTD
from dualform.store.ranks import Rank
from dualform.store.recording import LayerSpec, Recording, RecordingManifest
from dualform.store.recording_again import ADDRESS, AGAIN, Again, EarlierRows
from dualform.store.recording_format import read_sealed
from dualform.store.recording_ranks import open_recordings
from dualform.store.recording_writer import Record, RecordingWriter, StepPass
from dualform.store.row_metadata import Block

WIDTH = 160  # 640 bytes, or 320
LAYER = LayerSpec("a", "linear", WIDTH, 1, "a.weight", None, "float32")


def record(array: np.ndarray, rows: int = 0, encoding: str = "float32") -> Record:
    size = -(-array.nbytes // 4096) * 4096
    memory = np.zeros(size + 4096, np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][:size]
    aligned[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return Record(memoryview(aligned), array.nbytes, None, encoding, rows)


def write(
    path: Path,
    passes: list[np.ndarray],
    encoding: str = "float32",
    commit_every: int = 2,
    rank: Rank | None = None,
) -> None:
    """Each of these keys in a step of its own."""
    manifest = RecordingManifest("SGD", {"a": LAYER}, True, "test", ranks=rank, packed=True)
    writer = RecordingWriter(path, manifest)
    writer.write_initial({"a.weight": np.zeros((1, WIDTH), np.float32)})
    for step, keys in enumerate(passes):
        values = record(np.zeros((len(keys), 1), np.float32))
        passed = StepPass("a", len(keys), 0, record(keys, len(keys), encoding), values)
        ledger = [LedgerRow(step, "a.weight", SGDSettings(0.1))]
        writer.append([passed], [Block(step, (len(keys),), {})], ledger)
        if step % commit_every == commit_every - 1:
            writer.commit()
    writer.close({"a.weight": np.zeros((1, WIDTH), np.float32)})


def keys_of(path: Path) -> list[np.ndarray]:
    with Recording.open(path) as recording:
        return [recording.stored_keys(item) for item in recording.passes("a")]


def packings(path: Path) -> list[str]:
    with Recording.open(path) as recording:
        return [item.keys.packing for item in recording.passes("a")]


def rows_of(seed: int, count: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def check(path: Path, passes: list[np.ndarray]) -> None:
    for found, expected in zip(keys_of(path), passes, strict=True):
        assert found.tobytes() == expected.tobytes()


def test_rows_of_earlier_segments_are_read_where_they_lie(tmp_path: Path) -> None:
    """Noise, of which packing leaves 0.8: what is shorter comes of rows alone."""
    rows, rng = rows_of(0), np.random.default_rng(1)
    passes = [rows, *(rows[rng.permutation(100)] for _ in range(7))]
    passes[3] = np.concatenate([passes[3][:60], rows_of(5, 30), passes[3][60:]])
    passes[6] = passes[3][::-1].copy()  # rows of a record that has addresses itself
    write(tmp_path / "r", passes)
    assert packings(tmp_path / "r") == [PLANES] + 7 * [AGAIN]
    check(tmp_path / "r", passes)
    size = sum(file.stat().st_size for file in tmp_path.glob("r/segments/*.bin"))
    assert size < 0.9 * 130 * 4 * WIDTH + 7 * 100 * 16 + 4 * 4096
    backwards = Recording.open(tmp_path / "r")
    for item, expected in list(zip(backwards.passes("a"), passes, strict=True))[::-1]:
        assert backwards.stored_keys(item).tobytes() == expected.tobytes()


def test_ranks_refer_to_rows_of_their_own(tmp_path: Path) -> None:
    """The recordings of a run's processes, read as one."""
    rng = np.random.default_rng(0)
    of_ranks = []
    for rank in range(2):
        rows = rows_of(rank)
        of_ranks.append([rows, *(rows[rng.permutation(100)] for _ in range(3))])
        write(tmp_path / f"rank-{rank}", of_ranks[rank], "float32", 1 + rank, Rank(rank, 2))
    with open_recordings([tmp_path]) as recording:
        found = recording.passes("a")
        assert [item.keys.packing for item in found] == 2 * [PLANES] + 6 * [AGAIN]
        for number, item in list(enumerate(found))[::-1]:
            expected = of_ranks[number % 2][number // 2]
            assert recording.stored_keys(item).tobytes() == expected.tobytes()


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_rows_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Rows drawn with repetition, equal ones in one record, special numbers, any commits."""
    special = np.array([0, 0x80000000, 0x7FC00000, 0x7F800001, 0xFFC0BEEF, 0xFF800000], "<u4")
    bank = rows_of(0, 12)
    bank[:6] = 0
    bank[:6, 3] = special.view("<f4")  # all of them zeros, but for one number
    picks = st.lists(st.integers(0, 11), min_size=1, max_size=40)
    passes = [bank[pick] for pick in data.draw(st.lists(picks, min_size=1, max_size=6))]
    encoding = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    if encoding != "float32":
        half = np.dtype("<u2" if encoding == "bfloat16" else "<f2")
        passes = [keys.view(half)[:, :WIDTH].copy() for keys in passes]
    path = tmp_path_factory.mktemp("r") / "r"
    write(path, passes, encoding, data.draw(st.integers(1, 3)))
    check(path, passes)


def test_without_room_rows_are_written_again(tmp_path: Path) -> None:
    """And a layer of which hardly any row comes again gives up its room to others."""
    earlier = EarlierRows(50 * (640 + 256))
    rows = rows_of(0).view(np.uint8)
    assert earlier.find("a", "float32", rows, (0, 0)) is None
    found = earlier.find("a", "float32", rows, (0, 100_000))
    assert found is not None
    addresses, new = found
    assert new.tolist() == list(range(50, 100))
    assert addresses["offset"].tolist() == [0] * 50 + [100_000] * 50
    assert addresses["row"].tolist() == 2 * list(range(50))
    other = rows_of(1).view(np.uint8)
    assert earlier.find("b", "float32", other, (0, 200_000)) is None
    assert earlier.find("b", "float32", other, (0, 300_000)) is None  # none was remembered
    earlier.begin_segment()
    assert earlier.looks_at("a", "float32", 640)
    assert not earlier.looks_at("b", "float32", 640)  # no room, and none came again
    for seed in range(2, 4):  # nothing of a comes again any more
        earlier.find("a", "float32", rows_of(seed).view(np.uint8), (1, seed))
    earlier.begin_segment()
    assert not earlier.looks_at("a", "float32", 640)
    assert earlier.find("c", "float32", other, (2, 0)) is None
    found = earlier.find("c", "float32", other, (2, 1))
    assert found is not None
    assert len(found[1]) == 50  # the room that was a's
    assert not earlier.looks_at("c", "float32", 255)  # rows that are too short for it


def test_equal_digests_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are compared: one that has another's digest is written."""
    import xxhash

    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda _: b"same")
    earlier, rows = EarlierRows(), rows_of(0, 2).view(np.uint8)
    assert earlier.find("a", "float32", rows, (0, 0)) is None
    found = earlier.find("a", "float32", rows, (0, 1000))
    assert found is not None
    assert found[1].tolist() == [1]
    assert found[0].tolist() == [(0, 0, 0), (0, 0, 1000)]


def test_a_reader_keeps_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_records, "MOST_KEPT", 100_000)  # a record is 64,000 bytes
    banks = [rows_of(seed) for seed in range(5)]
    rng = np.random.default_rng(0)
    mixed = [np.stack([banks[b][r] for b, r in rng.integers(0, (5, 100), (80, 2))]) for _ in "ab"]
    write(tmp_path / "r", [*banks, *mixed])
    assert packings(tmp_path / "r")[-2:] == [AGAIN, AGAIN]
    check(tmp_path / "r", [*banks, *mixed])
    recording = Recording.open(tmp_path / "r")
    for item in recording.passes("a"):
        recording.stored_keys(item)
        assert recording._records._kept_bytes <= 100_000
        assert recording._records._kept_bytes == sum(
            kept.nbytes for kept in recording._records._kept.values()
        )


def test_a_damaged_earlier_record_is_named(tmp_path: Path) -> None:
    rows = rows_of(0)
    write(tmp_path / "r", [rows, rows_of(1), rows[::-1].copy()], commit_every=1)
    file = tmp_path / "r" / "segments" / "000000.bin"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(bytes(content))
    recording = Recording.open(tmp_path / "r")
    with pytest.raises(DamagedError, match=r"000000\.bin: the record at byte 0 is not the one"):
        recording.stored_keys(recording.passes("a")[2])


def test_damaged_new_rows_are_named(tmp_path: Path) -> None:
    """Those of a record with addresses, asked for by a later one."""
    rows, more = rows_of(0), rows_of(1, 40)
    mixed = np.concatenate([rows[:50], more])
    write(tmp_path / "r", [rows, mixed, more[::-1].copy()], commit_every=1)
    assert packings(tmp_path / "r")[1:] == [AGAIN, AGAIN]
    file = tmp_path / "r" / "segments" / "000001.bin"
    original = file.read_bytes()
    span = Recording.open(tmp_path / "r").passes("a")[1].keys
    for place in (span.packed - 1, 0, 8, 16, 24, 40):
        content = bytearray(original)
        content[span.offset + place] ^= 1
        file.write_bytes(bytes(content))
        recording = Recording.open(tmp_path / "r")
        with pytest.raises(DamagedError, match=r"000001\.bin: the record at byte"):
            recording.stored_keys(recording.passes("a")[1])
        if place < 32 or place == span.packed - 1:
            with pytest.raises(DamagedError, match=r"000001\.bin: the record at byte"):
                recording.stored_keys(recording.passes("a")[2])


def _address(name: str, value: int) -> Callable[[Again], Again]:
    def change(again: Again) -> Again:
        addresses = again.addresses.copy()
        addresses[name][0] = value
        return again._replace(addresses=addresses)

    return change


LIES: dict[str, tuple[Callable[[Again], Any], str]] = {
    "no such segment": (_address("segment", 9), "names rows at byte 0 of segment 9, where"),
    "no such record": (_address("offset", 8), "names rows at byte 8 of segment 0, where"),
    "a later record": (_address("segment", 3), "names rows at byte 0 of segment 3, where"),
    "no such row": (_address("row", 2**32 - 1), "names row 4,294,967,295 of 100"),
    "more new rows than rows": (lambda a: a._replace(new=10**9), "can't be unpacked"),
    "other new rows": (lambda a: a._replace(new=1), "is not the one|has other new rows|of 1"),
    "of another packing": (lambda a: a._replace(packing=ZSTD), "unpacked|other new rows|ZSTD"),
    "another digest": (lambda a: a._replace(xxh3="0" * 16), "other new rows"),
}


@pytest.mark.parametrize("lie", LIES)
def test_addresses_that_lie(tmp_path: Path, lie: str) -> None:
    rows = rows_of(0)
    passes = [rows, rows_of(1), np.concatenate([rows[:90], rows_of(2, 10)]), rows[::-1].copy()]
    write(tmp_path / "r", passes, commit_every=1)
    with Recording.open(tmp_path / "r") as recording:
        item = recording.passes("a")[2]
        again = recording._records._again(2, item.keys, item.rows)
    change, says = LIES[lie]
    changed = change(again).to_bytes()
    file = tmp_path / "r" / "segments" / "000002.bin"
    file.write_bytes(changed + bytes(-len(changed) % 4096))
    table = read_sealed(file.with_suffix(".json"))
    table.pop("xxh3")
    table["bin_bytes"] = file.stat().st_size
    table["passes"]["keys_bytes"] = [len(changed)]
    table["passes"]["values_offset"] = [0]
    write_sealed(file.with_suffix(".json"), table)
    recording = Recording.open(tmp_path / "r")
    with pytest.raises(DamagedError, match=rf"000002\.bin: the record at byte 0.*({says})"):
        recording.stored_keys(recording.passes("a")[2])


def test_bytes_that_are_no_addresses() -> None:
    addresses = np.zeros(10, ADDRESS)
    data = Again(addresses, 0, PLAIN, digest(b""), memoryview(b"")).to_bytes()
    assert Again.read(data, 10).addresses.tobytes() == addresses.tobytes()
    for wrong in (b"", data[:31], data[:-1], data[:24] + b"\xff" * 8 + data[32:]):
        with pytest.raises(ValueError, match=r"bytes|ZSTD"):
            Again.read(wrong, 10)
    with pytest.raises(ValueError, match=r"ZSTD"):
        Again.read(data, 11)
    with pytest.raises(ValueError, match="Corrupt"):
        Again.read(data, 10**6)
