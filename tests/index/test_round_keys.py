"""Keys that `build_index` rounds: torch's own rounding, half the bytes, and said to be rounded."""

from __future__ import annotations

from pathlib import Path

import digits
import numpy as np
import pytest
import torch
from synthetic import make_recording

from dualform.engine import Index, verify_index
from dualform.engine.errors import FailedPreconditionError
from dualform.index import build_index
from dualform.index.errors import BuildError
from dualform.store import IndexManifest
from dualform.store.recording import Recording


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Sequential]:
    path = tmp_path_factory.mktemp("digits") / "recording"
    return path, digits.record(path, make=digits.adamw)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_rounded_keys_are_torchs_and_said_to_be_rounded(
    tmp_path: Path, recording: tuple[Path, torch.nn.Sequential], name: str
) -> None:
    source, model = recording
    build_index(source, tmp_path / "wide")
    build_index(source, tmp_path / "narrow", round_keys=name)
    report = verify_index(tmp_path / "narrow")
    assert report.ok
    keys = {}
    with Recording.open(source) as recorded:
        for layer in ("0", "2", "4"):
            rows = np.concatenate([recorded.stored_keys(each) for each in recorded.passes(layer)])
            keys[layer] = torch.from_numpy(rows).to(getattr(torch, name)).double().numpy()
    sizes = {}
    for index in ("wide", "narrow"):
        files = [f for glob in ("*.faiss", "*values.npy") for f in (tmp_path / index).rglob(glob)]
        sizes[index] = {file.name: file.stat().st_size for file in files}
    assert sizes["narrow"]["000000.keys.faiss"] < 0.51 * sizes["wide"]["000000.keys.faiss"]
    assert sizes["narrow"]["000000.values.npy"] == sizes["wide"]["000000.values.npy"]
    with Index.open(tmp_path / "narrow", device="cpu") as index, torch.no_grad():
        for layer, rounded in keys.items():
            manifest = index.layers[layer].manifest
            assert manifest.encodings == (name, "float32")
            (mark,) = manifest.inexact
            assert mark.from_step == 0
            assert mark.reason.startswith(f"rounded: keys are kept as {name}")
            queries = np.random.default_rng(0).standard_normal((3, rounded.shape[1]), np.float32)
            exact = queries.astype(np.float64) @ rounded.T
            hits = index.top_k(layer, queries, 10)
            order = np.argsort(-exact, axis=1, kind="stable")[:, :10]
            best = np.take_along_axis(exact, order, 1).astype(np.float32)
            np.testing.assert_array_equal(hits.scores, best)
            # What the rounding leaves is in the remainder, on no row.
            trained = model[int(layer)](torch.from_numpy(queries)).double().numpy()
            out = index.dual_output(layer, queries, max_residual=np.inf)
            assert out.residual is not None
            length = np.linalg.norm(trained, axis=1)
            whole = out.values.astype(np.float64) + out.residual
            assert (np.linalg.norm(whole - trained, axis=1) <= 1e-6 * length).all()
            share = float((np.linalg.norm(out.residual, axis=1) / length).max())
            if layer != "0":  # whose pixels, 0 to 16 sixteenths, are 16-bit numbers
                assert 1e-6 < share < 1e-2
                with pytest.raises(FailedPreconditionError, match="rounded: keys are kept as"):
                    index.dual_output(layer, queries, max_residual=share * 0.99)


def test_keys_of_16_bits_stay_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(-8, 9, (40, 6)).astype(np.float32)
    source = make_recording(tmp_path / "r", rows, rows[:, :2], 10, 0.1, 0.0, {}, ("float16",))
    build_index(source, tmp_path / "index", round_keys="bfloat16")
    layer = IndexManifest.load(tmp_path / "index").layers["fc"]
    assert layer.encodings == ("float16", "float16")
    assert layer.inexact == ()


def test_what_can_not_be_rounded_is_refused(tmp_path: Path) -> None:
    keys, values = np.ones((20, 3), np.float32), np.ones((20, 2), np.float32)
    keys[13, 1] = 7e4
    source = make_recording(tmp_path / "r", keys, values, 7, 0.1, 0.0, {})
    with pytest.raises(BuildError, match="round_keys is 'int8'; it may be bfloat16 or float16"):
        build_index(source, tmp_path / "index", round_keys="int8")
    with pytest.raises(BuildError, match=r"keys as large as 7e\+04, which float16 can't hold"):
        build_index(source, tmp_path / "index", round_keys="float16")
    assert not (tmp_path / "index").exists()
    build_index(source, tmp_path / "index", round_keys="bfloat16")
    keys[13, 1] = np.inf  # infinite as recorded: nothing is lost
    source = make_recording(tmp_path / "r2", keys, values, 7, 0.1, 0.0, {}, trained=False)
    build_index(source, tmp_path / "index2", round_keys="float16")
