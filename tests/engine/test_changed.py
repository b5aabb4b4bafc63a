"""Files that change under an open index: noticed before and after each answer, and for good."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import DataLossError

KEYS = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
SHARD = "layers/fc/000001.keys.faiss"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_index(
        tmp_path, KEYS, KEYS[:, :4], shard_rows=200, label=[t % 5 for t in range(500)]
    )


def write_over(file: Path) -> None:
    """The same size, other numbers, as `cp` does it."""
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    with open(file, "r+b") as opened:
        opened.write(data)


def replace(file: Path) -> None:
    shutil.copy(file, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def cut(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.truncate(100)


CHANGES = [write_over, replace, cut, Path.unlink]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_questions(path: Path, change: Callable[[Path], None]) -> None:
    with Index.open(path, device="cpu", use_faiss=False) as index:
        index.top_k("fc", KEYS[:1], 1)
        change(path / SHARD)
        for _ in range(2):
            with pytest.raises(DataLossError, match=r"000001\.keys\.faiss: "):
                index.top_k("fc", KEYS[:1], 1)
        assert index.damage is not None


@pytest.mark.parametrize("change", [write_over, replace])
def test_a_change_while_a_question_is_answered(path: Path, change: Callable[[Path], None]) -> None:
    """At the last tile: what was read before, and what comes of it, is refused."""
    with Index.open(path, device="cpu", use_faiss=False) as index:
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            if asked == 3:  # between the second shard and the third
                change(path / SHARD)
            return False

        index.top_k("fc", KEYS[:1], 1, strategy="scan")
        with pytest.raises(DataLossError, match=r"000001\.keys\.faiss: it was changed"):
            index.top_k("fc", KEYS[:1], 1, strategy="scan", stop=stop)
        assert asked >= 3
        assert index.damage is not None


def test_a_state_that_changes(path: Path) -> None:
    with Index.open(path, device="cpu") as index:
        index.dual_output("fc", KEYS[:1])
        replace(path / "layers/fc/initial.safetensors")
        with pytest.raises(DataLossError, match=r"initial\.safetensors: it was changed"):
            index.dual_output("fc", KEYS[:1])


def test_a_file_that_is_as_it_was_is_no_damage(path: Path) -> None:
    """Links, owners and times of reading are not its content."""
    with Index.open(path, device="cpu") as index:
        expected = index.top_k("fc", KEYS[:1], 3).rows
        os.link(path / SHARD, path / "another-name")
        (path / SHARD).chmod(0o400)
        (path / SHARD).read_bytes()
        np.testing.assert_array_equal(index.top_k("fc", KEYS[:1], 3).rows, expected)
