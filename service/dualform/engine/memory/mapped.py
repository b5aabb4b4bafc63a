"""Files as memory, without a descriptor: a map needs none once it is made.

Python's own maps keep a duplicate of their descriptor for good, so that an index of many shards
would use up what the process may open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, size: int) -> Any:
    """Map a file's first bytes, privately: nothing that is written reaches the file.

    Args:
        fd: An open descriptor; it may be closed after.
        size: At least 1, and not beyond the file's end.

    Returns:
        A writable buffer of so many bytes. The map goes with the last object that refers to it.

    Raises:
        OSError: The system refuses.
    """
    libc = _libc()
    # Writable, as torch wants memory to be.
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    address = libc.mmap(None, size, protection, flags, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    release = weakref.finalize(memory, libc.munmap, address, size)
    release.atexit = False  # the process ends anyway, and a thread may still read
    return memory


def advise(memory: Any, advice: int) -> None:
    """Tell the system how mapped memory is read next: one of `mmap`'s MADV_ constants."""
    _libc().madvise(ctypes.addressof(memory), len(memory), advice)


def resident(addresses: Iterable[int]) -> list[bool]:
    """Whether pages of mapped memory are in the page cache, of those that the system tells."""
    look = getattr(_libc(), "mincore", None)
    if look is None:
        return []
    found = ctypes.c_ubyte()
    there, page = ctypes.byref(found), mmap.PAGESIZE
    return [
        bool(found.value & 1)
        for address in addresses
        if look(address - address % page, 1, there) == 0
    ]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    for call in (libc.munmap, libc.madvise):
        call.restype = ctypes.c_int
    if hasattr(libc, "mincore"):  # not everywhere
        libc.mincore.restype = ctypes.c_int
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
