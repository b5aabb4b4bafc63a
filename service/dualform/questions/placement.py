"""The words by which devices are named: what a server's configuration and a local index share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from dualform.questions.quoted import quoted

DEVICE_WORDS = "auto, cpu, cuda, cuda:N, or a list such as [cuda:0, cuda:1]"
GPU_MEMORY = 0.8
_BYTES = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LEAST = 1 << 20
_MOST = 1 << 60


def device_names(given: Any) -> str | tuple[str, ...]:
    """What a `device` setting names.

    Args:
        given: "auto", "cpu", "cuda", "cuda:1", or a list of the last kind.

    Returns:
        "auto" or "cpu", or GPUs in the order given; "cuda" is "cuda:0".

    Raises:
        ValueError: It is none of these, or names a GPU twice.

    Example:
        >>> device_names(["cuda:0", "cuda:1"])
        ('cuda:0', 'cuda:1')
    """
    if isinstance(given, str) and given in ("auto", "cpu"):
        return given
    asked = [given] if isinstance(given, str) else given
    if not isinstance(asked, Sequence) or not asked:
        raise ValueError(f"device is {quoted(given)}; allowed are {DEVICE_WORDS}")
    names = []
    for name in asked:
        found = re.fullmatch(
            r"cuda(?::(0|[1-9][0-9]{0,3}))?", name if isinstance(name, str) else ""
        )
        if found is None:
            raise ValueError(f"device is {quoted(given)}; allowed are {DEVICE_WORDS}")
        names.append(f"cuda:{found[1] or 0}")
    if len(set(names)) < len(names):
        raise ValueError(f"device is {quoted(given)}; each GPU may be named once")
    return tuple(names)


def gpu_memory(given: Any) -> float | int:
    """What a `gpu_memory` setting says: a share of each GPU's memory, or bytes.

    Args:
        given: A number above 0 and up to 1; bytes as an integer, 1 MiB at least; or text such as
            "20GiB". Less than 1 EiB.

    Returns:
        A float for a share, an int for bytes.

    Raises:
        ValueError: It is none of these.
    """
    wrong = ValueError(
        f"gpu_memory is {_told(given)}; say a share of each GPU's memory, above 0 and up to 1, "
        "such as 0.8, or how many MiB, GiB or TiB, such as 20GiB, 1MiB at least"
    )
    if isinstance(given, str):
        size = bytes_of(given)
        if size is None or size < _LEAST:
            raise wrong
        return size
    number, whole = isinstance(given, Real), isinstance(given, Integral)
    if not number or isinstance(given, bool):
        raise wrong
    if 0 < given <= 1:
        return float(given)
    if whole and _LEAST <= given <= _MOST:
        return int(given)
    raise wrong


def bytes_of(given: str) -> int | None:
    """Bytes of a text such as "20GiB" or "1.5 TiB"; None for another, or above 1 EiB."""
    # Digits of other scripts are digits to \d and float.
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(MiB|GiB|TiB)", given)
    size = None if found is None else int(float(found[1]) * _BYTES[found[2]])
    return size if size is None or size <= _MOST else None


def _told(given: Any) -> str:
    """`repr`, which Python refuses of integers of thousands of digits."""
    if isinstance(given, int) and abs(given) > _MOST:
        return f"an integer of {given.bit_length():,} bits"
    return quoted(given)
