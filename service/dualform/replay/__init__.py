"""Replay: train again, and fold every batch straight into the answers, with nothing stored.

`FirstRun` is the sink of the first training, `Replay` that of the second.
"""

from dualform.replay.errors import DivergedError, ReplayError
from dualform.replay.first_run import FirstRun
from dualform.replay.groups import Group
from dualform.replay.key_sums import KeySums, KeySumsResult
from dualform.replay.outputs import DualOutput
from dualform.replay.replay import Replay
from dualform.replay.sums import Sums, SumsResult
from dualform.replay.top_k import TopK, TopKResult

__all__ = [
    "DivergedError",
    "DualOutput",
    "FirstRun",
    "Group",
    "KeySums",
    "KeySumsResult",
    "Replay",
    "ReplayError",
    "Sums",
    "SumsResult",
    "TopK",
    "TopKResult",
]
