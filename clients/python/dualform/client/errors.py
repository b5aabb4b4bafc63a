"""What a call can end with; the same classes over the network and on a local index.

DualformError                     base of all; has .code, .reason and .field
├── InvalidArgumentError          the question is wrong; .field names the argument
├── NotFoundError                 no such index or layer
├── FailedPreconditionError       right question, wrong index for it (no values, damaged, closed)
├── ResourceExhaustedError        over one of the server's limits, or its queue is full
├── DataLossError                 a damaged file
├── UnavailableError              no server there; the one error that is retried
├── DeadlineExceededError         not done within timeout=
├── CancelledError                given up before the end
├── UnimplementedError            the server is older than this client
└── InternalError                 anything else: a defect, please report it
"""

from __future__ import annotations

from typing import ClassVar


class DualformError(Exception):
    """Base of everything that a client raises.

    Args:
        message: What was given, what is allowed, how to get there.
        reason: Stable UPPER_SNAKE_CASE word for programs; the code where none was sent.
        field: The argument or request field at fault, such as "queries" or "where", if one is.
    """

    code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.code
        self.field = field


class InvalidArgumentError(DualformError):
    """The question is wrong; `field` names the argument."""

    code = "INVALID_ARGUMENT"


class NotFoundError(DualformError):
    """No such index or layer."""

    code = "NOT_FOUND"


class FailedPreconditionError(DualformError):
    """Right question, wrong index for it; or the client is closed."""

    code = "FAILED_PRECONDITION"


class ResourceExhaustedError(DualformError):
    """Over one of the server's limits, or its queue is full."""

    code = "RESOURCE_EXHAUSTED"


class DataLossError(DualformError):
    """A file of the index is damaged."""

    code = "DATA_LOSS"


class UnavailableError(DualformError):
    """No server answered; raised after the retries are used up."""

    code = "UNAVAILABLE"


class DeadlineExceededError(DualformError):
    """The answer was not there within `timeout` seconds."""

    code = "DEADLINE_EXCEEDED"


class CancelledError(DualformError):
    """The call was given up before the end."""

    code = "CANCELLED"


class UnimplementedError(DualformError):
    """The server does not know this question: it is older than the client."""

    code = "UNIMPLEMENTED"


class InternalError(DualformError):
    """A defect in the server or the client."""

    code = "INTERNAL"


def error_from_code(
    code: str, message: str, *, reason: str | None = None, field: str | None = None
) -> DualformError:
    """The error of a canonical gRPC code, by its name such as "NOT_FOUND"."""
    for kind in DualformError.__subclasses__():
        if kind.code == code:
            return kind(message, reason=reason, field=field)
    return InternalError(f"{code}: {message}", reason=reason, field=field)
