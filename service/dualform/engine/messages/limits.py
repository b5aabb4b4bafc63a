"""What one request may ask for, checked before anything is allocated for its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dualform.engine.errors import ResourceExhaustedError

_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        max_k: Largest k of a top-k.
        max_queries: Most queries, and most example ids, in one request.
        max_message_mib: Largest request and response, in MiB.
        take: Told how many bytes of memory an answer takes at most before it is computed; raises
            ResourceExhaustedError where they are not there. None for no limit.

    Raises:
        ValueError: Not a positive integer, or a message beyond protobuf's 2 GiB.
    """

    max_k: int = 16384
    max_queries: int = 4096
    max_message_mib: int = 64
    take: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        for name, most in (("max_k", 2**31), ("max_queries", 2**31), ("max_message_mib", 2047)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; allowed are integers from 1 to {most:,}")

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_mib * _MIB

    def check_k(self, k: int) -> None:
        """Refuse more rows per query than are returned."""
        if k > self.max_k:
            raise ResourceExhaustedError(
                f"k is {k:,}; at most {self.max_k:,} rows are returned per query: "
                "ask for fewer, or use sums for totals over all rows",
                field="k",
            )

    def check_queries(self, n: int) -> None:
        """Refuse more queries than one request may hold."""
        if n > self.max_queries:
            raise ResourceExhaustedError(
                f"{n:,} queries in one request; at most {self.max_queries:,} are answered: "
                "send them in smaller batches",
                field="queries",
            )

    def check_answer(self, size: int, remedy: str) -> None:
        """Refuse an answer of `size` bytes that no message can hold.

        Args:
            size: Bytes, known or foreseen.
            remedy: How to ask for less.

        Raises:
            ResourceExhaustedError: With the reason ANSWER_TOO_LARGE.
        """
        if size > self.max_message_bytes:
            raise ResourceExhaustedError(
                f"the answer would be up to {size:,} bytes, and a message holds at most "
                f"{self.max_message_bytes:,}: {remedy}",
                reason="ANSWER_TOO_LARGE",
            )

    def check_answers(self, n: int, per_query: int, otherwise: str, beside: int = 0) -> None:
        """`check_answer` for n queries of `per_query` bytes each, saying how many would fit.

        Args:
            n: Queries in the request.
            per_query: Bytes that each adds to the answer.
            otherwise: Another way to ask for less, such as "with a smaller k".
            beside: Bytes that are there once, however many queries.
        """
        fits = max(0, self.max_message_bytes - beside) // max(
            1, per_query
        )  # nothing where there is no group
        remedy = f"ask with at most {fits:,} queries at a time, or {otherwise}"
        if fits == 0:
            remedy = f"not even one query's answer fits; ask {otherwise}"
        self.check_answer(beside + n * per_query, remedy)
