"""What lies on disk: recordings, indexes, manifests, checksums, atomic publishing.

The formats are specified in docs/format.md. Nothing here needs FAISS; the
ledger alone needs torch, for the arithmetic of optimizers.
"""

from dualform.store.errors import (
    BusyError,
    DamagedError,
    ExistsError,
    NoSpaceError,
    NotFoundError,
    RanksError,
    StoreError,
    TooManyFilesError,
    UnreadableError,
    VersionError,
    WriteError,
)
from dualform.store.index import IndexLayer, IndexManifest, LayerShard, RowSpace, SpaceShard
from dualform.store.ledger import Coefficients, InexactMark, Ledger, LedgerRow

__all__ = [
    "BusyError",
    "Coefficients",
    "DamagedError",
    "ExistsError",
    "IndexLayer",
    "IndexManifest",
    "InexactMark",
    "LayerShard",
    "Ledger",
    "LedgerRow",
    "NoSpaceError",
    "NotFoundError",
    "RanksError",
    "RowSpace",
    "SpaceShard",
    "StoreError",
    "TooManyFilesError",
    "UnreadableError",
    "VersionError",
    "WriteError",
]
