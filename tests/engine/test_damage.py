"""Damaged, truncated and newer indexes: refused with the file's name; verification tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_index

from dualform.engine import Index, verify_index
from dualform.engine.errors import DataLossError
from dualform.store import DamagedError, IndexManifest, NotFoundError, VersionError

KEYS = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
VALUES = np.random.default_rng(1).standard_normal((500, 4)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_index(tmp_path, KEYS, VALUES, shard_rows=200, label=[t % 5 for t in range(500)])


def complaint(path: Path) -> str:
    """What opening and verifying an index has to say; empty where nothing is wrong."""
    try:
        with Index.open(path, device="cpu") as index:
            index.verify_files()
    except (DataLossError, DamagedError) as error:
        return str(error)
    return ""


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_every_flipped_byte_is_found_before_it_is_used(path: Path, tmp_path: Path) -> None:
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) >= 10
    rng = np.random.default_rng(2)
    for file in files:
        for offset in {0, file.stat().st_size - 1, int(rng.integers(file.stat().st_size))}:
            copy = tmp_path / "copy"
            shutil.copytree(path, copy)
            damaged = copy / file.relative_to(path)
            flip(damaged, offset)
            # The manifest alone may change where it does not count: in its white space.
            harmless = (
                file.name == "manifest.json" and file.read_bytes()[offset : offset + 1] in b" \n"
            )
            assert harmless or damaged.name in complaint(copy), (damaged, offset)
            shutil.rmtree(copy)


def test_a_question_to_a_damaged_shard_is_refused_and_remembered(path: Path) -> None:
    flip(path / "layers/fc/000001.keys.faiss", 3000)
    with Index.open(path, device="cpu") as index:
        assert index.damage is None
        for _ in range(2):
            with pytest.raises(DataLossError, match=r"000001\.keys\.faiss.*index build"):
                index.top_k("fc", KEYS[:1], 3)
        assert index.damage is not None
        assert "000001.keys.faiss" in index.damage


def test_damaged_values_leave_weights_exact(path: Path) -> None:
    flip(path / "layers/fc/000002.values.npy", 500)
    with Index.open(path, device="cpu") as index:
        assert index.top_k("fc", KEYS[:1], 1).rows[0, 0] >= 0
        with pytest.raises(DataLossError, match=r"000002\.values\.npy"):
            index.dual_output("fc", KEYS[:1], strategy="scan")


def test_a_truncated_shard_is_refused_at_opening(path: Path) -> None:
    shard = path / "layers/fc/000000.keys.faiss"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(DamagedError, match=r"000000\.keys\.faiss: [\d,]+ bytes where"):
        Index.open(path, device="cpu")


def test_a_shard_cut_off_under_the_map_is_refused(path: Path) -> None:
    with Index.open(path, device="cpu", use_faiss=False) as index:
        index.top_k("fc", KEYS[:1], 1)
        with open(path / "layers/fc/000001.keys.faiss", "r+b") as file:
            file.truncate(100)
        with pytest.raises(DataLossError, match=r"000001\.keys\.faiss: 100 bytes"):
            index.top_k("fc", KEYS[:1], 1)


def test_a_missing_file_is_refused_at_opening(path: Path) -> None:
    (path / "layers/fc/000000.values.npy").unlink()
    with pytest.raises(DamagedError, match="missing"):
        Index.open(path, device="cpu")


def test_a_newer_version_is_refused(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["version"] = 4
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(VersionError, match=r"version 4.*upgrade"):
        Index.open(path, device="cpu")


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="dualform index build"):
        Index.open(tmp_path, device="cpu")
    (tmp_path / "manifest.json").write_text('{"format": "something-else"}')
    with pytest.raises(NotFoundError, match="something-else"):
        Index.open(tmp_path, device="cpu")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DamagedError, match="not valid JSON"):
        Index.open(tmp_path, device="cpu")


def test_verify_reports_a_recording_that_does_not_add_up(tmp_path: Path) -> None:
    report = verify_index(make_index(tmp_path, KEYS, VALUES, trained=False))
    assert not report.ok
    assert report.layers[0].weight_error is not None
    assert "do not rebuild" in report.layers[0].note


def test_verify_names_damage(path: Path) -> None:
    flip(path / "layers/fc/000001.values.npy", 300)
    report = verify_index(path)
    assert not report.ok
    (damage,) = report.damage
    assert damage.file == "layers/fc/000001.values.npy"
    assert (damage.layer, damage.first_row, damage.last_row) == ("fc", 200, 399)
    assert "digest" in damage.what


def test_a_manifest_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DamagedError, match="not valid JSON"):
        IndexManifest.load(tmp_path)
