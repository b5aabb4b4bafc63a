"""The study of retraining, small: its ways of attribution beside ones written otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
DATA = Path(os.environ.get("DUALFORM_DATA", ROOT.parent / "shared" / "data"))
sys.path.insert(0, str(EXPERIMENTS))

import retraining  # noqa: E402
from attribution_ways import Study  # noqa: E402


def test_the_score_is_one_where_retraining_is_what_was_said() -> None:
    drawn = np.random.default_rng(0)
    scores = drawn.standard_normal((3, 40))
    halves = drawn.random((25, 40)) < 0.5
    margins = np.exp(halves @ scores.T)  # another scale, the same order
    assert retraining.datamodelling(scores, halves, margins) == pytest.approx(1)
    assert retraining.datamodelling(-scores, halves, margins) == pytest.approx(-1)
    other = drawn.standard_normal((3, 40))
    assert abs(retraining.datamodelling(other, halves, margins)) < 0.5


@pytest.mark.skipif(not (DATA / "MNIST").exists(), reason="no MNIST: DUALFORM_DATA names no folder")
def test_a_small_study(tmp_path: Path) -> None:
    study = Study(DATA, "mlp", examples=200, tests=4)
    study.train_recorded(tmp_path / "run-0", seed=0)
    assert retraining.ask(study, "all", tmp_path / "run-0") == 0
    scores = np.load(tmp_path / "run-0" / "all.npy")
    chance = np.random.default_rng(0).standard_normal(scores.shape)
    whole = study.retrained(np.arange(200), 3)
    # Without the hundred that raised it most, a margin falls further than without any hundred.
    assert retraining.removed(study, scores, whole, 1) > retraining.removed(study, chance, whole, 1)
