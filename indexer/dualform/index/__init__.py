"""From a recording to an index: streamed, grouped by (task, label), checksummed, published."""

from dualform.index.build import build_index
from dualform.index.errors import BuildError
from dualform.index.plan import SHARD_ROWS
from dualform.index.repack import pack_index, unpack_index

__all__ = ["SHARD_ROWS", "BuildError", "build_index", "pack_index", "unpack_index"]
