"""Recorders that nobody closed: closed as the program ends, while its threads still run."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Closable(Protocol):
    """What `closed_in_the_end` takes."""

    def close_at_exit(self) -> None:
        """Close, unless that was done; errors are logged."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def closed_in_the_end(closable: Closable) -> None:
    """See to it that this is closed before the program ends, if it still exists then."""
    _open.add(closable)


@atexit.register
def _close_all() -> None:
    for closable in list(_open):
        closable.close_at_exit()
