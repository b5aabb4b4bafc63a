"""What somebody who may write files can do to them: changed fields, sealed again, and odd files."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dualform.store.files import write_sealed

NASTY: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    10**9,
    2**63,
    10**400,
    -1.5,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "a\0b",
    "\ud800",
    [],
    {},
    [[]],
    [-1, 10**9],
    [[0, 1]],
    {"name": "/dev/zero", "bytes": 0, "xxh3": "0" * 16},
]


def mutated(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every change of one field of a sealed JSON file: what it is, and what makes it.

    Of long lists the first and the last item are changed; lists are also emptied, doubled, cut and
    turned around. The file is to be restored after each.
    """
    original = json.loads(path.read_bytes())
    original.pop("xxh3")
    for where in _places(original):
        *above, last = where
        holder = original
        for part in above:
            holder = holder[part]
        old = holder[last]
        changes = [value for value in NASTY if value != old or type(value) is not type(old)]
        if isinstance(old, list) and len(old) > 1:
            changes += [old[::-1], old[:-1], old + old[-1:]]
        if isinstance(old, (int, float)) and not isinstance(old, bool):
            changes += [old + 1, old - 1, old * 2, old / 2]
        for value in (*changes, ...):
            yield f"{where} = {value!r:.60}", _writer(path, original, where, value)


def odd_files(file: Path, outside: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Everything but a regular file that can stand in a file's place."""
    outside.write_bytes(file.read_bytes())
    yield "a link", lambda: file.symlink_to(outside)
    yield "a link to a device", lambda: file.symlink_to("/dev/zero")
    yield "a pipe", lambda: os.mkfifo(file)
    yield "a folder", lambda: file.mkdir()
    yield "a link to itself", lambda: file.symlink_to(file.name)
    yield "a socket", lambda: _socket(file)


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = sorted({0, len(value) - 1}) if value else []
    else:
        return
    for key in keys:
        yield (key,)
        for below in _places(value[key]):
            yield (key, *below)


def _writer(path: Path, original: Any, where: tuple[Any, ...], value: Any) -> Callable[[], None]:
    def write() -> None:
        data = copy.deepcopy(original)
        holder = data
        for part in where[:-1]:
            holder = holder[part]
        if value is ...:
            del holder[where[-1]]
        else:
            holder[where[-1]] = value
        write_sealed(path, data)

    return write


def _socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as place:
            place.bind(file.name)
    finally:
        os.chdir(here)
