"""Memory, admitted before it is taken: what questions, requests and answers may hold together.

What a question needs at most is estimated (`dualform.engine.messages.needs`) and promised to it
before it begins; what the promises of all add up to stays below the limit, beside what the process
holds anyway. Mapped files do not count: the system takes their pages back when it needs them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dualform.engine.errors import ResourceExhaustedError
from dualform.serve.config import ConfigError
from dualform.serve.memory import anonymous_bytes, heap

MIB = 1 << 20
LEAST = 64 * MIB
"""So much must be left for questions, or the limit is a mistake."""
_AGAIN_S = 1.0
_WINDOW_S = 10.0


class MemoryBudget:
    """Promises memory up to a limit; thread-safe.

    Args:
        limit: Bytes of this process that no file backs; None promises everything.
        aside: Bytes of these that are kept for what nobody asks for: messages that are read.
        used: How many bytes the process holds now.
    """

    def __init__(
        self, limit: int | None, aside: int = 0, used: Callable[[], int] = anonymous_bytes
    ) -> None:
        self.limit = limit
        self._aside = aside
        self._used = used
        self._lock = threading.Lock()
        self._promised = 0
        # The most that was there beside the promises, in this window of time and in the last.
        self._beside, self._before, self._until = 0, 0, 0.0
        # The least that ever was: what is above it may go again, such as messages on their way in.
        self._least: int | None = None
        self._mine = threading.local()

    @property
    def promised(self) -> int:
        """Bytes that are promised now."""
        return self._promised

    def check(self) -> None:
        """Hold the limit against what the process needs before anybody asks.

        Raises:
            ConfigError: Nothing would be left for questions.
        """
        if self.limit is None:
            return
        heap.give_back()
        base = self._least = self._used()
        least = base + self._aside + LEAST
        if least > self.limit:
            raise ConfigError(
                f"memory is {self.limit / MIB:,.0f} MiB, and {base / MIB:,.0f} MiB are in use with "
                f"the indexes open; with {self._aside / MIB:,.0f} MiB for messages that are read "
                f"(8 x limits.max_message_mib) at least {-(-least // MIB):,}MiB are needed"
            )

    def take(self, size: int) -> None:
        """Promise so many bytes; within `lease` they are given back at its end.

        Raises:
            ResourceExhaustedError: They are not there: with `retry_after` where others have them,
                without where they never will be.
        """
        if self.limit is None or size <= 0:
            return
        with self._lock:
            base = self._now()
            if base + self._promised + size > self.limit:
                heap.give_back(always=True)
                base = self._now()
            if base + self._promised + size > self.limit:
                raise self._refusal(base, size)
            self._promised += size
        if getattr(self._mine, "held", None) is not None:
            self._mine.held += size

    def hold(self, size: int) -> None:
        """Count so many bytes that are there already; `give` them back."""
        if self.limit is not None:
            with self._lock:
                self._now()
                self._promised += size

    def give(self, size: int) -> None:
        """So many bytes, taken or held, are needed no more."""
        if self.limit is not None:
            with self._lock:
                self._promised -= size

    @contextmanager
    def lease(self) -> Iterator[None]:
        """What this thread takes meanwhile is given back at the end."""
        self._mine.held = 0
        try:
            yield
        finally:
            self.give(self._mine.held)
            self._mine.held = None

    def _now(self) -> int:
        """What the process holds beside what was promised."""
        beside, now = self._used() - self._promised, time.monotonic()
        if not self._promised:
            self._beside = self._before = beside
            self._least = beside if self._least is None else min(self._least, beside)
        elif now > self._until:
            self._before, self._beside, self._until = self._beside, beside, now + _WINDOW_S
        # What is promised may not have been taken yet, so this is too little at times.
        self._beside = max(self._beside, beside)
        return max(self._beside, self._before) + self._aside

    def _refusal(self, base: int, size: int) -> ResourceExhaustedError:
        assert self.limit is not None
        left = max(0, self.limit - base)
        what = f"up to {_mib(size)} MiB of memory would be needed"
        least = base if self._least is None else self._least + self._aside
        if size > self.limit - least:
            left = max(0, self.limit - least)
            return ResourceExhaustedError(
                f"{what}, and of the {_mib(self.limit)} allowed (`memory` in the server's "
                f"configuration) {_mib(left)} are left for questions, beside what is in use and "
                f"{_mib(self._aside)} for messages that are read: ask for less at a time, with "
                "fewer queries, a smaller k, or fewer groups",
                reason="MEMORY_LIMIT",
            )
        free = max(0, left - self._promised)
        return ResourceExhaustedError(
            f"{what}, and of the {_mib(self.limit)} allowed (`memory` in the server's "
            f"configuration) {_mib(free)} are free just now: ask again in {_AGAIN_S:.1f} s",
            reason="MEMORY_LIMIT",
            retry_after=_AGAIN_S,
        )


def _mib(size: int) -> str:
    return f"{max(1, round(size / MIB)):,}"
