"""What a build adds up at once is bounded: layer after layer where all together are too much."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import digits
import pytest

from dualform.index import BuildError, build_index, row_sum
from dualform.index.row_sum import FollowedSum
from dualform.optimizers import FAMILIES
from dualform.store.index import IndexManifest

LARGEST = 64 * 48 + 48
"""Numbers of layer "0", the network's largest."""


def needed(numbers: int, parts: int) -> int:
    """Bytes that AdamW's sum takes, by hand: each number in float64 with three buffers and four
    tensors on the way in float32; a part's in float64 with moves and momentum in float32."""
    return numbers * (8 + 7 * 4 + (1 + parts) * 16)


def files(index: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(index)): path.read_bytes() for path in index.rglob("*.safetensors")
    }


@pytest.mark.parametrize("parts", [[], ["label", "task"]], ids=["whole", "parts"])
def test_one_layer_at_a_time_is_what_all_at_once_are(
    adamw_recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[str]
) -> None:
    build_index(adamw_recording, tmp_path / "wide", parts=parts, shard_rows=300)
    groups = sum(
        stored.groups for stored in IndexManifest.load(tmp_path / "wide").layers["0"].parts
    )
    alive: weakref.WeakSet[FollowedSum] = weakref.WeakSet()
    most, make = [0], FollowedSum.__init__

    def counted(self: FollowedSum, layer: Any, *arguments: Any) -> None:
        make(self, layer, *arguments)
        alive.add(self)
        layers = [each._layer for each in alive]
        numbers = sum(each.d_out * (each.d_in + 1) for each in layers)
        most.append(needed(numbers, groups))

    monkeypatch.setattr(FollowedSum, "__init__", counted)
    monkeypatch.setattr(row_sum, "MOST_MEMORY", needed(LARGEST, groups))
    build_index(adamw_recording, tmp_path / "narrow", parts=parts, shard_rows=300)
    assert len(most) > 2
    assert max(most) == needed(LARGEST, groups)  # several small ones, or the largest
    assert files(tmp_path / "narrow") == files(tmp_path / "wide")


def test_so_are_sums_by_coefficients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number and its momentum in float64; for all of them a product and its multiple."""
    digits.record(tmp_path / "recording")
    build_index(tmp_path / "recording", tmp_path / "wide", parts=["label"])
    monkeypatch.setattr(row_sum, "MOST_MEMORY", LARGEST * (11 * 16 + 12))
    build_index(tmp_path / "recording", tmp_path / "narrow", parts=["label"])
    assert files(tmp_path / "narrow") == files(tmp_path / "wide")


def test_a_layer_that_is_too_large_by_itself_is_refused(
    adamw_recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sum, "MOST_MEMORY", needed(LARGEST, 0) - 1)
    with pytest.raises(BuildError, match=r"layer '0' became takes 0\.0 GB .*--no-values"):
        build_index(adamw_recording, tmp_path / "index")
    assert list(tmp_path.iterdir()) == []
    build_index(adamw_recording, tmp_path / "index", values=False)
    monkeypatch.setattr(row_sum, "MOST_MEMORY", needed(LARGEST, 9))
    with pytest.raises(BuildError, match=r"in 10 parts .*fewer columns with --parts"):
        build_index(adamw_recording, tmp_path / "parts", parts=["label"])


def test_gpt_2_is_followed_in_several_goes() -> None:
    """Its layers together take more than a build allows itself, each alone less."""

    class Layer:
        def __init__(self, d_in: int, d_out: int, bias: str | None) -> None:
            self.d_in, self.d_out, self.bias = d_in, d_out, bias

    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
    layers: dict[str, Any] = {str(i): Layer(*shape, "bias") for i, shape in enumerate(shapes)}
    layers["lm_head"] = Layer(768, 50257, None)
    found = row_sum.at_once(layers, FAMILIES["adam"], dict.fromkeys(layers, 0))
    numbers = {
        name: layer.d_out * (layer.d_in + (layer.bias is not None))
        for name, layer in layers.items()
    }
    assert needed(sum(numbers.values()), 0) > row_sum.MOST_MEMORY
    assert 0 < needed(sum(numbers[name] for name in found), 0) <= row_sum.MOST_MEMORY
