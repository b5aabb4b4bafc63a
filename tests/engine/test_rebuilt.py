"""The trained layer's output by the stored sum of its rows: the scan's, without reading a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import digits
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from dualform.client import parse_filter
from dualform.engine import Index, verify_index
from dualform.engine.errors import DataLossError, InvalidArgumentError
from dualform.index import build_index
from dualform.store import IndexManifest
from dualform.store.files import write_atomic, write_sealed

LAYERS = ("0", "2", "4")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "recording"
    digits.record(path)
    return path


@pytest.fixture
def path(recording: Path, tmp_path: Path) -> Path:
    build_index(recording, tmp_path / "index", shard_rows=500)
    return tmp_path / "index"


def queries(index: Index, layer: str, count: int) -> np.ndarray:
    shape = (count, index.layers[layer].d_in)
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def no_tile() -> bool:
    raise AssertionError("a tile was read")


@pytest.mark.parametrize("count", [1, 3, 70])
def test_it_is_the_scans_answer_without_a_scan(path: Path, count: int) -> None:
    with Index.open(path, device="cpu") as index:
        for layer in LAYERS:
            x = queries(index, layer, count)
            found = index.dual_output(layer, x, stop=no_tile)
            scan = index.dual_output(layer, x, strategy="scan")
            with pytest.raises(AssertionError, match="a tile was read"):
                index.dual_output(layer, x, strategy="scan", stop=no_tile)
            size = np.abs(scan.values) + np.abs(scan.initial) + np.abs(scan.values).mean()
            assert (np.abs(found.values - scan.values) <= 1e-6 * size).all()
            np.testing.assert_array_equal(found.initial, scan.initial)
            assert found.trained is not None
            np.testing.assert_array_equal(found.trained, scan.trained)
            assert found.coverage == scan.coverage
            forced = index.dual_output(layer, x, strategy="rebuilt", stop=no_tile)
            np.testing.assert_array_equal(forced.values, found.values)
            parts = index.dual_output(layer, x, group_by="label")
            total = parts.initial + parts.values.astype(np.float64).sum(1)
            size = np.abs(parts.initial) + np.abs(parts.values.astype(np.float64)).sum(1)
            assert (np.abs(total - found.values) <= 1e-6 * size).all()


def test_it_is_refused_where_it_does_not_apply(path: Path) -> None:
    with Index.open(path, device="cpu") as index:
        x = queries(index, "2", 2)
        label = parse_filter("label = 3")
        for ask in (
            lambda: index.dual_output("2", x, where=label, strategy="rebuilt"),
            lambda: index.dual_output("2", x, group_by="label", strategy="rebuilt"),
            lambda: index.dual_output("2", x, at_step=60, strategy="rebuilt"),
            lambda: index.dual_output("2", x, strategy="certified"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                ask()
            assert caught.value.field == "strategy"


def test_an_index_without_it_scans(path: Path) -> None:
    """Indexes from before it was there have no such entry."""
    with Index.open(path, device="cpu") as index:
        x = queries(index, "2", 2)
        expected = index.dual_output("2", x, strategy="scan")
    data = json.loads((path / "manifest.json").read_bytes())
    del data["xxh3"]
    for layer in data["layers"]:
        (path / layer.pop("rebuilt")["name"]).unlink()
    write_sealed(path / "manifest.json", data)
    with Index.open(path, device="cpu") as index:
        np.testing.assert_array_equal(index.dual_output("2", x).values, expected.values)
        with pytest.raises(InvalidArgumentError, match="layer '2'"):
            index.dual_output("2", x, strategy="rebuilt")
    assert verify_index(path).ok


def test_a_damaged_one_is_refused(path: Path) -> None:
    file = path / "layers/2/rebuilt.safetensors"
    data = bytearray(file.read_bytes())
    data[-20] ^= 0x10
    file.write_bytes(bytes(data))
    with Index.open(path, device="cpu") as index:
        index.dual_output("0", queries(index, "0", 1))
        with pytest.raises(DataLossError, match=r"layers/2/rebuilt\.safetensors"):
            index.dual_output("2", queries(index, "2", 1))
    report = verify_index(path)
    assert [damage.file for damage in report.damage] == ["layers/2/rebuilt.safetensors"]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("parameter", ["2.weight", "2.bias"])
def test_verify_names_one_that_is_not_the_rows(
    recording: Path, path: Path, tmp_path: Path, parameter: str, closed: bool
) -> None:
    """Whole, sealed and wrong: one number of it is off. Also where there are no final weights."""
    manifest = IndexManifest.load(path)
    published = manifest.layers["2"]
    assert published.rebuilt is not None
    tensors = load_file(path / published.rebuilt.name)
    tensors[parameter].flat[7] += 0.02 * np.abs(tensors[parameter]).max()
    entry = write_atomic(path / published.rebuilt.name, save(tensors))
    wrong = replace(published, rebuilt=replace(entry, name=published.rebuilt.name))
    if not closed:
        wrong = replace(wrong, final=None)
    replace(manifest, layers={**manifest.layers, "2": wrong}).save(path)
    report = verify_index(path)
    assert [layer.ok for layer in report.layers] == [True, False, True]
    assert f"the stored sum of the rows is not theirs: {parameter} is off" in report.layers[1].note
    assert (report.layers[1].weight_error is not None) == closed


def test_stored_weights_are_mapped_not_copied(path: Path) -> None:
    with Index.open(path, device="cpu") as index:
        index.dual_output("2", queries(index, "2", 1))
        entry = index.layers["2"].manifest.rebuilt
        assert entry is not None
        weight = index._states.read(entry)["2.weight"]
        assert weight.dtype == torch.float64
        assert weight.data_ptr() == index._states.read(entry)["2.weight"].data_ptr()
        maps = Path("/proc/self/maps").read_text()
        assert str(path / entry.name) in maps
