"""What a question can be refused with; each maps to one canonical gRPC code.

EngineError                   a DualformError
├── InvalidArgumentError      INVALID_ARGUMENT     names the request's field
├── NotFoundError             NOT_FOUND
├── FailedPreconditionError   FAILED_PRECONDITION  right question, wrong index for it
├── ResourceExhaustedError    RESOURCE_EXHAUSTED   over a limit
├── DataLossError             DATA_LOSS            a damaged file
└── CancelledError            CANCELLED            the caller gave up
"""

from __future__ import annotations

import errno
from typing import ClassVar

from dualform._errors import DualformError


class EngineError(DualformError):
    """Base of all refusals.

    Args:
        message: What was given, what is allowed, how to get there.
        field: The request's field at fault, such as "queries" or "where", if it is one field.
        reason: Stable UPPER_SNAKE_CASE word for programs (google.rpc.ErrorInfo.reason).
        retry_after: Seconds after which asking again makes sense, if it does.
    """

    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(
            message,
            reason=reason or self.default_reason,
            field=field,
            retry_after=retry_after,
        )

    def detached(self) -> EngineError:
        """The same refusal without traceback, cause and context, to be kept.

        A traceback holds every frame that it went through, and with them the request; kept by one
        of these frames, it is a cycle that only the garbage collector ends.
        """
        return self.saying(str(self))

    def saying(self, message: str) -> EngineError:
        """The same refusal in other words."""
        return type(self)(
            message, field=self.field, reason=self.reason, retry_after=self.retry_after
        )


class InvalidArgumentError(EngineError):
    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_ARGUMENT"


class NotFoundError(EngineError):
    code = "NOT_FOUND"
    default_reason = "NOT_FOUND"


class FailedPreconditionError(EngineError):
    code = "FAILED_PRECONDITION"
    default_reason = "FAILED_PRECONDITION"


class ResourceExhaustedError(EngineError):
    code = "RESOURCE_EXHAUSTED"
    default_reason = "LIMIT_EXCEEDED"


class DataLossError(EngineError):
    code = "DATA_LOSS"
    default_reason = "DAMAGED"


class CancelledError(EngineError):
    code = "CANCELLED"
    default_reason = "CANCELLED"


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this is a failed allocation: Python's, NumPy's, Arrow's, the system's, or torch's.

    torch's own are RuntimeErrors, told by their class on a GPU and by their words on the CPU.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


_NO_MEMORY = (
    "DefaultCPUAllocator: ",  # "can't allocate memory", "not enough memory": it says nothing else
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",  # FAISS
    "Failed to cudaMalloc",  # FAISS on a GPU
    "StandardGpuResources: alloc fail",
    "CUDA memory allocation error",  # FAISS with cuVS
)
