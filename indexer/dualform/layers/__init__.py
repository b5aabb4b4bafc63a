"""The kinds of layers: how each is recorded, and how it runs in dual form. One file for each.

Torch is all that this part needs: the recorder uses it, and the client, which may have no more.
A kind registers itself as its file is imported, which happens here and nowhere else.
"""

from dualform.layers import attention as _attention  # noqa: F401
from dualform.layers import convolution as _convolution  # noqa: F401
from dualform.layers import embedding as _embedding  # noqa: F401
from dualform.layers import experts as _experts  # noqa: F401
from dualform.layers import linear as _linear  # noqa: F401
from dualform.layers import router as _router  # noqa: F401
from dualform.layers import transposed as _transposed  # noqa: F401
from dualform.layers.base import (
    JoinedKind,
    LayerKind,
    ProductKind,
    ShapeError,
    UnsupportedModuleError,
    bare,
    layers_of,
    module_of,
    why_not,
)
from dualform.layers.gru import GRU
from dualform.layers.lstm import LSTM

# In plain order; the linter would put GRU and LSTM first, as constants.
__all__ = [  # noqa: RUF022
    "GRU",
    "JoinedKind",
    "LSTM",
    "LayerKind",
    "ProductKind",
    "ShapeError",
    "UnsupportedModuleError",
    "bare",
    "layers_of",
    "module_of",
    "why_not",
]
