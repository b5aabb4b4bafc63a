"""What a call can end with; the same classes over the network and on a local index.

DualformError                     base of all errors of dualform, those of other parts included; has
│                                 .code, .reason, .field, .retry_after, .request_id
├── InvalidArgumentError          the question is wrong; .field names the argument
│   └── CallError                 called with wrong arguments; a TypeError too
├── NotFoundError                 no such index or layer
│   └── UnknownColumnError        of an answer's columns; a KeyError too
├── FailedPreconditionError       right question, wrong index for it (no values, damaged, closed)
├── UnauthenticatedError          no token, or one that the server does not know
├── PermissionDeniedError         a proxy lets the call not through (HTTP 403)
├── ResourceExhaustedError        over one of the server's limits, or its queue is full
├── DataLossError                 a damaged file
├── UnavailableError              no server there
├── DeadlineExceededError         not done within timeout=
├── CancelledError                given up before the end
├── UnimplementedError            the server is older than this client
└── InternalError                 anything else: a defect, please report it; with reason BAD_ANSWER
                                  an answer that can't be one to what was asked

Tried again, within the caller's one deadline: UNAVAILABLE, and RESOURCE_EXHAUSTED where the server
says when to come back (`retry_after`). See `Retry`.
"""

from __future__ import annotations

from dualform._errors import DualformError as DualformError


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


_KINDS: dict[str, type[DualformError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        NotFoundError,
        FailedPreconditionError,
        UnauthenticatedError,
        PermissionDeniedError,
        ResourceExhaustedError,
        DataLossError,
        UnavailableError,
        DeadlineExceededError,
        CancelledError,
        UnimplementedError,
        InternalError,
    )
}


def error_from_code(
    code: str,
    message: str,
    *,
    reason: str | None = None,
    field: str | None = None,
    retry_after: float | None = None,
    request_id: str | None = None,
) -> DualformError:
    """The error of a canonical gRPC code, by its name such as "NOT_FOUND"."""
    kind = _KINDS.get(code)
    if kind is None:
        kind, message = InternalError, f"{code}: {message}"
    error = kind(message, reason=reason, field=field, retry_after=retry_after)
    error.request_id = request_id
    return error


def bad_answer(what: str) -> InternalError:
    """An answer that can't be one to what was asked; nothing of it is given to the caller."""
    return InternalError(
        f"the answer is wrong: {what}; is that a dualform server, of a version that goes with this "
        "client (ask with its own), and does all that stands between leave answers as they are?",
        reason=BAD_ANSWER,
    )


BAD_ANSWER = "BAD_ANSWER"
