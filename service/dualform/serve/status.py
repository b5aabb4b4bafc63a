"""How a refusal travels: a canonical code, a message, and details that programs can read.

Details are `google.rpc.ErrorInfo` (domain "dualform", a stable reason) and, where one field of the
request is at fault, `google.rpc.BadRequest`, inside the `google.rpc.Status` of the trailers.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from dualform.engine.errors import EngineError

DOMAIN = "dualform"
# A message travels three times, partly percent-encoded, in trailers that clients cap at 8 KiB.
_MAX_BYTES = 1024


def rich_status(error: EngineError) -> status_pb2.Status:
    """The `google.rpc.Status` of a refusal."""
    message = _shorten(str(error))
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shorten(error.field), description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def internal_error(ticket: str) -> EngineError:
    """What a caller learns of a bug: nothing but where the log tells more."""
    return EngineError(f"internal error {ticket}: the server's log has the details under this word")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: EngineError) -> None:
    """End the call with this refusal; raises gRPC's own exception."""
    status = rpc_status.to_status(rich_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _shorten(text: str) -> str:
    data = text.encode()
    if len(data) <= _MAX_BYTES:
        return text
    return data[: _MAX_BYTES - 3].decode(errors="ignore") + "…"
