"""Encodings of keys and values: what torch, NumPy and FAISS make of the same bytes."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from synthetic import make_recording, stored

from dualform.store.encoding import ENCODINGS, HALVES, encoding
from dualform.store.errors import DamagedError
from dualform.store.recording import Recording


@pytest.mark.parametrize("name", HALVES)
def test_every_number_is_widened_to_the_float32_that_equals_it(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, name)).float().numpy()
    found = encoding(name).widen(bits.view(encoding(name).stored))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("name", HALVES)
def test_numbers_are_narrowed_as_torch_does(name: str) -> None:
    """Random bits: numbers of all sizes, infinite ones, NaN; and what lies between two others."""
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 18, np.uint32)
    between = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    numbers = np.concatenate([bits, between, between - 1, between + 1]).view(np.float32)
    expected = torch.from_numpy(numbers).to(getattr(torch, name)).float().numpy()
    found = HALVES[name].widen(HALVES[name].narrow(numbers))
    np.testing.assert_array_equal(found, expected)
    sure = ~np.isnan(found)
    np.testing.assert_array_equal(np.signbit(found[sure]), np.signbit(expected[sure]))


def test_numbers_have_torch_dtypes_of_so_many_bytes() -> None:
    for name, each in ENCODINGS.items():
        assert each.name == name
        assert each.row_bytes(7) == each.numbers(7) * getattr(torch, each.dtype).itemsize
    with pytest.raises(ValueError, match="no encoding 'int4'; there are float32"):
        encoding("int4")


@pytest.mark.parametrize("name", [n for n, kind in ENCODINGS.items() if "faiss" in kind.keys_file])
def test_faiss_and_numpy_read_the_files(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(-8, 9, (300, 12)).astype(np.float32)
    kind, data = encoding(name), stored(rows, name)
    keys, values = tmp_path / "keys.faiss", tmp_path / "values.npy"
    keys.write_bytes(kind.keys_header(12, 300) + data)
    values.write_bytes(kind.values_header(300, 12) + data)
    assert keys.stat().st_size == kind.keys_bytes(12, 300)
    assert values.stat().st_size == kind.values_bytes(300, 12)
    index = faiss.read_index(str(keys))
    assert (index.ntotal, index.d, index.metric_type) == (300, 12, faiss.METRIC_INNER_PRODUCT)
    np.testing.assert_array_equal(index.reconstruct_n(0, 300), rows)
    scores, _ = index.search(rows[:5], 1)
    np.testing.assert_array_equal(scores[:, 0], (rows[:5] @ rows.T).max(axis=1))
    np.testing.assert_array_equal(kind.widen(np.load(values), 12), rows)


def test_places_of_ones() -> None:
    kind = encoding("one_hot")
    places = np.array([[2], [-1], [0]], "<i4")
    np.testing.assert_array_equal(kind.widen(places, 3), [[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    assert kind.row_bytes(50_000) == 4
    for wrong in (3, -2):
        with pytest.raises(ValueError, match="in rows of 3 numbers"):
            kind.widen(np.array([[wrong]], "<i4"), 3)


def test_places_beyond_the_row_are_damage(tmp_path: Path) -> None:
    rows = np.eye(6, dtype=np.float32)
    path = make_recording(tmp_path / "r", rows, rows[:, :2], 3, 0.1, 0.0, {}, ("one_hot",))
    with Recording.open(path) as recording:
        _, second = recording.passes("fc")
        keys = np.empty((3, 6), np.float32)
        recording.read_keys(second, keys)
        np.testing.assert_array_equal(keys, rows[3:])
        with pytest.raises(DamagedError, match="is not one_hot"):
            recording.read_keys(second, np.empty((3, 5), np.float32))


@pytest.mark.parametrize("name", HALVES)
def test_a_recording_gives_float32_and_what_is_stored(tmp_path: Path, name: str) -> None:
    rows = np.random.default_rng(1).integers(-8, 9, (40, 6)).astype(np.float32)
    path = make_recording(tmp_path / "r", rows, rows[:, :2], 10, 0.1, 0.0, {}, (name, "float32"))
    with Recording.open(path) as recording:
        for number, record in enumerate(recording.passes("fc")):
            part = rows[10 * number : 10 * number + 10]
            expected = name if number % 2 == 0 else "float32"
            assert record.values is not None
            assert record.keys.encoding == record.values.encoding == expected
            assert record.keys.nbytes == part.size * (2 if expected == name else 4)
            keys, values = np.empty((10, 6), np.float32), np.empty((10, 2), np.float32)
            recording.read_keys(record, keys)
            recording.read_values(record, values)
            np.testing.assert_array_equal(keys, part)
            np.testing.assert_array_equal(values, part[:, :2])
            assert recording.stored_keys(record).tobytes() == stored(part, expected)
            with pytest.raises(ValueError, match="240 bytes"):
                recording.read_keys(record, np.empty((10, 6), np.float16))
