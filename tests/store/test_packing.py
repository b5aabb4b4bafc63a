"""Packing: what comes back is what went in, bit for bit, and what is no packing is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dualform.store import packing
from dualform.store.encoding import ENCODINGS
from dualform.store.packing import AS_IT_IS, PLANES, ZSTD, Way, measured, packed, unpack

DTYPES = sorted({str(kind.stored) for kind in ENCODINGS.values()})
SPECIAL = {
    "float32": [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC0BEEF, 1],
    "float16": [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE0F, 1],
    "uint16": [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFBE, 1],  # bfloat16
    "int32": [0, 0xFFFFFFFF, 1, 50_000],
}


def there_and_back(numbers: np.ndarray, way: Way) -> int | None:
    """Bytes packed; what comes back has been compared."""
    data = packed(numbers, way)
    if data is None:
        return None
    out = np.empty_like(numbers)
    unpack(data, way.packing, out)
    assert out.tobytes() == numbers.tobytes()
    return len(data)


def unsigned(name: str) -> np.dtype[np.generic]:
    return np.dtype(f"<u{np.dtype(name).itemsize}")


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_numbers_come_back(dtype: str, data: st.DataObject) -> None:
    """Any bits of any length, some of them common; by any way, right for them or not."""
    kind = unsigned(dtype)
    most = int(np.iinfo(kind).max)
    common = data.draw(st.sampled_from(SPECIAL[dtype]) | st.integers(0, most))
    elements = st.just(common) | st.sampled_from(SPECIAL[dtype]) | st.integers(0, most)
    shape = data.draw(arrays.array_shapes(max_dims=2, max_side=40, min_side=0))
    numbers = data.draw(arrays.arrays(kind, shape, elements=elements)).view(dtype)
    planes = st.tuples(*[st.booleans()] * kind.itemsize)
    ways = [
        measured(numbers),
        Way(ZSTD),
        Way(PLANES, data.draw(st.none() | st.just(common)), data.draw(planes), True),
    ]
    repeated = np.tile(numbers.reshape(-1), 30)  # long enough that packing is shorter
    for way in ways:
        there_and_back(numbers, way)
        there_and_back(repeated, way)


def halves(numbers: np.ndarray, name: str) -> np.ndarray:
    kind = ENCODINGS[name]
    return kind.narrow(numbers) if hasattr(kind, "narrow") else numbers


@pytest.mark.parametrize(
    ("name", "most"), [("float32", 0.6), ("bfloat16", 0.55), ("float16", 0.62)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_after_relu_about_half_is_left(name: str, most: float, sign: int) -> None:
    """Numbers that are zero half the time, of either sign: values are negated, so zeros are too."""
    rng = np.random.default_rng(0)
    numbers = sign * np.maximum(rng.standard_normal((128, 800)).astype(np.float32), 0)
    stored = halves(numbers, name)
    way = measured(stored)
    assert way.packing == PLANES
    size = there_and_back(stored, way)
    assert size is not None
    # Half of the numbers, of whose mantissas 23, 7 or 10 bits are noise; and a bit for each.
    noise = {"float32": 23, "bfloat16": 7, "float16": 10}[name]
    least = (0.5 * noise + 1) / (8 * stored.itemsize)
    assert least < size / stored.nbytes < most


def test_pixels_that_come_again() -> None:
    """A background that is not zero, and few different numbers."""
    rng = np.random.default_rng(0)
    strokes = np.kron(rng.random((64, 7, 7)) < 0.2, np.ones((1, 4, 4)))
    pixels = (255 * strokes).astype(np.uint8)
    numbers = ((pixels - np.float32(33.3)) / np.float32(78.5)).reshape(64, 784).astype(np.float32)
    size = there_and_back(numbers, measured(numbers))
    assert size is not None
    assert size < 0.1 * numbers.nbytes


def test_noise_stays_as_it_is() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32, endpoint=False)
    assert measured(bits.view(np.float32)) is AS_IT_IS
    assert packed(bits.view(np.float32), AS_IT_IS) is None
    assert packed(bits, Way(PLANES, None, (True,) * 4, True)) is None  # no shorter


def test_too_many_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros(1000, np.float32)
    way = measured(zeros)
    data = packed(zeros, way)
    assert data is not None
    monkeypatch.setattr(packing, "MOST_BYTES", 3999)
    assert packed(zeros, way) is None
    with pytest.raises(ValueError, match="at most 3,999"):
        unpack(data, way.packing, np.empty(1000, np.float32))


def planes_of(numbers: np.ndarray, common: int, compressed: bool = False) -> bytes:
    data = packed(numbers, Way(PLANES, common, (compressed,) * numbers.itemsize, compressed))
    assert data is not None
    return data


def sparse(n: int = 1000) -> np.ndarray:
    numbers = np.zeros(n, np.float32)
    numbers[::9] = np.random.default_rng(0).standard_normal(len(numbers[::9]))
    return numbers


LIES = {
    "cut off in the header": lambda data: data[:30],
    "cut off": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "another common number": lambda data: b"\0\0\0\0\1" + data[5:],
    "more numbers than there are": lambda data: data[:8] + b"\xff" * 8 + data[16:],
    "fewer numbers": lambda data: data[:8] + b"\1" + data[9:],
    "a long bitmap": lambda data: data[:16] + b"\xff" * 8 + data[24:],
    "sizes that wrap around": lambda data: data[:24] + b"\xff" * 7 + b"\x7f" + data[32:],
    "another bitmap": lambda data: data[:56] + bytes([data[56] ^ 0xF0]) + data[57:],
    "a bit behind the last number": lambda data: (
        data[:180] + bytes([data[180] ^ 0x90]) + data[181:]
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_packing_is_refused(lie: str) -> None:
    numbers = sparse(996)
    data = LIES[lie](planes_of(numbers, 0))
    with pytest.raises(ValueError, match=r"bytes|numbers|ZSTD"):
        unpack(data, PLANES, np.empty_like(numbers))


def test_another_packing_is_refused() -> None:
    with pytest.raises(ValueError, match="no packing 'lz4'"):
        unpack(b"1234", "lz4", np.empty(1, np.float32))


@pytest.mark.parametrize("way", [Way(ZSTD), Way(PLANES, 0, (True,) * 4, True)])
def test_flipped_bits_are_refused_or_seen_by_the_digest(way: Way) -> None:
    """No other exception, and nothing beyond the memory that it goes to."""
    numbers = sparse()
    data = packed(numbers, way)
    assert data is not None
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        try:
            unpack(bytes(changed), way.packing, np.empty_like(numbers))
        except ValueError:
            refused += 1
    assert refused > 40


def test_a_frame_that_says_it_holds_more_takes_no_memory() -> None:
    """A bomb: a gigabyte of zeros in a few kB, where 4,000 bytes are expected."""
    codec = pa.Codec("zstd", compression_level=1)
    bomb = codec.compress(bytes(64 << 20), asbytes=True)
    assert len(bomb) < 20_000
    out = np.empty(1000, np.float32)
    header = np.array([0, 1000, 0, len(bomb), 0, 0, 0], "<u8").tobytes()
    pool = pa.default_memory_pool()
    most = pool.max_memory()
    tracemalloc.start()
    for data, name in ((bomb, ZSTD), (header + bomb, PLANES)):
        with pytest.raises(ValueError, match=r"too small|Corrupt|parts of"):
            unpack(data, name, out)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert pool.max_memory() - most < 1 << 20
