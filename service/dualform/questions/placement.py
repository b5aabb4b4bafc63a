"""The words by which devices are named: what a server's configuration and a local index share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

DEVICE_WORDS = "auto, cpu, cuda, cuda:N, or a list such as [cuda:0, cuda:1]"
GPU_MEMORY = 0.8
_BYTES = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


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
        raise ValueError(f"device is {given!r}; allowed are {DEVICE_WORDS}")
    names = []
    for name in asked:
        found = re.fullmatch(r"cuda(?::(0|[1-9]\d{0,3}))?", name if isinstance(name, str) else "")
        if found is None:
            raise ValueError(f"device is {given!r}; allowed are {DEVICE_WORDS}")
        names.append(f"cuda:{found[1] or 0}")
    if len(set(names)) < len(names):
        raise ValueError(f"device is {given!r}; each GPU may be named once")
    return tuple(names)


def gpu_memory(given: Any) -> float | int:
    """What a `gpu_memory` setting says: a share of each GPU's memory, or bytes.

    Args:
        given: A number above 0 and up to 1; bytes as an integer above 1; or text such as "20GiB".

    Returns:
        A float for a share, an int for bytes.

    Raises:
        ValueError: It is none of these.
    """
    wrong = ValueError(
        f"gpu_memory is {given!r}; say a share of each GPU's memory, above 0 and up to 1, such as "
        "0.8, or how many MiB, GiB or TiB, such as 20GiB"
    )
    if isinstance(given, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB|TiB)", given)
        if found is None or float(found[1]) == 0:
            raise wrong
        return int(float(found[1]) * _BYTES[found[2]])
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise wrong
    if 0 < given <= 1:
        return float(given)
    if isinstance(given, int) and given > 1:
        return given
    raise wrong
