"""How often to try again when no server answers, and the one deadline that everything is inside."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

from dualform.client.errors import DeadlineExceededError, InvalidArgumentError


@dataclass(frozen=True)
class Retry:
    """Retries after UNAVAILABLE, and after nothing else.

    The pause before try i is uniformly random up to min(maximum, initial * multiplier**i), and
    never reaches beyond the call's deadline. `Client(server, retry=None)` turns retries off;
    `Client(server, retry=Retry(attempts=20))` waits longer for a server that is starting.

    Args:
        attempts: Tries in all, at least 1.
        initial: Longest first pause, seconds.
        maximum: Longest pause, seconds.
        multiplier: Growth of the longest pause from one try to the next.
    """

    attempts: int = 6
    initial: float = 0.1
    maximum: float = 2.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidArgumentError(
                f"Retry(attempts={self.attempts}): at least 1 try is needed; retry=None means "
                "no second try",
                field="attempts",
            )
        if not (0 <= self.initial <= self.maximum and self.multiplier >= 1):
            raise InvalidArgumentError(
                f"{self}: 0 <= initial <= maximum and multiplier >= 1 are needed", field="retry"
            )

    def pauses(self) -> Iterator[float]:
        """The pauses between the tries, seconds: `attempts - 1` of them."""
        longest = self.initial
        for _ in range(self.attempts - 1):
            yield _RANDOM.uniform(0.0, longest)
            longest = min(self.maximum, longest * self.multiplier)


class Deadline:
    """One point in time for a whole call, retries and parts included.

    Args:
        timeout: Seconds from now; None or infinity for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        number = timeout is None or (isinstance(timeout, Real) and not isinstance(timeout, bool))
        if not number or (timeout is not None and not timeout > 0):
            raise InvalidArgumentError(
                f"timeout={timeout!r}: seconds above 0 are needed (math.inf for no limit)",
                field="timeout",
            )
        self._timeout = None if timeout is None or math.isinf(timeout) else timeout
        self._end = None if self._timeout is None else time.monotonic() + self._timeout

    def remaining(self) -> float | None:
        """Seconds left, or None without a limit.

        Raises:
            DeadlineExceededError: Nothing is left.
        """
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(
                f"no answer within timeout={self._timeout:g} s; give a longer timeout=, or ask "
                "for less (fewer queries, a filter)"
            )
        return left

    def allows(self, pause: float) -> bool:
        """Whether `pause` seconds from now is still before the deadline."""
        return self._end is None or time.monotonic() + pause < self._end


DEFAULT_RETRY = Retry()

# Of our own: seeds and draws of the user's program stay untouched.
_RANDOM = random.Random()
