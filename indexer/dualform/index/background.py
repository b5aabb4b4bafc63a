"""Work done in a background thread while the build copies on, a few passes behind at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_AHEAD = 16
"""Passes that may wait for their sketches, or to be added up."""


class BackgroundWorker:
    """A thread that works through what is handed to it, a few passes behind at most.

    Leaving it as a context manager waits for it, and raises what it raised.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "dualform-study")
        self._waiting: deque[Future[None]] = deque()

    def submit(self, work: Callable[..., None], *arguments: object) -> None:
        self._waiting.append(self._thread.submit(work, *arguments))
        if len(self._waiting) > _AHEAD:
            self._waiting.popleft().result()

    def __enter__(self) -> BackgroundWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()
