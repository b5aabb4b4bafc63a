"""Page-aligned host memory that a hook fills once and the disk is written from.

Buffers are taken from a pool and return to it by reference counting: from the writer when their
step is written, from a pass whose backward never came when its graph goes.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
import torch

_PAGE = 4096

_PARALLEL_BYTES = 4 << 20
"""Below this NumPy works in the calling thread: waking torch's threads costs more than it saves."""


class Pool:
    """Hands out buffers and takes them back, from any thread.

    Args:
        keep_bytes: How much free memory to keep for reuse; of what exceeds it, the shapes that
            were not asked for longest go first.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free_bytes = 0
        self._free: dict[tuple[int, int], list[_Block]] = {}
        # Reentrant: the garbage collector may release a buffer in the thread that holds the lock.
        self._lock = threading.RLock()

    def take(self, rows: int, width: int) -> Buffer:
        """A buffer for float32 [rows, width]; its content is arbitrary."""
        with self._lock:
            free = self._free.get((rows, width))
            if free:
                block = free.pop()
                self._free_bytes -= len(block.memory)
                return Buffer(self, block)
        return Buffer(self, _Block(rows, width))

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            free = self._free.pop(block.array.shape, [])
            free.append(block)
            self._free[block.array.shape] = free  # now the shape asked for last
            self._free_bytes += len(block.memory)
            while self._free_bytes > self._keep_bytes:
                oldest = next(iter(self._free))
                if self._free[oldest]:
                    self._free_bytes -= len(self._free[oldest].pop().memory)
                else:
                    del self._free[oldest]


class Buffer:
    """One array's worth of page-aligned memory.

    Attributes:
        array: float32 [rows, width], contiguous. Not to be used after the buffer is gone.
        memory: The same bytes, padded with zeros to whole pages.
    """

    __slots__ = ("_block", "_pool", "array", "memory")

    def __init__(self, pool: Pool, block: _Block) -> None:
        self._pool = pool
        self._block = block
        self.array = block.array
        self.memory = block.memory

    def __del__(self) -> None:
        self._pool._give_back(self._block)

    def copy(self, source: torch.Tensor) -> None:
        """Take over [..., width] from any device and dtype, rounded to float32."""
        host = self._host(source)
        if host is not None:
            np.copyto(self.array, host)
        else:
            torch.from_numpy(self.array).view(source.shape).copy_(source.detach())

    def copy_negated(self, source: torch.Tensor) -> None:
        """The same with the sign changed."""
        host = self._host(source)
        if host is not None:
            np.negative(host, out=self.array)
        else:
            torch.from_numpy(self.array).view(source.shape).copy_(source.detach()).neg_()

    def times(self, vector: np.ndarray) -> np.ndarray:
        """array @ vector, float64 [rows], summed in float32."""
        if self.array.nbytes < _PARALLEL_BYTES:
            return _host_times(self.array, vector)
        return matrix_times(torch.from_numpy(self.array), vector)

    def _host(self, source: torch.Tensor) -> np.ndarray | None:
        """The source as a small host array, if it is one."""
        if self.array.nbytes >= _PARALLEL_BYTES or not _here(source):
            return None
        source = source.detach()
        if source.dim() != 2:
            source = source.reshape(-1, self.array.shape[1])
        return source.numpy()


def matrix_times(matrix: torch.Tensor, vector: np.ndarray) -> np.ndarray:
    """matrix @ vector, float64 [rows], summed in float32 on the matrix's device."""
    matrix = matrix.detach()
    if _here(matrix) and matrix.nbytes < _PARALLEL_BYTES:
        return _host_times(matrix.numpy(), vector)
    product = torch.mv(matrix, torch.from_numpy(vector).to(matrix.device))
    return np.asarray(product.cpu().numpy()).astype(np.float64)


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """a . b of two float64 vectors, in the calling thread."""
    return float(a @ b) if len(a) < 8192 else float(np.einsum("i,i", a, b))


def _here(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu


def _host_times(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    # Not matrix @ vector: NumPy's BLAS has threads of its own, which spin against torch's.
    product: np.ndarray = np.einsum("ij,j->i", matrix, vector)
    return product.astype(np.float64)


class _Block:
    __slots__ = ("array", "memory")

    def __init__(self, rows: int, width: int) -> None:
        nbytes = 4 * rows * width
        # Anonymous memory starts as zeros, and nothing ever writes the padding. Private: a fork
        # (data loader workers) must not share pages that training writes.
        self.memory = memoryview(
            mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        self.array = np.frombuffer(self.memory, np.float32, rows * width).reshape(rows, width)
