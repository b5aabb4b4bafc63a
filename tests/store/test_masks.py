"""Bitmaps that two records share: written once, and read where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualform.store.packing import PLANES, Way, packed, unpack
from dualform.store.recording_masks import RecentMasks, with_mask


def halved(dtype: str, seed: int, zeros: np.ndarray, common: int = 0) -> np.ndarray:
    """Numbers other than the common one where `zeros` is false."""
    kind = np.dtype(f"<u{np.dtype(dtype).itemsize}")
    found = np.random.default_rng(seed).integers(common + 1, np.iinfo(kind).max, len(zeros), kind)
    found[zeros] = common
    return found


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_two_records_with_one_bitmap(data: st.DataObject) -> None:
    """Of any types and common numbers, the second lies in the file without its bitmap."""
    zeros = np.random.default_rng(data.draw(st.integers(0, 9))).random(
        data.draw(st.integers(200, 900))
    )
    mask = zeros < data.draw(st.sampled_from([0.3, 0.5, 0.9]))
    file, masks = b"", RecentMasks()
    compressed = data.draw(st.booleans())
    lengths = []
    for seed in range(3):
        dtype = data.draw(st.sampled_from(["float32", "float16"]))
        common = data.draw(st.sampled_from([0, 0x8000]))
        numbers = halved(dtype, seed, mask, common)
        way = Way(PLANES, common, (data.draw(st.booleans()),) * numbers.itemsize, compressed)
        whole = packed(numbers, way)
        if whole is None:
            continue
        shorter = masks.shorten(whole, numbers.itemsize, len(file))
        assert (shorter is None) == (not lengths)
        found = whole if shorter is None else shorter
        file += found
        lengths.append((len(whole), len(found)))
        if shorter is not None:
            read = lambda place, size, file=file: file[place : place + size]  # noqa: E731
            assert with_mask(shorter, numbers.itemsize, len(numbers), read) == whole
        out = np.empty_like(numbers)
        unpack(whole, PLANES, out)
        assert np.array_equal(out, numbers)
    bitmap = -(-len(mask) // 8)
    assert all(whole - found <= bitmap - 16 for whole, found in lengths[1:])
    if not compressed:
        assert all(whole - found == bitmap - 16 for whole, found in lengths[1:])


def test_another_bitmap_is_written() -> None:
    """And a file that begins has none to name."""
    rng, masks = np.random.default_rng(0), RecentMasks()
    records = [halved("float32", 1, rng.random(1000) < 0.5) for _ in range(6)]
    way = Way(PLANES, 0, (False,) * 4)
    whole = [packed(numbers, way) for numbers in records]
    for data in whole:
        assert data is not None
        assert masks.shorten(data, 4, 0) is None
    assert whole[5] is not None
    assert whole[0] is not None
    assert masks.shorten(whole[5], 4, 0) is not None
    assert masks.shorten(whole[0], 4, 0) is None  # forgotten by now
    masks.clear()
    assert masks.shorten(whole[5], 4, 0) is None


def test_what_is_no_such_record_is_refused() -> None:
    numbers = halved("float32", 0, np.arange(1000) % 3 == 0)
    whole = packed(numbers, Way(PLANES, 0, (False,) * 4))
    masks = RecentMasks()
    assert whole is not None
    masks.shorten(whole, 4, 0)
    data = masks.shorten(whole, 4, 0)
    assert data is not None
    asked = []

    def read(place: int, size: int) -> bytes:
        asked.append((place, size))
        return whole[place : place + size]

    for wrong in (b"", data[:71], b"\xff" * 8 + data[8:], data[:8] + b"\xff" * 8 + data[16:]):
        with pytest.raises(ValueError, match="bytes"):
            with_mask(wrong, 4, 1000, read)
    assert not asked  # nothing is read, and no memory taken, before sizes are seen to fit
    assert with_mask(data, 4, 1000, read) == whole
    assert asked == [(56, 125)]
