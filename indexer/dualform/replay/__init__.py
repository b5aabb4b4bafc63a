"""Replay: train again, and fold every batch straight into the answers, with nothing stored.

`FirstRun` is the sink of the first training, `Replay` that of the second. What takes the tiles are
the engine's reducers; what is here is how two trainings are known to be the same.
"""

from dualform.replay.answers import (
    DualOutput,
    Group,
    KeySums,
    KeySumsResult,
    OutputParts,
    Sums,
    SumsResult,
    TopK,
    TopKResult,
)
from dualform.replay.errors import DivergedError, ReplayError
from dualform.replay.first_run import FirstRun
from dualform.replay.replay import Replay

__all__ = [
    "DivergedError",
    "DualOutput",
    "FirstRun",
    "Group",
    "KeySums",
    "KeySumsResult",
    "OutputParts",
    "Replay",
    "ReplayError",
    "Sums",
    "SumsResult",
    "TopK",
    "TopKResult",
]
