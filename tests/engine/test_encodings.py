"""Answers from 16-bit keys and values are those from the float32 numbers that equal them."""

from __future__ import annotations

import json
from pathlib import Path

import faiss
import numpy as np
import pytest
from synthetic import make_index, stored

from dualform.engine import Index, verify_index
from dualform.engine.errors import InvalidArgumentError
from dualform.store import IndexManifest
from dualform.store.encoding import encoding

ROWS, D_IN, D_OUT = 1500, 300, 4


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def narrow(array: np.ndarray) -> np.ndarray:
        """Cut to numbers that bfloat16 and float16 both hold: 8 digits, of a middling size."""
        digits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        found = digits.view(np.float32)
        return np.where(np.abs(found) < 1e-3, np.float32(0), found)

    keys = narrow(rng.standard_normal((ROWS, 8)) @ rng.standard_normal((8, D_IN)))
    keys[7, 3], keys[900, 0] = np.nan, np.inf
    return {
        "keys": keys,
        "values": narrow(rng.standard_normal((ROWS, D_OUT))),
        "queries": rng.standard_normal((3, D_IN)).astype(np.float32),
    }


def build(directory: Path, arrays: dict[str, np.ndarray], *encodings: str) -> Path:
    label = [t % 5 for t in range(ROWS)]
    return make_index(
        directory,
        arrays["keys"],
        arrays["values"],
        rows_per_step=50,
        shard_rows=400,
        encodings=encodings or ("float32",),
        label=label,
    )


def answers(path: Path, queries: np.ndarray) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    sketched = IndexManifest.load(path).layers["fc"].directions is not None
    with Index.open(path, device="cpu") as index:
        for strategy in ("certified", "scan", "auto") if sketched else ("scan", "auto"):
            hits = index.top_k("fc", queries, 20, strategy=strategy)
            found[f"rows {strategy}"], found[f"scores {strategy}"] = hits.rows, hits.scores
        hits = index.top_k("fc", queries, 5, rank_by="contribution", unit=2)
        found["contributions"] = hits.scores
        found["sums"] = index.sums("fc", queries, "label").values
        found["absolute"] = index.sums("fc", queries, "label", absolute=True).values
        found["output"] = index.dual_output("fc", queries, at_step=17).values
        found["whole"] = index.dual_output("fc", queries, group_by="label").values
        chunks = [chunk.weights for chunk in index.stream_weights("fc", queries)]
        found["weights"] = np.concatenate(chunks, axis=1)
        index.verify_files()
    return found


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_answers_are_those_of_the_same_numbers_in_float32(
    tmp_path: Path, arrays: dict[str, np.ndarray], name: str
) -> None:
    wide, narrow = build(tmp_path / "wide", arrays), build(tmp_path / "narrow", arrays, name)
    expected, found = answers(wide, arrays["queries"]), answers(narrow, arrays["queries"])
    for what, each in expected.items():
        np.testing.assert_array_equal(found[what], each, err_msg=what)
    exact = arrays["keys"].astype(np.float64) @ arrays["queries"].T.astype(np.float64)
    np.testing.assert_array_equal(found["weights"], exact.T.astype(np.float32))
    with Index.open(narrow, device="cpu") as index, pytest.raises(InvalidArgumentError, match=name):
        index.top_k("fc", arrays["queries"], 3, strategy="flat")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_what_was_recorded_in_16_bits_takes_half_the_disk(
    tmp_path: Path, arrays: dict[str, np.ndarray], name: str
) -> None:
    path = build(tmp_path, arrays, name)
    manifest = IndexManifest.load(path)
    layer = manifest.layers["fc"]
    assert layer.encodings == (name, name)
    assert json.loads((path / "manifest.json").read_bytes())["version"] == 2
    order = np.argsort(np.arange(400) % 5, kind="stable")
    shard = layer.shards[0]
    assert shard.values is not None
    assert shard.keys.bytes == 81 + 400 * D_IN * 2
    assert (path / shard.keys.name).read_bytes()[81:] == stored(arrays["keys"][:400][order], name)
    keys = faiss.read_index(str(path / shard.keys.name)).reconstruct_n(0, 400)
    np.testing.assert_array_equal(keys, arrays["keys"][:400][order])
    values = encoding(name).widen(np.load(path / shard.values.name), D_OUT)
    np.testing.assert_array_equal(values, arrays["values"][:400][order])
    assert verify_index(path).damage == ()


def test_passes_of_several_encodings_are_indexed_in_float32(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    # A NaN has many bytes, and torch chooses others when it narrows one.
    arrays = {**arrays, "keys": np.nan_to_num(arrays["keys"], nan=1, posinf=2)}
    wide = build(tmp_path / "wide", arrays)
    mixed = build(tmp_path / "mixed", arrays, "bfloat16", "float32", "float16")
    assert json.loads((mixed / "manifest.json").read_bytes())["version"] == 1
    for file in wide.rglob("*"):
        if file.is_file():
            assert (mixed / file.relative_to(wide)).read_bytes() == file.read_bytes(), file


def test_places_of_ones_answer_as_the_rows_that_they_stand_for(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    """Keys with a single 1, as an embedding's: 4 bytes each, and rows of zeros among them."""
    places = np.random.default_rng(2).integers(-1, D_IN, ROWS)
    ones = (places[:, None] == np.arange(D_IN)).astype(np.float32)
    arrays = {**arrays, "keys": ones}
    wide, narrow = build(tmp_path / "wide", arrays), build(tmp_path / "narrow", arrays, "one_hot")
    expected, found = answers(wide, arrays["queries"]), answers(narrow, arrays["queries"])
    for what, answer in found.items():
        np.testing.assert_array_equal(answer, expected[what], err_msg=what)
    np.testing.assert_array_equal(
        found["weights"], np.where(places >= 0, arrays["queries"][:, places], 0)
    )
    layer = IndexManifest.load(narrow).layers["fc"]
    assert layer.encodings == ("one_hot", "float32")
    assert layer.directions is None
    assert [shard.keys.name[-8:] for shard in layer.shards] == ["keys.npy"] * 4
    order = np.argsort(np.arange(400) % 5, kind="stable")
    stored_places = np.load(narrow / layer.shards[0].keys.name)
    np.testing.assert_array_equal(stored_places[:, 0], places[:400][order])
    assert json.loads((narrow / "manifest.json").read_bytes())["version"] == 2
    report = verify_index(narrow)
    assert report.damage == ()
    assert report.ok
    with (
        Index.open(narrow, device="cpu") as index,
        pytest.raises(InvalidArgumentError, match="one_hot"),
    ):
        index.top_k("fc", arrays["queries"], 3, strategy="flat")
