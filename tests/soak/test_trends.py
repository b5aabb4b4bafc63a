"""The judge of growth: what only goes up and down is no growth, what grows is found."""

from __future__ import annotations

import numpy as np

from .trends import trend

RUNS, SAMPLES, EACH_S, LASTS_S, MB = 1000, 800, 0.5, 7.0, 4.0


def noise() -> np.ndarray:
    """Memory that goes up and down for some seconds at a time: float64 [RUNS, SAMPLES]."""
    rng = np.random.default_rng(0)
    stays = np.exp(-EACH_S / LASTS_S)
    each = MB * np.sqrt(1 - stays**2) * rng.standard_normal((SAMPLES, RUNS))
    found = [MB * rng.standard_normal(RUNS)]
    for change in each[1:]:
        found.append(stays * found[-1] + change)
    return np.stack(found, 1)


def test_noise_is_no_growth_and_growth_is_found() -> None:
    minutes = np.arange(SAMPLES) * EACH_S / 60
    runs = noise()
    # Once in a thousand times by design, were the means independent; nearly a third of them grow
    # by an interval that takes each measurement for independent.
    assert sum(trend(minutes, each).grows for each in runs) < RUNS / 100
    assert sum(trend(minutes, each + 5 * minutes).grows for each in runs) > RUNS * 0.99


def test_a_straight_line_is_known() -> None:
    found = trend([0.0, *range(1, 100)], 3.0 * np.arange(100) + 1)
    assert np.isclose(found.slope, 3)
    assert found.margin < 1e-9
    assert not trend(range(100), [7.0] * 100).grows
