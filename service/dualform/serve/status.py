"""How a refusal travels: a canonical code, a message, and details that programs can read.

Details are `google.rpc.ErrorInfo` (domain "dualform", a stable reason), `google.rpc.RequestInfo`
(the call's id) and, where one field of the request is at fault, `google.rpc.BadRequest`, or where
asking again makes sense `google.rpc.RetryInfo`, inside the `google.rpc.Status` of the trailers.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from dualform.engine.errors import EngineError
from dualform.questions.quoted import unicode

DOMAIN = "dualform"
REQUEST_ID = "x-request-id"
"""Metadata: taken from the caller where it is a short word, made otherwise, returned always."""
# A message travels three times, partly percent-encoded, in trailers that clients cap at 8 KiB.
_MAX_BYTES = 1024

_LOG = logging.getLogger("dualform.serve")
T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """What a caller is told instead of an answer.

    A value, not an exception: it travels from a scan's thread to the caller through futures, and an
    exception would take the frames that hold the request along.

    Attributes:
        code: Canonical gRPC code, upper case.
        message: What was given, what is allowed, how to get there.
        reason: Stable word for programs.
        field: The request's field at fault, if it is one.
        retry_after: Seconds after which asking again makes sense, if it does.
        ticket: Word under which the log has the details of a bug.
    """

    code: str
    message: str
    reason: str
    field: str | None = None
    retry_after: float | None = None
    ticket: str | None = None

    @classmethod
    def of(cls, error: EngineError) -> Refusal:
        """What the caller learns of a refusal by the engine; the error's frames are let go."""
        _forget(error)
        return cls(error.code, str(error), error.reason, error.field, error.retry_after)

    @classmethod
    def internal(cls, ticket: str) -> Refusal:
        """What the caller learns of a bug: nothing but where the log tells more."""
        message = f"internal error {ticket}: the server's log has the details under this word"
        return cls("INTERNAL", message, "INTERNAL", ticket=ticket)


def busy(what: str, retry_after: float = 1.0) -> Refusal:
    """A refusal because of what others asked; `retry_after` seconds later it may be different."""
    return Refusal(
        "RESOURCE_EXHAUSTED",
        f"the server is busy: {what}; ask again in {retry_after:.1f} s, or raise the limit in the "
        "server's configuration",
        "QUEUE_FULL",
        retry_after=retry_after,
    )


def or_refusal(what: str, work: Callable[[], T]) -> T | Refusal:
    """What `work` returns, or its exception as a refusal; a bug goes to the log under `what`."""
    try:
        return work()
    except EngineError as error:
        return Refusal.of(error)
    except Exception:
        return bug(what)


def bug(what: str) -> Refusal:
    """The exception that is being handled as a refusal; its traceback goes to the log, and away."""
    ticket = secrets.token_hex(4)
    _LOG.exception("%s failed [%s]", what, ticket)
    _forget(sys.exc_info()[1])
    return Refusal.internal(ticket)


def _forget(error: BaseException | None) -> None:
    """Let go of the frames that an exception, and what it was raised for, would keep.

    One on the way may hold the exception itself, as contextlib's does in Python 3.12 where an error
    becomes another: the request would then stay until the garbage collector comes by.
    """
    todo = [error]
    while todo:
        each = todo.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            todo += [each.__context__, each.__cause__]


def rich_status(refusal: Refusal, request_id: str | None = None) -> status_pb2.Status:
    """The `google.rpc.Status` of a refusal, of the call with this id."""
    message = _shorten(refusal.message)
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN)]
    if request_id is not None:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    if refusal.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shorten(refusal.field), description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(1, round(refusal.retry_after * 1000)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_pb2.Code.Value(refusal.code), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def refuse(
    context: grpc.aio.ServicerContext[Any, Any],
    refusal: Refusal,
    request_id: str | None = None,
) -> None:
    """Let the call end with this refusal once its handler returns.

    Trailing metadata and details name the call by `request_id`.

    `context.abort` would raise an exception that the call's own state keeps, and with it, until the
    garbage collector comes by, the frame that holds the request.
    """
    status = rpc_status.to_status(rich_status(refusal, request_id))
    metadata = () if request_id is None else ((REQUEST_ID, request_id),)
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata((*metadata, *status.trailing_metadata))


def _shorten(text: str) -> str:
    data = unicode(text).encode()
    if len(data) <= _MAX_BYTES:
        return data.decode()
    return data[: _MAX_BYTES - 3].decode(errors="ignore") + "…"
