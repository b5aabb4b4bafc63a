"""What a call can end with; the same classes over the network and on a local index.

DualformError                     base of all; has .code, .reason, .field and .retry_after
├── InvalidArgumentError          the question is wrong; .field names the argument
│   └── CallError                 called with wrong arguments; a TypeError too
├── NotFoundError                 no such index or layer
│   └── UnknownColumnError        of an answer's columns; a KeyError too
├── FailedPreconditionError       right question, wrong index for it (no values, damaged, closed)
├── UnauthenticatedError          no token, or one that the server does not know
├── PermissionDeniedError         a token that may not ask this index
├── ResourceExhaustedError        over one of the server's limits, or its queue is full
├── DataLossError                 a damaged file
├── UnavailableError              no server there
├── DeadlineExceededError         not done within timeout=
├── CancelledError                given up before the end
├── UnimplementedError            the server is older than this client
└── InternalError                 anything else: a defect, please report it

Tried again, within the caller's one deadline: UNAVAILABLE, and RESOURCE_EXHAUSTED where the server
says when to come back (`retry_after`). See `Retry`.
"""

from __future__ import annotations

from typing import ClassVar


class DualformError(Exception):
    """Base of everything that a client raises.

    Args:
        message: What was given, what is allowed, how to get there.
        reason: Stable UPPER_SNAKE_CASE word for programs; the code where none was sent.
        field: The argument or request field at fault, such as "queries" or "where", if one is.
        retry_after: Seconds after which the server says that asking again may help, if it does.
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

    def __str__(self) -> str:
        # A KeyError among the bases would show the message in quotes.
        return str(self.args[0]) if self.args else ""


class InvalidArgumentError(DualformError):
    """The question is wrong; `field` names the argument."""

    code = "INVALID_ARGUMENT"


class CallError(InvalidArgumentError, TypeError):
    """A method was called without an argument that it needs, or with one that it does not have."""


class NotFoundError(DualformError):
    """No such index or layer."""

    code = "NOT_FOUND"


class UnknownColumnError(NotFoundError, KeyError):
    """An answer has no such column."""


class FailedPreconditionError(DualformError):
    """Right question, wrong index for it; or the client is closed."""

    code = "FAILED_PRECONDITION"


class UnauthenticatedError(DualformError):
    """The server wants a token, or does not know the one it got."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(DualformError):
    """The token is known, and may not ask this."""

    code = "PERMISSION_DENIED"


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
    code: str,
    message: str,
    *,
    reason: str | None = None,
    field: str | None = None,
    retry_after: float | None = None,
) -> DualformError:
    """The error of a canonical gRPC code, by its name such as "NOT_FOUND"."""
    for kind in DualformError.__subclasses__():
        if kind.code == code:
            return kind(message, reason=reason, field=field, retry_after=retry_after)
    return InternalError(f"{code}: {message}", reason=reason, field=field)
