"""Which rows have the same key: what the build finds, and what a reader refuses to believe."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_index

from dualform.engine import Index
from dualform.index.equal_keys import EqualKeysWriter, digests
from dualform.store import DamagedError, IndexManifest
from dualform.store.files import digest, write_atomic
from dualform.store.index import EqualKeys, read_first

EQUAL = "layers/fc/equal.npy"


def reference(keys: np.ndarray) -> np.ndarray:
    """For each key of float32 [rows, d] the first with the same bytes, by a dictionary."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(key.tobytes(), place) for place, key in enumerate(keys)])


def in_order(path: Path, keys: np.ndarray) -> np.ndarray:
    """The keys, by row id, as they lie in the index."""
    with Index.open(path, device="cpu") as index:
        return keys[index.layers["fc"].space.ids]


def found(path: Path) -> np.ndarray | None:
    published = IndexManifest.load(path).layers["fc"].equal_keys
    if published is None:
        assert not (path / EQUAL).exists()
        return None
    assert published.first.name == EQUAL
    first = np.load(path / EQUAL)
    assert first.dtype == np.int32
    assert published.distinct == np.count_nonzero(first == np.arange(len(first)))
    return first


@pytest.mark.parametrize("shard_rows", [1, 40, 1000])
def test_equal_keys_are_found(tmp_path: Path, shard_rows: int) -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((60, 7)).astype(np.float32)[rng.integers(0, 60, 300)]
    label = rng.integers(0, 3, 300).tolist()
    path = make_index(tmp_path, keys, None, shard_rows=shard_rows, label=label)
    np.testing.assert_array_equal(found(path), reference(in_order(path, keys)))


def test_bytes_decide(tmp_path: Path) -> None:
    nan, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    rows = [[0.0, 1], [-0.0, 1], [nan, 1], [other, 1], [np.inf, 1], [nan, 1], [0.0, 1]]
    keys = np.array(rows * 3, np.float32)
    path = make_index(tmp_path, keys, None, shard_rows=5)
    first = found(path)
    assert first is not None
    assert first[:7].tolist() == [0, 1, 2, 3, 4, 2, 0]
    np.testing.assert_array_equal(first, reference(keys))


def test_one_key_for_all_rows(tmp_path: Path) -> None:
    first = found(make_index(tmp_path, np.ones((50, 3), np.float32), None, shard_rows=20))
    assert first is not None
    assert not first.any()


@pytest.mark.parametrize(("rows", "distinct"), [(40, 40), (40, 21), (1, 1), (41, 21)])
def test_keys_that_seldom_come_again_have_no_file(tmp_path: Path, rows: int, distinct: int) -> None:
    keys = np.random.default_rng(1).standard_normal((distinct, 3)).astype(np.float32)
    keys = keys[np.arange(rows) % distinct]
    assert found(make_index(tmp_path, keys, None, shard_rows=15)) is None


def test_no_more_keys_are_remembered_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = np.random.default_rng(1).standard_normal((30, 3)).astype(np.float32)
    keys = keys[np.arange(300) % 30]
    for most in (29, 30):
        monkeypatch.setattr("dualform.index.plan.MOST_KEYS", most)
        path = make_index(tmp_path / str(most), keys, None, shard_rows=20)
        assert (found(path) is None) == (most == 29)


def test_giving_up_forgets_at_once(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).standard_normal((60, 3)).astype(np.float32)
    writer = EqualKeysWriter(tmp_path, "equal.npy", 100, 1000)
    writer.add(digests(keys[:40]))
    assert writer.pays
    assert (tmp_path / "equal.npy").exists()
    writer.add(digests(keys[20:]))
    assert not writer.pays
    assert list(tmp_path.iterdir()) == []
    assert writer.result() is None


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=20), min_size=1, max_size=8))
def test_any_shards_of_any_keys(shards: list[list[int]]) -> None:
    base = np.random.default_rng(3).standard_normal((13, 4)).astype(np.float32)
    which = [key for shard in shards for key in shard]
    with tempfile.TemporaryDirectory() as folder:
        writer = EqualKeysWriter(Path(folder), "equal.npy", len(which), 1000)
        for shard in shards:
            if writer.pays:
                writer.add(digests(base[shard]))
        written = writer.result()
        assert (written is not None) == (len(set(which)) <= len(which) // 2)
        if written is not None:
            first = read_first(Path(folder), written, len(which))
            np.testing.assert_array_equal(first, reference(base[which]))


def _published(directory: Path, first: np.ndarray, distinct: int) -> EqualKeys:
    np.save(directory / "equal.npy", first)
    data = (directory / "equal.npy").read_bytes()
    return EqualKeys(distinct, write_atomic(directory / "equal.npy", data))


@pytest.mark.parametrize(
    ("first", "distinct", "what"),
    [
        ([0, 1, 2, 1], 3, ""),
        ([0, 1, 3, 1], 2, "not the first"),
        ([0, 0, 1, 1], 1, "not the first"),
        ([0, 1, -1, 1], 2, "not the first"),
        ([0, 1, 2, 9], 3, "not the first"),
        ([0, 1, 2, 1], 4, "not as many"),
        ([0, 1, 1], 2, "header"),
        ([[0, 1, 1, 1]], 2, "header"),
        ([0.0, 1.0, 1.0, 1.0], 2, "header"),
        (np.array([0, 1, 1, 1], np.int64), 2, "header"),
    ],
)
def test_a_whole_file_with_wrong_content_is_refused(
    tmp_path: Path, first: list[int] | np.ndarray, distinct: int, what: str
) -> None:
    array = np.array(first)
    if array.dtype == np.int64 and isinstance(first, list):
        array = array.astype(np.int32)
    written = _published(tmp_path, array, distinct)
    if not what:
        np.testing.assert_array_equal(read_first(tmp_path, written, 4), array)
        return
    with pytest.raises(DamagedError, match=rf"equal\.npy: .*{what}"):
        read_first(tmp_path, written, 4)


def test_bytes_beyond_the_rows_are_refused(tmp_path: Path) -> None:
    written = _published(tmp_path, np.array([0, 1, 1], np.int32), 2)
    data = (tmp_path / "equal.npy").read_bytes() + b"\0\0\0\0"
    (tmp_path / "equal.npy").write_bytes(data)
    longer = replace(written.first, bytes=len(data), xxh3=digest(data))
    with pytest.raises(DamagedError, match="header"):
        read_first(tmp_path, replace(written, first=longer), 3)
