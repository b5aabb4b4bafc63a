"""What an index says of its keys, sealed and wrong: found when the keys are first used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import DataLossError
from dualform.store import IndexManifest

KEYS = np.random.default_rng(0).standard_normal((100, 300)).astype(np.float32)
LONGEST = float(np.linalg.norm(KEYS.astype(np.float64), axis=1).max())


def ask(path: Path, **said: Any) -> None:
    manifest = IndexManifest.load(path)
    layer = manifest.layers["fc"]
    shards = (replace(layer.shards[0], **said), *layer.shards[1:])
    replace(manifest, layers={"fc": replace(layer, shards=shards)}).save(path)
    with Index.open(path, device="cpu") as index:
        index.top_k("fc", KEYS[:1], 3)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"max_norm": 0.0}, "max_norm is 0"),
        ({"max_norm": LONGEST * (1 - 1e-6)}, "long where max_norm"),
        ({"nonfinite": ((3, 4),)}, "key in place 3 is not .*: not finite"),
        ({"nonnegative": True}, "negative number"),
    ],
)
def test_a_lie_is_found(tmp_path: Path, said: dict[str, Any], words: str, encoding: str) -> None:
    keys = (KEYS.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if encoding == "float32":
        keys = KEYS
    elif "max_norm" in said:
        said = {"max_norm": said["max_norm"] * 0.99}
    path = make_index(tmp_path, keys, None, shard_rows=60, encodings=(encoding,))
    ask(path)
    with pytest.raises(DataLossError, match=rf"000000\.keys\.faiss.*{words}"):
        ask(path, **said)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_key_that_is_not_finite_and_not_named(tmp_path: Path, odd: float) -> None:
    keys = KEYS.copy()
    keys[4, 7] = odd
    path = make_index(tmp_path, keys, None, shard_rows=60)
    ask(path)
    with pytest.raises(DataLossError, match=r"key in place 4 is not .*: finite"):
        ask(path, nonfinite=())


def test_keys_of_every_length_are_believed(tmp_path: Path) -> None:
    """Squares beyond float32's range, and below it; zeros."""
    keys = KEYS[:5] * np.array([[3e37], [1e-30], [0], [1e-44], [1]], np.float32)
    keys[0] = np.clip(keys[0], -3e38, 3e38)
    ask(make_index(tmp_path, keys, None, trained=False))
