"""Page-aligned host memory that a hook fills once and the disk is written from.

Buffers are taken from a pool and return to it by reference counting: from the writer when their
step is written, from a pass whose backward never came when its graph goes.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
import torch

from dualform.record.copies import NONE, Copies
from dualform.store.encoding import FLOAT32, ONE_HOT, encoding
from dualform.store.files import digest
from dualform.store.patches import Patches

_PAGE = 4096
_HUGE = 2 << 20
_SLAB = 16 << 20

_PARALLEL_BYTES = 4 << 20
"""Below this NumPy works in the calling thread: waking torch's threads costs more than it saves."""

_STRETCH = 32_768
"""As many products at most are summed in float32: rounding in a million would look like a fault."""

_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SIGN = np.uint16(0x8000)

PLACES = torch.int32
"""The dtype of buffers whose rows have a single 1: its place, or -1 for a row of zeros."""

_SHORT = 10_000
"""Shorter vectors NumPy's BLAS multiplies in the calling thread."""


class Pool:
    """Hands out buffers and takes them back, from any thread.

    Args:
        keep_bytes: How much free memory to keep for reuse, at most.
        copies: Fill buffers from devices.
    """

    def __init__(self, keep_bytes: int, copies: Copies = NONE) -> None:
        self.copies = copies
        self._keep_bytes = keep_bytes
        self._free_bytes = 0  # or more: what was taken again is noticed at the limit
        self._arena = _Arena()
        self._free: dict[_Shape, list[_Block]] = {}
        # Reentrant: the garbage collector may release a buffer in the thread that holds the lock.
        self._lock = threading.RLock()

    def take(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Buffer:
        """A buffer for [rows, width] of a dtype that is recorded; its content is arbitrary."""
        return Buffer(self, self.block(rows, width, dtype))

    def block(self, rows: int, width: int, dtype: torch.dtype) -> _Block:
        """Memory for a buffer, which gives it back."""
        shape = rows, width, dtype
        try:
            return self._free[shape].pop()  # atomic, so without the lock
        except (KeyError, IndexError):
            with self._lock:
                return _Block(self._arena, shape)

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            self._free.setdefault(block.shape, []).append(block)
            self._free_bytes += len(block.memory)
            if self._free_bytes > self._keep_bytes:
                shapes = list(self._free.values())  # meanwhile a new one may be released
                self._free_bytes = sum(len(free.memory) for blocks in shapes for free in blocks)
            if self._free_bytes > self._keep_bytes:
                # Shapes vary so much that hardly any comes again: let whole slabs go.
                self._free.clear()
                self._free_bytes = 0


class Buffer:
    """One array's worth of page-aligned memory.

    What comes from a device is there once the pool's copies were waited for.

    Attributes:
        dtype: torch's, of the numbers: float32, bfloat16, float16, or `PLACES`.
        encoding: How they are stored (`dualform.store.encoding`).
        stored: [rows, width], of places [rows, 1], as they are stored, contiguous. Not to be used
            after the buffer is gone.
        memory: The same bytes, padded with zeros to whole pages.
        xxh3: Digest of the array, once `seal` took it.
        given: Of keys: no trained weight had a part in them, so examples that come again may have
            the same.
    """

    __slots__ = ("_block", "_pool", "dtype", "given", "memory", "stored", "xxh3")

    def __init__(self, pool: Pool, block: _Block) -> None:
        self._pool = pool
        self._block = block
        self.dtype = block.shape[2]
        self.stored = block.stored
        self.memory = block.memory
        self.xxh3 = ""
        self.given = False

    def __del__(self) -> None:
        self._pool._give_back(self._block)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.stored)

    @property
    def patches(self) -> Patches | None:
        """How rows are cut from what is stored; None where it is the rows."""
        return None

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self._block.shape[1]

    @property
    def row_bytes(self) -> int:
        """What its rows take, in whole pages."""
        return len(self.memory)

    @property
    def encoding(self) -> str:
        """Name of the encoding of its numbers."""
        return encoding_of(self.dtype)

    @property
    def array(self) -> np.ndarray:
        """float32 [rows, width]: the memory itself, or a copy where it has other numbers."""
        return self.wide(slice(None))

    def wide(self, rows: slice) -> np.ndarray:
        """The same of some rows."""
        if self.dtype is torch.float32:
            return self.stored[rows]
        return encoding(self.encoding).widen(self.stored[rows], self.width)

    def copy(self, source: torch.Tensor) -> None:
        """Take over [..., width] from any device and dtype, rounded to the buffer's."""
        host = self._host(source)
        if host is not None:
            self._bits()[...] = host
        elif not self._sent(source):
            self._tensor(source.shape).copy_(_dense(source))

    def copy_negated(self, source: torch.Tensor, columns: slice | None = None) -> None:
        """The same with the sign changed; of some columns, the others being zero then."""
        host = None if columns is not None else self._host(source)
        if host is None and self._sent(source, columns, negated=True):
            return
        if columns is not None:
            self._take(_dense(source), columns, negated=True)
        elif host is None:
            self._tensor(source.shape).copy_(_dense(source)).neg_()
        elif self.dtype is torch.float32:
            np.negative(host, self.stored)
        else:
            np.bitwise_xor(host, _SIGN, out=self._bits())

    def _sent(
        self, source: torch.Tensor, columns: slice | None = None, negated: bool = False
    ) -> bool:
        """Whether the source lies on a device, and a copy of it is on its way."""
        copies = self._pool.copies
        if not copies.takes(source):
            return False
        # The job holds the buffer: its memory is not given to another before the copy is there.
        copies.send(source, self.dtype, lambda host: self._take(host, columns, negated))
        return True

    def _take(self, source: torch.Tensor, columns: slice | None, negated: bool) -> None:
        """Take over a dense source on the host, of some columns, the others being zero then."""
        if columns is None:
            target = self._tensor(source.shape).copy_(source)
        else:
            whole = self._tensor(torch.Size(self.stored.shape))
            target = whole.zero_()[:, columns].copy_(source.reshape(len(whole), -1))
        if negated:
            target.neg_()

    def fill(self, write: Callable[[np.ndarray], None]) -> None:
        """Take over what a function writes into float32 [rows, width]: numbers of the dtype."""
        if self.dtype is torch.float32:
            write(self.stored)
        else:
            wide = np.empty(self.stored.shape, np.float32)
            write(wide)
            self.copy(torch.from_numpy(wide))

    def add(self, other: Buffer) -> Buffer:
        """What both hold together, float32: this buffer, or a wider one in its place."""
        self._pool.copies.wait()
        rows, width, dtype = self._block.shape
        total = self
        if dtype is not torch.float32:
            total = self._pool.take(rows, width)
            total.stored[...] = self.array
        with np.errstate(all="ignore"):  # infinite values are recorded, not warned of
            total.stored += other.array
        return total

    def any_nonzero(self) -> np.ndarray:
        """bool [rows]: whether a row has a number that is not zero, of either sign."""
        if self.dtype is PLACES:
            return np.asarray(self.stored[:, 0] >= 0)
        if self.dtype is torch.float32:
            return np.asarray(self.stored.any(1))
        return np.asarray((self._bits() & ~_SIGN).any(1))

    def keep(self, rows: np.ndarray) -> Buffer:
        """Let all rows go but these.

        Args:
            rows: Their numbers, ascending.

        Returns:
            What holds them: this buffer, or another in its place.
        """
        kept = self.stored[rows]
        self.stored = self.stored[: len(kept)]
        self.stored[...] = kept
        end = -(-kept.nbytes // _PAGE) * _PAGE
        np.frombuffer(self.memory, np.uint8)[kept.nbytes : end] = 0
        self.memory = self.memory[:end]
        return self

    def dots(self, *products: tuple[np.ndarray, slice, np.ndarray]) -> None:
        """Products of each row with vectors, as `row_dots`.

        Args:
            products: A vector, float32 [width]; which columns take part; what to fill, [rows].
        """
        if self.dtype is PLACES:
            places = self.stored[:, 0]
            for vector, columns, out in products:
                inside = np.zeros(len(vector) + 1, np.float32)  # the last is that of place -1
                inside[:-1][columns] = vector[columns]
                out[...] = inside[places]
            return
        array = self.array
        for vector, columns, out in products:
            row_dots(array[:, columns], vector[columns], out)

    def square(self) -> float:
        """The sum of all squares, float64."""
        if self.dtype is PLACES:
            return float(np.count_nonzero(self.stored >= 0))
        array = self.array
        return float(np.einsum("ij,ij", array, array, dtype=np.float64))

    def seal(self) -> None:
        """Take the digest: the array no longer changes."""
        self.xxh3 = digest(self.stored)

    def _bits(self) -> np.ndarray:
        """The numbers as NumPy copies them: 16-bit ones as integers."""
        return self.stored.view(np.uint16) if self.dtype in _NARROW else self.stored

    def _tensor(self, shape: torch.Size) -> torch.Tensor:
        """The numbers as torch sees them, in a source's shape."""
        if self.dtype not in _NARROW:
            return torch.from_numpy(self.stored).view(shape)
        return torch.from_numpy(self._bits().view(np.int16)).view(self.dtype).view(shape)

    def _host(self, source: torch.Tensor) -> np.ndarray | None:
        """The source's `_bits` as a small host array, if it is one of the buffer's dtype."""
        if self.stored.nbytes >= _PARALLEL_BYTES or source.dtype is not self.dtype:
            return None
        if self.dtype is PLACES:
            return None
        if self.dtype is torch.float32:
            host = host_array(source)
        elif source.layout is torch.strided:
            host = host_array(source.detach().view(torch.int16))
            host = None if host is None else host.view(np.uint16)
        else:
            return None
        if host is None or host.ndim == 2:
            return host
        return host.reshape(self.stored.shape)


def encoding_of(dtype: torch.dtype) -> str:
    """Name of the encoding that keeps a dtype as it is: float32 for all that have more bits."""
    return ONE_HOT.name if dtype is PLACES else _NARROW.get(dtype, FLOAT32.name)


def kept_as(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are kept as: 16-bit ones as they are, all others as float32."""
    return dtype if dtype in _NARROW else torch.float32


def host_array(tensor: torch.Tensor) -> np.ndarray | None:
    """The tensor's own memory as an array, if it is dense and on the host; read it only."""
    try:
        if tensor.requires_grad:  # asked first: detaching is dear when caches are cold
            tensor = tensor.detach()
        array: np.ndarray = tensor.numpy()
    except (TypeError, RuntimeError):  # other devices and layouts; a bit of conjugation or sign
        return None
    return array


def _dense(source: torch.Tensor) -> torch.Tensor:
    source = source.detach()
    return source if source.layout is torch.strided else source.to_dense()


def row_dots(matrix: np.ndarray, vector: np.ndarray, out: np.ndarray) -> None:
    """matrix @ vector into float64 [rows], summed in float32 stretches in the calling thread.

    To be called with NumPy's warnings off: infinite keys are recorded, not warned of.

    NumPy's BLAS has threads of its own, which spin against torch's: it is kept out of this.
    """
    if len(vector) > _STRETCH:
        out[...] = 0.0
        part = np.empty_like(out)
        for start in range(0, len(vector), _STRETCH):
            stretch = slice(start, start + _STRETCH)
            row_dots(matrix[:, stretch], vector[stretch], part)
            out += part
    elif matrix.nbytes >= _PARALLEL_BYTES:
        out[...] = torch.mv(torch.from_numpy(matrix), torch.from_numpy(vector)).numpy()
    else:
        _vecdot(matrix, vector, out)


def _einsum(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return np.asarray(np.einsum("...i,...i->...", a, b, out=out))


_vecdot = getattr(np, "vecdot", _einsum)  # twice as fast as einsum, from NumPy 2 on


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """a . b of two float64 vectors, in the calling thread."""
    return float(a @ b) if len(a) < _SHORT else float(np.einsum("i,i", a, b))


def gram(rows: np.ndarray) -> list[list[float]]:
    """rows @ rows' of float64 [few, n], in the calling thread."""
    product = _vecdot if rows.shape[1] < _SHORT else _einsum
    return product(rows[:, None], rows).tolist()  # type: ignore[no-any-return]


class _Arena:
    """Memory for blocks, in slabs of huge pages: with small ones, half the time of a copy goes
    into looking up addresses."""

    def __init__(self) -> None:
        self._slab = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Zeroed, page-aligned bytes; they live as long as the view."""
        if nbytes > len(self._slab):
            size = max(_SLAB, -(-nbytes // _HUGE) * _HUGE)
            # Private: a forked data loader worker must not see its pages change.
            slab = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                slab.madvise(mmap.MADV_HUGEPAGE)
            start = -np.frombuffer(slab, np.uint8).ctypes.data % _HUGE
            self._slab = memoryview(slab)[start : start + size]
        memory, self._slab = self._slab[:nbytes], self._slab[nbytes:]
        return memory


_Shape = tuple[int, int, torch.dtype]
"""Rows, width, and the dtype of the numbers."""


class _Block:
    __slots__ = ("memory", "shape", "stored")

    def __init__(self, arena: _Arena, shape: _Shape) -> None:
        rows, width, dtype = self.shape = shape
        kind = encoding(encoding_of(dtype))
        nbytes, stored = rows * kind.row_bytes(width), kind.numbers(width)
        # Anonymous memory starts as zeros, and nothing ever writes the padding.
        self.memory = arena.take(-(-nbytes // _PAGE) * _PAGE)
        self.stored = np.frombuffer(self.memory, kind.stored, rows * stored).reshape(rows, stored)
