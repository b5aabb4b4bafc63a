"""From a recording to an index: streamed, grouped by (task, label), checksummed, published."""

from dualform.index.build import SHARD_ROWS, build_index

__all__ = ["SHARD_ROWS", "build_index"]
