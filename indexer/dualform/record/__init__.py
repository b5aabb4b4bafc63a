"""The recorder: hooks in the training process that keep a linear layer's training memory.

`Recorder` is all that most users need. Sinks decide where a recording goes.
"""

from dualform.layers import GRU, LSTM, LayerKind
from dualform.record.disk import DiskSink
from dualform.record.errors import (
    AnnotationError,
    CaptureError,
    LayerSelectionError,
    OptimizerError,
    OptionError,
    RecorderClosedError,
    RecordError,
    RecordingExistsError,
    RecordingFailedError,
    ResumeError,
)
from dualform.record.example_ids import indexed
from dualform.record.recorder import Recorder
from dualform.record.sink import CapturedPass, Sink, StepBatch

# In plain order; the linter would put GRU and LSTM first, as constants.
__all__ = [  # noqa: RUF022
    "AnnotationError",
    "CaptureError",
    "CapturedPass",
    "DiskSink",
    "GRU",
    "LSTM",
    "LayerKind",
    "LayerSelectionError",
    "OptimizerError",
    "OptionError",
    "RecordError",
    "Recorder",
    "RecorderClosedError",
    "RecordingExistsError",
    "RecordingFailedError",
    "ResumeError",
    "Sink",
    "StepBatch",
    "indexed",
]
