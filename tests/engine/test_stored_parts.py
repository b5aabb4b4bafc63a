"""Outputs from stored parts: the scan's and a float64 loop's, without reading a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import digits
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from dualform.client import Client, parse_filter
from dualform.engine import Index, verify_index
from dualform.engine.errors import DataLossError, InvalidArgumentError
from dualform.engine.memory.shards import Shard
from dualform.engine.totals import followed
from dualform.index import build_index
from dualform.store import IndexManifest
from dualform.store.files import FileEntry, write_atomic, write_sealed
from dualform.store.recording import Recording

LAYERS = ("0", "2", "4")
LR, DECAY, MOMENTUM = 2e-3, 0.1, 0.9


@pytest.fixture(scope="module")
def sgd_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sgd") / "recording"
    digits.record(path)
    return path


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def recording(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(f"{request.param}_recording"))


@pytest.fixture(scope="module")
def published(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards end inside of steps."""
    path = tmp_path_factory.mktemp("parts") / "index"
    build_index(recording, path, shard_rows=500, parts=["label", "task"])
    return path


@pytest.fixture
def path(recording: Path, tmp_path: Path) -> Path:
    build_index(recording, tmp_path / "index", shard_rows=500, parts=["label"])
    return tmp_path / "index"


def queries(layer: str, count: int) -> np.ndarray:
    d_in = 64 if layer == "0" else 48
    return np.random.default_rng(2).standard_normal((count, d_in)).astype(np.float32)


@contextmanager
def no_row_is_read() -> Iterator[None]:
    """Neither tile by tile nor step by step."""
    wrong = AssertionError("a row was read")
    with (
        mock.patch.object(Shard, "tiles", side_effect=wrong),
        mock.patch.object(followed, "steps_in_order", side_effect=wrong),
    ):
        yield


def parts_by_a_loop(recording: Path, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """What each label's rows became, in float64 and by hand: weights [10, d_out, d_in], biases.

    The preconditioner is training's own: from the float32 gradient of the whole batch.
    """
    source = Recording.open(recording)
    spec = source.manifest.layers[layer]
    weights = np.zeros((10, spec.d_out, spec.d_in))
    biases = np.zeros((10, spec.d_out))
    adam = source.manifest.optimizer == "AdamW"
    for parts in (weights, biases):
        momentum, square = np.zeros_like(parts), np.zeros_like(parts[0])
        for step, record in enumerate(source.passes(layer)):
            keys = np.empty((record.rows, spec.d_in), "<f4")
            values = np.empty((record.rows, spec.d_out), "<f4")
            source.read_keys(record, keys.reshape(-1).view(np.uint8))
            source.read_values(record, values.reshape(-1).view(np.uint8))
            labels = source.read_rows([record.block])["label"].to_numpy()
            wide = keys.astype(np.float64) if parts is weights else np.ones((len(keys), 1))
            gradients = np.stack(
                [-values[labels == label].T.astype(np.float64) @ wide[labels == label]
                 for label in range(10)]
            ).reshape(parts.shape)  # fmt: skip
            if adam:
                errors = torch.from_numpy(values)
                whole = errors.T @ torch.from_numpy(keys) if parts is weights else errors.sum(0)
                square[:] = 0.999 * square + 0.001 * whole.double().numpy() ** 2
                momentum[:] = 0.9 * momentum + 0.1 * gradients
                root = np.sqrt(square / (1 - 0.999 ** (step + 1))) + 1e-8
                parts *= 1 - LR * DECAY
                parts -= LR * momentum / (1 - 0.9 ** (step + 1)) / root
            else:
                momentum[:] = MOMENTUM * momentum + gradients
                parts -= 0.05 * momentum
    return weights, biases


@pytest.mark.parametrize("layer", LAYERS)
def test_groups_are_a_float64_loops(recording: Path, published: Path, layer: str) -> None:
    weights, biases = parts_by_a_loop(recording, layer)
    x = queries(layer, 20)
    expected = np.einsum("goi,ni->ngo", weights, x.astype(np.float64)) + biases
    terms = np.einsum("goi,ni->ngo", np.abs(weights), np.abs(x)) + np.abs(biases)
    with Index.open(published, device="cpu") as index, no_row_is_read():
        found = index.dual_output(layer, x, group_by="label")
    assert found.plan is not None
    assert found.plan.strategy == "parts"
    assert found.groups is not None
    assert found.groups.to_pylist() == list(range(10))
    # A trained gradient is rounded to float32 at every step: rows add to 1e-5 (rule 5).
    assert (np.abs(found.values - expected) <= 1e-5 * terms).all()


MASKS = [
    (None, "label", "label"),
    (None, "task", "task"),
    ("label in (3, 5)", None, "label"),
    ("not label = 0", None, "label"),
    ("label > 20", None, "label"),
    ("task = 'odd'", None, "task"),
    ("label in (1, 2, 9)", "label", "label"),
]


@pytest.mark.parametrize(("where", "column", "by"), MASKS)
@pytest.mark.parametrize("count", [1, 30])
def test_they_are_the_scans(
    published: Path, where: str | None, column: str | None, by: str, count: int
) -> None:
    """Within rule 4 of docs/exactness.md: 1e-6 of the terms, here of the parts alone."""
    mask = None if where is None else parse_filter(where)
    with Index.open(published, device="cpu") as index:
        for layer in LAYERS:
            x = queries(layer, count)
            file = next(p for p in index.layers[layer].manifest.parts if p.column == by).file
            weight = np.abs(load_file(published / file.name)[f"{layer}.weight"]).sum(0)
            initial = load_file(published / index.layers[layer].manifest.initial.name)
            terms = np.abs(x) @ (weight + np.abs(initial[f"{layer}.weight"])).T
            with no_row_is_read():
                found = index.dual_output(layer, x, where=mask, group_by=column, strategy="parts")
                auto = index.dual_output(layer, x, where=mask, group_by=column)
            scan = index.dual_output(layer, x, where=mask, group_by=column, strategy="scan")
            np.testing.assert_array_equal(auto.values, found.values)
            bound = terms if column is None else terms[:, None]
            assert (np.abs(found.values.astype(np.float64) - scan.values) <= 1e-6 * bound).all()
            np.testing.assert_allclose(found.initial, scan.initial, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(found.trained, scan.trained)
            np.testing.assert_array_equal(found.residual, scan.residual)
            assert found.coverage == scan.coverage
            assert found.groups == scan.groups
            if column is not None:
                np.testing.assert_array_equal(found.counts, scan.counts)


@pytest.mark.parametrize(
    ("where", "column", "at_step", "message"),
    [
        ("label = 3 and step < 30", None, None, "whole groups of label, task"),
        ("label = 3", "task", None, "whole groups of task"),
        (None, "example", None, "by 'example': build it with --parts"),
        (None, "label", 30, "not those at a step"),
    ],
)
def test_what_is_not_whole_groups_is_scanned(
    published: Path, where: str | None, column: str | None, at_step: int | None, message: str
) -> None:
    mask = None if where is None else parse_filter(where)
    with Index.open(published, device="cpu") as index:
        x = queries("2", 2)
        with pytest.raises(InvalidArgumentError, match=message):
            index.dual_output(
                "2", x, where=mask, group_by=column, at_step=at_step, strategy="parts"
            )
        found = index.dual_output("2", x, where=mask, group_by=column, at_step=at_step)
        assert found.plan is not None
        assert found.plan.strategy == "scan"


def test_the_whole_still_comes_from_one_product(published: Path) -> None:
    with Index.open(published, device="cpu") as index:
        x = queries("2", 2)
        whole = index.dual_output("2", x)
        assert whole.plan is not None
        assert whole.plan.strategy == "rebuilt"
        assert set(whole.plan.costs) == {"rebuilt", "parts", "scan"}
        parts = index.dual_output("2", x, strategy="parts")
        np.testing.assert_allclose(parts.values, whole.values, rtol=1e-5, atol=1e-5)


def test_rows_without_a_value_are_a_group(tmp_path: Path) -> None:
    from synthetic import make_index

    rng = np.random.default_rng(0)
    keys = rng.standard_normal((60, 5)).astype(np.float32)
    values = rng.standard_normal((60, 4)).astype(np.float32)
    labels = np.where(np.arange(60) < 21, "none", rng.choice(["b", "a"], 60)).tolist()
    make_index(tmp_path, keys, values, label=labels, flag=[r % 3 == 0 for r in range(60)])
    recording, index_path = tmp_path / "recording", tmp_path / "parts"
    build_index(recording, index_path, parts=["flag", "label"], shard_rows=17)
    x = rng.standard_normal((1, 5)).astype(np.float32)
    with Index.open(index_path, device="cpu") as index:
        for column in ("flag", "label"):
            found = index.dual_output("fc", x, group_by=column, strategy="parts")
            assert found.groups is not None
            members = [r % 3 == 0 for r in range(60)] if column == "flag" else labels
            assert found.groups.to_pylist() == sorted(set(members))
            for number, value in enumerate(found.groups.to_pylist()):
                which = np.array([v == value for v in members])
                expected = 0.1 * values[which].T.astype(np.float64) @ (keys[which] @ x[0])
                np.testing.assert_allclose(found.values[0, number], expected, atol=1e-5)
    assert verify_index(index_path).ok


def test_over_the_wire(published: Path) -> None:
    with Client.local(published, device="cpu") as client:
        local = client.dual_output("2", queries("2", 1), group_by="label", explain_plan=True)
    assert local.plan is not None
    assert local.plan.strategy == "parts"


def _change(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change layer "2"'s parts, and seal the index again."""
    manifest = IndexManifest.load(path)
    published = manifest.layers["2"]
    (stored,) = published.parts
    tensors = {name: array.copy() for name, array in load_file(path / stored.file.name).items()}
    change(tensors)
    entry = write_atomic(path / stored.file.name, save(tensors))
    file = FileEntry(stored.file.name, entry.bytes, entry.xxh3)
    groups = len(tensors["2.weight"])
    wrong = replace(published, parts=(replace(stored, groups=groups, file=file),))
    replace(manifest, layers={**manifest.layers, "2": wrong}).save(path)


@pytest.mark.parametrize("parameter", ["2.weight", "2.bias"])
def test_verify_names_parts_that_do_not_add_up(path: Path, parameter: str) -> None:
    assert verify_index(path).ok

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[parameter][4].flat[7] += 0.02 * np.abs(tensors[parameter]).max()

    _change(path, change)
    report = verify_index(path)
    assert [layer.ok for layer in report.layers] == [True, False, True]
    said = f"stored parts do not add up to all rows: 'label': {parameter} is off"
    assert said in report.layers[1].note


def test_parts_of_other_groups_are_damage(path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            tensors[name] = np.ascontiguousarray(tensors[name][:9])

    _change(path, change)
    assert not verify_index(path).ok
    with (
        Index.open(path, device="cpu") as index,
        pytest.raises(DataLossError, match="10 values of 'label'"),
    ):
        index.dual_output("2", queries("2", 1), group_by="label")


def test_an_index_without_parts_opens_as_before(path: Path) -> None:
    """Indexes from before they were there have no such entry."""
    with Index.open(path, device="cpu") as index:
        expected = index.dual_output("2", queries("2", 2), group_by="label", strategy="scan")
    data = json.loads((path / "manifest.json").read_bytes())
    del data["xxh3"]
    for layer in data["layers"]:
        (stored,) = layer.pop("parts")
        (path / stored["file"]["name"]).unlink()
    write_sealed(path / "manifest.json", data)
    with Index.open(path, device="cpu") as index:
        found = index.dual_output("2", queries("2", 2), group_by="label")
        np.testing.assert_array_equal(found.values, expected.values)
        index.verify_files()
    assert verify_index(path).ok


def test_verify_files_hashes_parts(path: Path) -> None:
    (stored,) = IndexManifest.load(path).layers["2"].parts
    data = bytearray((path / stored.file.name).read_bytes())
    data[-20] ^= 0x10
    (path / stored.file.name).write_bytes(bytes(data))
    with (
        Index.open(path, device="cpu") as index,
        pytest.raises(DataLossError, match=r"parts-label\.safetensors"),
    ):
        index.verify_files()
    assert [damage.file for damage in verify_index(path).damage] == [stored.file.name]
