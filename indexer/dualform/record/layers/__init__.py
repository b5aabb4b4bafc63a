"""The kinds of layers that can be recorded, one file each; importing a file registers its kind."""

from dualform.record.layers import linear as _linear  # noqa: F401
from dualform.record.layers.base import LayerKind
from dualform.record.layers.lstm import LSTM

__all__ = ["LSTM", "LayerKind"]
