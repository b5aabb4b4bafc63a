"""Packed files: the plain file comes back, and what a hostile one says is refused in words."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dualform.store import packed_rows
from dualform.store.encoding import ENCODINGS, FLOAT32
from dualform.store.packed_rows import PackedRows, Rows, block_rows, pack_rows, share_left

D, COUNT = 200, 500
FIELDS = list(packed_rows._HEADER.names or ())


def plain_file(rows: np.ndarray, name: str = "float32") -> tuple[bytes, Rows]:
    kind = ENCODINGS[name]
    header = kind.keys_header(D, len(rows))
    return header + rows.tobytes(), Rows.of(kind, D, len(rows), header)


def zeros_among(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((COUNT, D)) * (rng.random((COUNT, D)) < 0.5)).astype("<f4")


def made(plain: bytes, shape: Rows) -> bytes:
    parts = pack_rows(memoryview(plain), shape)
    assert parts is not None
    return b"".join(parts)


def unpacked(data: bytes, shape: Rows) -> bytes:
    return shape.header + b"".join(
        rows.tobytes() for rows in PackedRows(memoryview(data), shape).all()
    )


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("float32", zeros_among()),
        ("float32", np.random.default_rng(1).choice([-0.0, 0.0, np.nan, 1.5], (COUNT, D))),
        ("float32", np.zeros((1, D))),
        ("bfloat16", np.random.default_rng(2).integers(0, 9, (COUNT, D))),
        ("float16", np.random.default_rng(3).integers(0, 3, (COUNT, D))),
        ("one_hot", np.random.default_rng(4).integers(-1, D, (70_000, 1))),
    ],
)
def test_the_plain_file_comes_back_and_each_block_alone(name: str, rows: np.ndarray) -> None:
    rows = rows.astype(ENCODINGS[name].stored)
    plain, shape = plain_file(rows, name)
    data = made(plain, shape)
    assert len(data) < 15 / 16 * len(plain)
    assert unpacked(data, shape) == plain
    found = PackedRows(memoryview(data), shape)
    assert found.blocks == -(-len(rows) // block_rows(shape.row_bytes))
    for number in reversed(range(found.blocks)):
        block = np.empty((found.rows_of(number), shape.row_bytes), np.uint8)
        found.unpack(number, block)
        first = number * found.block_rows
        assert block.tobytes() == rows[first : first + len(block)].tobytes()


def test_what_does_not_shrink_stays_plain() -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(4 * D * COUNT), "<f4").reshape(COUNT, D)
    plain, shape = plain_file(noise)
    assert pack_rows(memoryview(plain), shape) is None
    assert share_left(noise.view(np.uint8).reshape(COUNT, -1), 4) == 1.0


def test_what_is_expected_is_what_comes() -> None:
    rows = zeros_among()
    plain, shape = plain_file(rows)
    expected = share_left(rows[::3].copy().view(np.uint8).reshape(-1, 4 * D), 4)
    assert expected == pytest.approx(len(made(plain, shape)) / len(plain), rel=0.05)


@pytest.mark.parametrize(
    "field", [name for name in FIELDS if name not in ("plain_xxh3", "packing")]
)
@pytest.mark.parametrize("value", [0, 3, 2**40, 2**64 - 1])
def test_a_header_that_lies_is_refused_before_memory_is_taken(field: str, value: int) -> None:
    plain, shape = plain_file(zeros_among())
    data = bytearray(made(plain, shape))
    header = np.frombuffer(data, packed_rows._HEADER, 1)
    header.setflags(write=True)
    header[field] = b"other" if field == "magic" else value
    tracemalloc.start()
    # Fewer rows to a block make another table, which then lies.
    with pytest.raises(ValueError, match=f"{field} |begin|table"):
        PackedRows(memoryview(data), shape)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_tables_that_lie_are_refused() -> None:
    plain, shape = plain_file(zeros_among())
    data = made(plain, shape)
    start, blocks = packed_rows._HEADER.itemsize, PackedRows(memoryview(data), shape).blocks
    for place, value in ((0, 0), (0, 2**63), (1, 5), (2, 2**64 - 1), (blocks - 1, 2**50)):
        hurt = bytearray(data)
        np.frombuffer(hurt, "<u8", blocks, start)[place] = value
        with pytest.raises(ValueError, match="its table"):
            PackedRows(memoryview(hurt), shape)
    for size in (0, 10, start, start + 8, len(data) - 1):
        with pytest.raises(ValueError, match=r"hold no|its table"):
            PackedRows(memoryview(data[:size]), shape)


def test_a_block_becomes_its_rows_or_is_refused() -> None:
    """Bombs: frames that hold more, or less; parts of other sizes; other packings."""
    rows = np.repeat(np.random.default_rng(5).standard_normal((50, 1)), D, axis=1).astype("<f4")
    plain, shape = plain_file(np.tile(rows, (10, 1)))
    data = made(plain, shape)
    packed = PackedRows(memoryview(data), shape)
    bomb = packed_rows.packed(
        np.zeros(50_000_000, "<u4"), packed_rows.measured(np.zeros(999, "<u4"))
    )
    assert bomb is not None
    out = np.empty((packed.rows_of(0), shape.row_bytes), np.uint8)
    assert len(bomb) < out.nbytes
    for block in (bomb, b"x" * 99, data[200:400]):
        tracemalloc.start()
        hurt = _with_first_block(data, packed, block)
        with pytest.raises(ValueError, match=r"^block 0: "):
            PackedRows(memoryview(hurt), shape).unpack(0, out)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
        tracemalloc.stop()


def _with_first_block(data: bytes, packed: PackedRows, block: bytes) -> bytes:
    start = packed_rows._HEADER.itemsize
    ends = np.frombuffer(data, "<u8", packed.blocks, start).astype(np.int64)
    shift = len(block) - int(ends[0])
    rest = data[start + 8 * packed.blocks + int(ends[0]) :]
    return data[:start] + (ends + shift).astype("<u8").tobytes() + block + rest


def test_rows_that_are_not_the_plain_files_are_told() -> None:
    plain, shape = plain_file(zeros_among())
    data = bytearray(made(plain, shape))
    header = np.frombuffer(data, packed_rows._HEADER, 1)
    header["plain_xxh3"] = 1
    with pytest.raises(ValueError, match="digest of the plain file"):
        unpacked(bytes(data), shape)


def test_any_bytes_are_rows_or_refused() -> None:
    plain, shape = plain_file(zeros_among())
    data, rng = made(plain, shape), np.random.default_rng(7)
    for _ in range(200):
        hurt = bytearray(data)
        hurt[int(rng.integers(0, min(len(hurt), 2000)))] ^= int(rng.integers(1, 256))
        try:
            assert len(unpacked(bytes(hurt), shape)) == len(plain)
        except ValueError:
            continue


def test_float32_keys_are_the_usual_case() -> None:
    assert block_rows(FLOAT32.row_bytes(800)) == 20
    assert block_rows(10 << 20) == 1
