"""From a recording to an index: streamed, grouped by (task, label), checksummed, published."""

from dualform.index.build import SHARD_ROWS, build_index
from dualform.index.errors import BuildError

__all__ = ["SHARD_ROWS", "BuildError", "build_index"]
