"""Page-aligned host memory that a hook fills once and the disk is written from.

Buffers are taken from a pool and return to it by reference counting: from the writer when their
step is written, from a pass whose backward never came when its graph goes.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import torch

_PAGE = 4096


class Pool:
    """Hands out buffers and takes them back, from any thread.

    Args:
        keep_bytes: How much free memory to keep for reuse; what exceeds it is given back.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free_bytes = 0
        self._free: dict[int, list[_Block]] = {}
        # Reentrant: the garbage collector may release a buffer in the thread that holds the lock.
        self._lock = threading.RLock()

    def take(self, shape: Sequence[int]) -> Buffer:
        """A buffer for a float32 tensor of this shape; its content is arbitrary."""
        numel = 1
        for size in shape:
            numel *= size
        size = _size_class(numel * 4)
        with self._lock:
            free = self._free.get(size)
            block = free.pop() if free else None
            if block is not None:
                self._free_bytes -= size
        return Buffer(self, block or _Block(size), shape, numel * 4)

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            if self._free_bytes + block.size <= self._keep_bytes:
                self._free_bytes += block.size
                self._free.setdefault(block.size, []).append(block)


class Buffer:
    """One tensor's worth of page-aligned memory.

    Attributes:
        tensor: float32, contiguous, of the shape asked for. Not to be used after the buffer.
        memory: The same bytes, padded with zeros to whole pages.
        nbytes: Bytes of the tensor.
    """

    __slots__ = ("_block", "_pool", "memory", "nbytes", "tensor")

    def __init__(self, pool: Pool, block: _Block, shape: Sequence[int], nbytes: int) -> None:
        self._pool = pool
        self._block = block
        self.nbytes = nbytes
        self.tensor = block.flat[: nbytes // 4].view(*shape)
        end = -(-nbytes // _PAGE) * _PAGE
        self.memory = block.bytes[:end]
        if end != nbytes:
            self.memory[nbytes:end] = bytes(end - nbytes)

    def __del__(self) -> None:
        self._pool._give_back(self._block)


class _Block:
    __slots__ = ("bytes", "flat", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        # Private: a fork (data loader workers) must not share pages that training writes.
        self.bytes = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.flat = torch.frombuffer(self.bytes, dtype=torch.float32)


def _size_class(nbytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that varying lengths share memory."""
    step = max(_PAGE, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return max(_PAGE, -(-nbytes // step) * step)
