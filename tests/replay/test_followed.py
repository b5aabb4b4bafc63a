"""Outputs in a replay of AdamW against the index of the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import digits
import numpy as np
import pytest

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.replay import FirstRun, Replay, ReplayError, answers

ASKED = [
    (None, None, None),
    ("label in (3, 5) and step > 4", None, None),
    (None, "label", None),
    ("task = 'odd'", "label", 33),
    (None, "task", 17),
    (None, None, 0),
]


def test_outputs_are_the_indexs(adamw_index: Path) -> None:
    first = FirstRun()
    digits.record(first, make=digits.adamw)
    replay = Replay(first)
    x = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    found = [
        replay.dual_output("2", x, where=where, group_by=by, at_step=at) for where, by, at in ASKED
    ]
    with pytest.raises(ReplayError, match="have no coefficients"):
        replay.top_k("2", x, 3, rank_by="contribution", unit=1)
    digits.record(replay, make=digits.adamw)
    with Index.open(adamw_index, device="cpu") as index:
        for answer, (where, by, at) in zip(found, ASKED, strict=True):
            mask = None if where is None else parse_filter(where)
            expected = index.dual_output("2", x, where=mask, group_by=by, at_step=at)
            if by is None:
                np.testing.assert_allclose(answer.result(), expected.values, rtol=2e-6, atol=2e-6)
                continue
            parts = answer.parts()
            assert expected.groups is not None
            assert parts.groups == expected.groups.to_pylist()
            np.testing.assert_array_equal(parts.counts, expected.counts)
            np.testing.assert_allclose(parts.values, expected.values, rtol=2e-6, atol=2e-6)
            np.testing.assert_allclose(parts.initial, expected.initial, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("make", [None, digits.adamw], ids=["coefficients", "followed"])
def test_more_groups_than_memory_end_the_replay(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column with a value for each example: at the step that brings too many, in words."""
    first = FirstRun()
    digits.record(first, make=make)
    x = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    size = 3 * 48 * 8  # the parts of an output, float64
    if make is not None:  # weights that are followed: the whole, and each part
        size = 48 * 48 * (8 + 2 * 4)
    monkeypatch.setattr(answers, "FOLLOWED_BYTES", 200 * size)
    replay = Replay(first)
    found = replay.dual_output("2", x, group_by="example")
    with pytest.raises(ReplayError, match=r"values of 'example' came by step \d+: .*fewer values"):
        digits.record(replay, make=make)
    with pytest.raises(ReplayError):
        found.parts()
