"""What questions cost, by experience."""

from __future__ import annotations

from dualform.serve.costs import _MOST_KINDS, Experience


def test_one_that_was_held_up_says_nothing_of_those_after_it() -> None:
    experience = Experience()
    assert experience.seconds(("TopK",)) is None
    for seconds in (2.0, 0.003, 0.004, 1.0, 0.005):
        experience.learn(("TopK",), seconds)
    assert experience.seconds(("TopK",)) == 0.004


def test_three_in_a_row_that_take_long_are_believed() -> None:
    experience = Experience()
    for seconds in (0.003, 0.5, 0.6, 0.7):
        experience.learn(("TopK",), seconds)
    assert experience.seconds(("TopK",)) == 0.5


def test_the_kinds_that_are_asked_are_kept() -> None:
    experience = Experience()
    for number in range(2 * _MOST_KINDS):
        experience.learn((number,), 1.0)
        experience.learn(("asked",), 2.0)
    assert experience.seconds(("asked",)) == 2.0
    assert experience.seconds((0,)) is None
    assert experience.seconds((2 * _MOST_KINDS - 1,)) == 1.0
