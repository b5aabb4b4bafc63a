"""What can go wrong while recording.

RecordError                 a DualformError
├── LayerSelectionError     no such layer, or one that cannot be recorded
├── AnnotationError         a column's name, type or size does not fit
├── CaptureError            a layer's rows cannot be captured
├── OptionError             an option has no such value (a ValueError too)
├── OptimizerError          the optimizer is none, or hides the real one (a TypeError too)
├── RecordingExistsError    the path exists, or another process records there
├── ResumeError             a recording that can't be continued from this step
├── RecorderClosedError     used after close()
└── RecordingFailedError    the sink failed, such as a full disk
"""

from __future__ import annotations

from dualform._errors import DualformError
from dualform.store.errors import ExistsError


class RecordError(DualformError):
    """Base of everything the recorder raises; the message says what to do next."""


class OptionError(RecordError, ValueError):
    """An option, such as `every` or `pack`, or the path is none of the values that it may be."""


class OptimizerError(RecordError, TypeError):
    """What was given as the optimizer is no torch.optim.Optimizer, nor holds one."""


class RecordingExistsError(RecordError, ExistsError):
    """The path exists already, or another process records there."""


class LayerSelectionError(RecordError):
    """`layers=` names nothing that can be recorded."""


class AnnotationError(RecordError):
    """An annotation does not fit the rows, or its own earlier type."""


class CaptureError(RecordError):
    """A selected layer is used in a way that leaves no rows to record."""


class ResumeError(RecordError):
    """A recording can't be continued as asked. Nothing of it was dropped."""


class RecorderClosedError(RecordError):
    """The recorder was closed; make a new one with a new path."""


class RecordingFailedError(RecordError):
    """The sink could not take a step. What it committed before stays readable."""
