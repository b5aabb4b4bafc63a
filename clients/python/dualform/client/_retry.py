"""How often to try again when no server answers, and the one deadline that everything is inside."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real

from dualform.client.errors import (
    DeadlineExceededError,
    DualformError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)

# The reason of an UNAVAILABLE that trying again can't mend: certificates and protocols disagree.
TLS_REFUSED = "TLS_REFUSED"
# Likewise: what answers there is no gRPC server.
NOT_GRPC = "NOT_GRPC"
# The reason of a DEADLINE_EXCEEDED that is a proxy's.
PROXY_TIMEOUT = "PROXY_TIMEOUT"


@dataclass(frozen=True)
class Retry:
    """Retries after UNAVAILABLE, and after RESOURCE_EXHAUSTED where the server says when to return.

    The pause before try i is uniformly random up to min(maximum, initial * multiplier**i), on top
    of what the server asks for (google.rpc.RetryInfo), and never reaches beyond the call's
    deadline: a call that would have to wait longer fails at once, and so does one that a server
    tells to come back in more than an hour. All questions only read, so none
    is harmed by being asked twice. `Client(server, retry=None)` turns retries off;
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
        for name in ("attempts", "initial", "maximum", "multiplier"):
            value = getattr(self, name)
            kind = Integral if name == "attempts" else Real
            fits = isinstance(value, kind) and not isinstance(value, bool)
            try:
                if not fits or not isfinite(value):
                    raise TypeError
                # NumPy's would make pauses of their own precision.
                plain = int(value) if kind is Integral else float(value)
            except (TypeError, OverflowError):
                raise InvalidArgumentError(
                    f"Retry({name}={value!r}): {'an int' if kind is Integral else 'a number'} is "
                    "needed",
                    field=name,
                ) from None
            object.__setattr__(self, name, plain)
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


def may_help(error: DualformError) -> bool:
    """Whether the same question may be answered a little later."""
    if (error.retry_after or 0.0) > _LONGEST_ASKED_S:
        return False
    if isinstance(error, UnavailableError):
        return error.reason not in (TLS_REFUSED, NOT_GRPC)
    return isinstance(error, ResourceExhaustedError) and error.retry_after is not None


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
        try:
            # A float: gRPC adds it to the time of day, which in a float32 is a minute off.
            left = inf if timeout is None else float(timeout)
        except OverflowError:  # an int of hundreds of digits
            left = inf
        self._timeout = None if left > _FOR_EVER_S else left
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
                f"no answer within timeout={self._timeout:g} s; {WHEN_LATE}"
            )
        return left

    def of_which(self, left: float | None) -> str:
        """Words for an error of a try that had `left` seconds, where that is not what was given."""
        if self._timeout is None or left is None or left > 0.9 * self._timeout:
            return ""
        return f" (of timeout={self._timeout:g} s, tries and parts before it took the rest)"

    def allows(self, pause: float) -> bool:
        """Whether `pause` seconds from now is still before the deadline."""
        return self._end is None or time.monotonic() + pause < self._end


def seconds(number: float) -> str:
    """As in "60" or "0.25"."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


DEFAULT_RETRY = Retry()
# What may help where no answer came in time.
WHEN_LATE = "give a longer timeout=, or ask for less (fewer queries, a filter)"
# Thirty years; gRPC's clocks cannot count much further, and take what is beyond for the past.
_FOR_EVER_S = 1e9

# Nobody waits longer because a server said so, also where the caller set no limit.
_LONGEST_ASKED_S = 3600.0

# The system's: the user's seeds and draws stay untouched, and processes forked from one differ.
_RANDOM = random.SystemRandom()
