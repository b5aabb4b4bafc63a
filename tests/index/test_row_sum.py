"""What all rows add up to, as `build_index` stores it: against float64, and where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from synthetic import make_index

from dualform.index import build_index
from dualform.index.row_sum import TILE_ROWS, Chunk, RowSum, Way
from dualform.store import IndexManifest
from dualform.store.recording import LayerSpec

D_IN, D_OUT, LR, MOMENTUM = 40, 30, 0.1, 0.9


def stored(index: Path) -> np.ndarray | None:
    entry = IndexManifest.load(index).layers["fc"].rebuilt
    return None if entry is None else load_file(index / entry.name)["fc.weight"]


@pytest.mark.parametrize("shard_rows", [300, 1 << 16])
@pytest.mark.parametrize("rows_per_step", [1, 7, TILE_ROWS, TILE_ROWS + 1, 5 * TILE_ROWS])
def test_it_is_the_sum_of_the_rows(tmp_path: Path, rows_per_step: int, shard_rows: int) -> None:
    """Within 1e-6 of the absolute terms; keys without sign, so that these do not cancel either."""
    rng = np.random.default_rng(rows_per_step)
    rows = min(1500, 700 * rows_per_step)
    keys = np.abs(rng.standard_normal((rows, D_IN))).astype(np.float32)
    values = rng.standard_normal((rows, D_OUT)).astype(np.float32)
    values *= np.float32(10) ** rng.integers(-4, 4, (rows, 1)).astype(np.float32)
    path = make_index(
        tmp_path,
        keys,
        values,
        rows_per_step=rows_per_step,
        shard_rows=shard_rows,
        lr=LR,
        momentum=MOMENTUM,
        label=rng.integers(0, 3, rows).tolist(),
    )
    steps = np.arange(rows) // rows_per_step
    c = LR * (1 - MOMENTUM ** (steps[-1] + 1 - steps)) / (1 - MOMENTUM)
    scaled = values * c[:, None]
    expected = scaled.T @ keys.astype(np.float64)
    terms = np.abs(scaled).T @ np.abs(keys).astype(np.float64)
    found = stored(path)
    assert found is not None
    assert found.dtype == np.float64
    assert (np.abs(found - expected) <= 1e-6 * terms).all()
    # Float64 sums of float32 tiles: the whole is far closer than one float32 sum would be.
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= 3e-7


def test_bias_and_weight_have_their_own_coefficients() -> None:
    spec = LayerSpec("fc", "linear", 3, 2, "w", "b", "float32")
    stays = ((1.0, 0.0), (0.0, 1.0))
    row_sum = RowSum(spec)
    row_sum.begin(
        Chunk(
            0,
            Way(stays, np.array([0.5, 2.0]), np.zeros(2)),
            Way(stays, np.array([3.0, -1.0]), np.zeros(2)),
        )
    )
    keys = np.arange(12, dtype=np.float32).reshape(4, 3)
    values = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    row_sum.add(0, keys[:3], values[:3])
    row_sum.add(1, keys[3:], values[3:])
    found = row_sum.sums()
    factors = np.array([0.5, 0.5, 0.5, 2.0])
    np.testing.assert_allclose(found["w"], (values * factors[:, None]).T @ keys, rtol=1e-6)
    np.testing.assert_allclose(found["b"], 3 * values[:3].sum(0) - values[3], rtol=1e-6)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_there_is_none_where_it_is_not_finite(tmp_path: Path, odd: float, where: str) -> None:
    """Nor where a float32 product would overflow: such layers are scanned, in float64."""
    arrays = {"keys": np.ones((20, 3), np.float32), "values": np.full((20, 2), 1e3, np.float32)}
    arrays["keys" if where == "values" else "values"] *= np.float32(1e3)
    arrays[where][4, 1] = odd
    assert stored(make_index(tmp_path, arrays["keys"], arrays["values"])) is None


def test_there_is_none_without_values(tmp_path: Path) -> None:
    keys = np.ones((20, 3), np.float32)
    make_index(tmp_path, keys, keys)
    build_index(tmp_path / "recording", tmp_path / "bare", values=False)
    assert stored(tmp_path / "index") is not None
    assert stored(tmp_path / "bare") is None
