"""A packed index answers as the plain one of the same recording does, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from standing_in import FAST, WAIT
from synthetic import make_index, make_recording
from torch import nn

from dualform.client import Client
from dualform.client._filters import parse_filter
from dualform.engine import Index, verify_index
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.stand_in import StandIn
from dualform.engine.errors import CancelledError, DataLossError, InvalidArgumentError
from dualform.index import BuildError, build_index, pack_index, repack, unpack_index
from dualform.record import Recorder
from dualform.store import DamagedError, IndexManifest, NoSpaceError
from dualform.store.files import digest, read_json, write_sealed
from dualform.store.packed_rows import PackedRows

ROWS, D_IN, D_OUT = 1800, 300, 40


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return np.random.default_rng(9).standard_normal((3, D_IN)).astype(np.float32)


@pytest.fixture(scope="module")
def keys() -> np.ndarray:
    """As after ReLU, some of them again, and two that are not finite."""
    rng = np.random.default_rng(0)
    found = np.maximum(rng.standard_normal((600, 8)) @ rng.standard_normal((8, D_IN)), 0)
    found = found[rng.integers(0, 600, ROWS)].astype(np.float32)
    found[7, 3], found[900, 0] = np.nan, np.inf
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, keys: np.ndarray) -> Path:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((ROWS, D_OUT)) * (rng.random((ROWS, D_OUT)) < 0.5)
    recording = make_recording(
        tmp_path_factory.mktemp("packed") / "run",
        keys,
        values.astype(np.float32),
        50,
        0.001,
        0.9,
        {"label": [t % 5 for t in range(ROWS)]},
    )
    build_index(recording, recording.parent / "plain", shard_rows=400, parts=["label"])
    build_index(recording, recording.parent / "packed", shard_rows=400, parts=["label"], pack=True)
    return recording.parent / "plain"


@pytest.fixture(scope="module")
def packed(plain: Path) -> Path:
    return plain.parent / "packed"


def answers(path: Path, queries: np.ndarray) -> dict[str, np.ndarray]:
    """All kinds of questions, each way to answer them that both indexes have."""
    found: dict[str, np.ndarray] = {}
    where = parse_filter("label in (1, 3) and step < 30")
    with Index.open(path, device="cpu") as index:
        for strategy in ("certified", "scan", "distinct_keys", "auto"):
            for order in ("largest", "smallest", "absolute"):
                hits = index.top_k("fc", queries, 20, order=order, strategy=strategy)
                found[f"rows {strategy} {order}"] = hits.rows
                found[f"scores {strategy} {order}"] = hits.scores
        for name, more in (
            ("one", {}),
            ("filtered", {"where": where}),
            ("grouped", {"group_by": "label"}),
            ("distinct", {"distinct": "label"}),
            ("contribution", {"rank_by": "contribution", "unit": 2}),
            ("cosine", {"rank_by": "cosine"}),
        ):
            hits = index.top_k("fc", queries[:1], 5, **more)  # type: ignore[arg-type]
            found[f"{name} rows"], found[f"{name} scores"] = hits.rows, hits.scores
        for strategy in ("key_sums", "scan", "distinct_keys"):
            sums = index.sums("fc", queries, "label", strategy=strategy)
            found[f"sums {strategy}"] = sums.values
        found["absolute"] = index.sums("fc", queries, "label", absolute=True, where=where).values
        found["output"] = index.dual_output("fc", queries, at_step=17).values
        found["some"] = index.dual_output("fc", queries, where=where).values
        found["scanned"] = index.dual_output("fc", queries, strategy="scan").values
        found["parts"] = index.dual_output("fc", queries, group_by="label").values
        found["by step"] = index.top_groups("fc", queries, by="step", k=4).scores
        chunks = [chunk.weights for chunk in index.stream_weights("fc", queries)]
        found["weights"] = np.concatenate(chunks, axis=1)
        index.verify_files()
    return found


def test_every_answer_is_that_of_the_plain_index(
    plain: Path, packed: Path, keys: np.ndarray, queries: np.ndarray
) -> None:
    layer = IndexManifest.load(packed).layers["fc"]
    assert all(shard.keys.name.endswith("keys.packed") for shard in layer.shards)
    assert all(shard.values.name.endswith("values.packed") for shard in layer.shards)  # type: ignore[union-attr]
    expected, found = answers(plain, queries), answers(packed, queries)
    for what, each in expected.items():
        np.testing.assert_array_equal(found[what], each, err_msg=what)
    finite = np.isfinite(keys).all(axis=1)
    exact = queries.astype(np.float64) @ keys[finite].T.astype(np.float64)
    np.testing.assert_array_equal(found["weights"][:, finite], exact.astype(np.float32))


def test_verify_says_the_same(plain: Path, packed: Path) -> None:
    reports = [verify_index(path) for path in (plain, packed)]
    assert not reports[1].damage
    assert reports[1].ok == reports[0].ok
    of_plain, of_packed = (report.layers[0] for report in reports)
    assert of_packed.weight_error == of_plain.weight_error
    assert of_packed.output_error == of_plain.output_error


@pytest.mark.parametrize("encoding", ["bfloat16", "float16", "one_hot"])
def test_keys_of_other_encodings(tmp_path: Path, queries: np.ndarray, encoding: str) -> None:
    rng = np.random.default_rng(3)
    if encoding == "one_hot":
        keys = np.eye(D_IN, dtype=np.float32)[np.sort(rng.integers(0, D_IN, ROWS))]
    else:
        keys = np.float32(2.0) ** rng.integers(-2, 3, (ROWS, D_IN)).astype(np.float32)
    values = np.sign(rng.standard_normal((ROWS, 4))).astype(np.float32)
    path = make_index(tmp_path, keys, values, shard_rows=1000, encodings=(encoding,))
    pack_index(path, tmp_path / "packed")
    layer = IndexManifest.load(tmp_path / "packed").layers["fc"]
    assert layer.shards[0].keys.name.endswith(".packed")
    assert layer.key_encoding == encoding
    with Index.open(path, device="cpu") as one, Index.open(tmp_path / "packed") as other:
        for strategy in ("scan", "auto"):
            expected, found = (
                index.top_k("fc", queries, 9, strategy=strategy) for index in (one, other)
            )
            np.testing.assert_array_equal(found.rows, expected.rows)
            np.testing.assert_array_equal(found.scores, expected.scores)
        np.testing.assert_array_equal(
            other.dual_output("fc", queries, at_step=60).values,
            one.dual_output("fc", queries, at_step=60).values,
        )
    assert not verify_index(tmp_path / "packed").damage


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_outputs_are_those_of_the_trained_layers(tmp_path: Path, optimizer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 5))
    options = {"lr": 0.05, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-3}
    trainer = getattr(torch.optim, optimizer)(model.parameters(), **options)
    labels = torch.arange(64) % 5
    images = torch.randn(5, 64)[labels].relu() + 0.1 * torch.randn(64, 64).relu()
    with Recorder(model, trainer, tmp_path / "run") as recorder:
        for _ in range(25):
            recorder.annotate(label=labels, example=torch.arange(64))
            loss = nn.functional.cross_entropy(model(images), labels)
            trainer.zero_grad()
            loss.backward()
            trainer.step()
    build_index(tmp_path / "run", tmp_path / "plain", shard_rows=500)
    build_index(tmp_path / "run", tmp_path / "packed", shard_rows=500, pack=True)
    assert verify_index(tmp_path / "packed").ok
    asked = images[:8]
    with (
        Client.local(tmp_path / "plain", device="cpu") as one,
        Client.local(tmp_path / "packed", device="cpu") as other,
    ):
        hidden = model[1](model[0](asked)).detach()
        expected = (model[2](hidden) - model[2].bias).detach().numpy()
        found = other.dual_output("2", hidden.numpy(), at_step=25)
        bias = model[2].bias.detach().numpy()
        np.testing.assert_allclose(found.values, expected + bias, rtol=1e-4, atol=1e-5)
        calls = _attribution(model, asked)
        for call in calls if optimizer == "SGD" else calls[1:]:
            np.testing.assert_array_equal(call(other), call(one))


def _attribution(model: nn.Module, asked: torch.Tensor) -> list[Callable[[Client], Any]]:
    return [
        lambda client: client.self_influence(by="example").scores,
        lambda client: client.attribute(model, asked, target="margin", k=5).scores,
        lambda client: client.attribute(model, asked, target="margin", k=5).groups,
        lambda client: (
            client.top_k(
                "2", np.ones((1, 128), np.float32), rank_by="contribution", unit=1, k=7
            ).scores
        ),
        lambda client: (
            client.dual_output("0", asked.numpy(), where="label < 3", max_residual=1.0).values
        ),
    ]


def test_faiss_is_refused_in_words(packed: Path, queries: np.ndarray) -> None:
    with Index.open(packed, device="cpu") as index:
        with pytest.raises(InvalidArgumentError, match="layer 'fc' are packed"):
            index.top_k("fc", queries, 3, strategy="flat")
        plan = index.top_k("fc", queries, 3).plan
        assert plan is not None
        assert "flat" not in plan.costs


def test_few_rows_take_few_blocks(
    packed: Path, queries: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []
    unpack = PackedRows.unpack

    def counted(self: PackedRows, number: int, out: np.ndarray) -> None:
        blocks.append(number)
        unpack(self, number, out)

    with Index.open(packed, device="cpu") as index:
        every = sum(
            shard.keys._content.blocks  # type: ignore[attr-defined]
            for shard in index.layers["fc"].shards
            if shard.keys._used()
        )
        monkeypatch.setattr(PackedRows, "unpack", counted)
        index.top_k("fc", queries[:1], 1, strategy="scan")
        scanned = len(blocks)
        blocks.clear()
        index.layers["fc"].keys_at(np.array([3, 4, 801]))
    assert scanned >= every == 5 * 8 - 4
    assert len(blocks) == 2


def test_any_rows_in_any_order(plain: Path, packed: Path) -> None:
    rng = np.random.default_rng(11)
    with Index.open(plain, device="cpu") as one, Index.open(packed, device="cpu") as other:
        (theirs, *_), (ours, *_) = (index.layers["fc"].shards for index in (one, other))
        some = [rng.integers(0, 400, size) for size in (0, 1, 7, 300)]
        some += [np.sort(each) for each in some] + [np.arange(400)[::-1].copy()]
        for which in (*some, slice(0, 400), slice(53, 55), slice(300, None), slice(7, 7)):
            for mine, its in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert mine is not None
                assert its is not None
                assert torch.equal(mine.pick(which).nan_to_num(), its.pick(which).nan_to_num())
                if isinstance(which, np.ndarray):
                    for units in (slice(None), slice(3, 5)):
                        found, expected = (file.pick_units(which, units) for file in (mine, its))
                        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_devices_hold_what_was_unpacked(plain: Path, packed: Path, queries: np.ndarray) -> None:
    devices = Devices([StandIn(0)], 256 << 20, paces=FAST)
    with Index.open(plain, device="cpu") as one, Index.open(packed, devices=devices) as other:
        assert devices.settle(WAIT)
        for order in ("largest", "absolute"):
            found = other.top_k("fc", queries, 20, order=order, strategy="device")
            expected = one.top_k("fc", queries, 20, order=order, strategy="scan")
            np.testing.assert_array_equal(found.rows, expected.rows)
            np.testing.assert_array_equal(found.scores, expected.scores)


def test_faiss_searches_keys_that_are_not_packed_beside_values_that_are(tmp_path: Path) -> None:
    keys = np.frombuffer(np.random.default_rng(0).bytes(4 * 600 * 20), "<u4") >> 2
    keys = keys.view("<f4").reshape(600, 20)  # all bits but two are noise
    values = np.zeros((600, 8), np.float32)
    pack_index(make_index(tmp_path, keys, values), tmp_path / "packed")
    with Index.open(tmp_path / "packed", device="cpu") as index:
        assert index.layers["fc"].packed == (False, True)
        hits = index.top_k("fc", np.ones((1, 20), np.float32), 3, strategy="flat")
        assert hits.rows.tolist() == [np.argsort(-keys.sum(axis=1, dtype=np.float64))[:3].tolist()]


def test_a_scan_stops_midway(packed: Path, queries: np.ndarray) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    with Index.open(packed, device="cpu") as index, pytest.raises(CancelledError):
        index.top_k("fc", queries, 5, strategy="scan", stop=stop)


def test_threads_share_an_index(packed: Path, queries: np.ndarray) -> None:
    with Index.open(packed, device="cpu") as index:
        expected = index.top_k("fc", queries, 20, strategy="scan")
        sums = index.sums("fc", queries, "label", absolute=True, strategy="scan").values
        before = torch.get_num_threads()
        torch.set_num_threads(3)  # which share the blocks of a tile out
        try:
            again = index.top_k("fc", queries, 20, strategy="scan")
            added = index.sums("fc", queries, "label", absolute=True, strategy="scan").values
        finally:
            torch.set_num_threads(before)
        np.testing.assert_array_equal(again.rows, expected.rows)
        np.testing.assert_array_equal(again.scores, expected.scores)
        np.testing.assert_allclose(added, sums, rtol=1e-6)
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(
                    lambda number: index.top_k("fc", queries[number % 3][None], 20),
                    range(12),
                )
            )
    for number, hits in enumerate(found):
        np.testing.assert_array_equal(hits.rows[0], expected.rows[number % 3])
        np.testing.assert_array_equal(hits.scores[0], expected.scores[number % 3])


@pytest.mark.parametrize("what", ["keys", "values"])
def test_verify_compares_the_digest_of_the_plain_file(
    packed: Path, tmp_path: Path, what: str
) -> None:
    hurt = shutil.copytree(packed, tmp_path / "hurt")
    _changed(hurt, what, _put(56, 12345))
    (damage,) = verify_index(hurt).damage
    assert damage.file == f"layers/fc/000002.{what}.packed"
    assert "digest of the plain file" in damage.what


@pytest.mark.parametrize("what", ["keys", "values"])
def test_damage_is_told_by_file(
    packed: Path, tmp_path: Path, queries: np.ndarray, what: str
) -> None:
    hurt = shutil.copytree(packed, tmp_path / "hurt")
    file = hurt / f"layers/fc/000002.{what}.packed"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with Index.open(hurt, device="cpu") as index:
        with pytest.raises(DataLossError, match=f"000002.{what}.packed.*digest"):
            index.dual_output("fc", queries, at_step=17)
        assert f"000002.{what}.packed" in str(index.damage)
    (damage,) = verify_index(hurt).damage
    assert damage.file == f"layers/fc/000002.{what}.packed"
    assert (damage.first_row, damage.last_row) == (800, 1199)


def test_a_file_that_is_changed_under_an_open_index_is_noticed(
    packed: Path, tmp_path: Path, queries: np.ndarray
) -> None:
    hurt = shutil.copytree(packed, tmp_path / "hurt")
    with Index.open(hurt, device="cpu") as index:
        index.top_k("fc", queries, 3, strategy="scan")
        with open(hurt / "layers/fc/000001.keys.packed", "r+b") as file:
            file.truncate(100)
        with pytest.raises(DataLossError, match=r"000001\.keys\.packed"):
            index.top_k("fc", queries, 3, strategy="scan")


def test_another_version_goes_on_with_what_is_mapped(
    packed: Path, tmp_path: Path, queries: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(packed, tmp_path / "other", copy_function=os.link)
    with Index.open(packed, device="cpu") as before, Index.open(other, device="cpu") as after:
        expected = before.dual_output("fc", queries, strategy="scan").values
        after.adopt(before)
        monkeypatch.setattr(PackedRows, "all", None)  # nothing is unpacked whole once more
        after.verify_files()
        found = after.dual_output("fc", queries, strategy="scan").values
        for ours, theirs in zip(after.layers["fc"].shards, before.layers["fc"].shards, strict=True):
            assert ours.keys.mapped() == theirs.keys.mapped() is not None
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("full", ["keys", "manifest"])
def test_a_full_disk_leaves_nothing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    write = repack.write_parts

    def no_space(directory: Path, name: str, parts: Any) -> Any:
        if full in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, name, parts)

    monkeypatch.setattr(repack, "write_parts", no_space)
    if full == "manifest":
        monkeypatch.setattr(
            IndexManifest, "save", lambda self, path: no_space(path, "manifest", [])
        )
    with pytest.raises(NoSpaceError, match=r"no space left; .* Nothing of it was kept"):
        pack_index(plain, tmp_path / "packed")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_into_a_published_index(plain: Path) -> None:
    before = sorted(plain.rglob("*"))
    with pytest.raises(BuildError, match="choose a folder beside it"):
        pack_index(plain, plain / "packed")
    assert sorted(plain.rglob("*")) == before


def test_unpacked_again_it_is_the_plain_index(plain: Path, packed: Path, tmp_path: Path) -> None:
    unpack_index(packed, tmp_path / "again")
    pack_index(plain, tmp_path / "packed")
    for made, expected in ((tmp_path / "again", plain), (tmp_path / "packed", packed)):
        files = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
        assert {path.relative_to(made) for path in made.rglob("*") if path.is_file()} == files
        for name in files:
            assert (made / name).read_bytes() == (expected / name).read_bytes(), name


def _changed(directory: Path, what: str, change: Callable[[bytearray], object]) -> None:
    """Change the third shard's file, and have the manifest say that this is what was written."""
    file = directory / f"layers/fc/000002.{what}.packed"
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)
    manifest = read_json(directory / "manifest.json", "")
    entry = manifest["layers"][0]["shards"][2][what]
    entry["bytes"], entry["xxh3"] = len(data), digest(bytes(data))
    manifest.pop("xxh3")
    write_sealed(directory / "manifest.json", manifest)


def _put(place: int, number: int) -> Callable[[bytearray], object]:
    return lambda data: data.__setitem__(slice(place, place + 8), number.to_bytes(8, "little"))


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_put(8, 2**40), "its header has rows 1,099,511,627,776 where the manifest makes it 400"),
        (_put(32, 2**50), "its header has block_rows"),
        (_put(40, 9), "its header has packing 9"),
        (_put(64, 2**62), "its table"),
        (lambda data: data.__delitem__(slice(200, None)), "its table"),
        (_put(300, 2**62), "block 0: "),
    ],
)
def test_a_file_that_lies_is_damage_with_its_field(
    packed: Path,
    tmp_path: Path,
    queries: np.ndarray,
    what: str,
    change: Callable[[bytearray], object],
    message: str,
) -> None:
    hurt = shutil.copytree(packed, tmp_path / "hurt")
    _changed(hurt, what, change)
    message = rf"000002\.{what}\.packed: .*{message}"
    with (
        Index.open(hurt, device="cpu") as index,
        pytest.raises(DataLossError, match=message),
    ):
        index.dual_output("fc", queries, strategy="scan")
    (damage,) = verify_index(hurt).damage
    assert damage.file == f"layers/fc/000002.{what}.packed"
    with pytest.raises(DamagedError, match=message):
        unpack_index(hurt, tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hurt"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bytes", 400 * 4 * D_IN + 45, "bytes is .* fewer than its rows take"),
        ("bytes", 3, "bytes is 3"),
        ("name", "layers/fc/000001.keys.packed", "name is"),
        ("name", "layers/fc/000002.values.packed", "name is"),
        ("name", "layers/fc/000002.keys.faiss", "bytes is .* what 400 rows take"),
    ],
)
def test_a_manifest_that_lies_of_packed_files_is_refused(
    packed: Path, tmp_path: Path, field: str, value: object, message: str
) -> None:
    hurt = shutil.copytree(packed, tmp_path / "hurt")
    manifest = read_json(hurt / "manifest.json", "")
    manifest["layers"][0]["shards"][2]["keys"][field] = value
    manifest.pop("xxh3")
    write_sealed(hurt / "manifest.json", manifest)
    with pytest.raises(DamagedError, match=rf"layers\[0\]\.shards\[2\]\.keys\.{message}"):
        Index.open(hurt, device="cpu")


def test_what_a_manifest_says_of_packed_keys_is_held_against_them(
    packed: Path, tmp_path: Path, queries: np.ndarray
) -> None:
    hurt = shutil.copytree(packed, tmp_path / "hurt")
    manifest = read_json(hurt / "manifest.json", "")
    manifest["layers"][0]["shards"][2]["max_norm"] /= 2
    manifest.pop("xxh3")
    write_sealed(hurt / "manifest.json", manifest)
    with (
        Index.open(hurt, device="cpu") as index,
        pytest.raises(DataLossError, match=r"000002\.keys\.packed: a key is .* long"),
    ):
        index.top_k("fc", queries, 3)
