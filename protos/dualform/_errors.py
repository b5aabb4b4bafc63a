"""The base of all errors that dualform raises; here, where every part may import it."""

from __future__ import annotations

from typing import ClassVar


class DualformError(Exception):
    """Base of every error that dualform raises, in whatever part.

    Args:
        message: What was given, what is allowed, how to get there.
        reason: Stable UPPER_SNAKE_CASE word for programs; the code where none was sent.
        field: The argument or request field at fault, such as "queries" or "where", if one is.
        retry_after: Seconds after which the server says that asking again may help, if it does.

    Attributes:
        code: The canonical gRPC code; "UNKNOWN" where an error is none of a question's.
        request_id: Under which the server's log has the call that failed; None without a server.
    """

    code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.code
        self.field = field
        self.retry_after = retry_after
        self.request_id: str | None = None

    def __str__(self) -> str:
        # A KeyError among the bases would show the message in quotes.
        return str(self.args[0]) if self.args else ""
