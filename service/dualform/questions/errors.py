"""What is wrong with a question, whoever asks it: client and engine make their own errors of it."""

from __future__ import annotations

from dualform._errors import DualformError


class QuestionError(DualformError, ValueError):
    """A question that no index could answer.

    Args:
        message: What was given, what is allowed, how to get there.
        field: The question's field at fault.
        reason: Stable UPPER_SNAKE_CASE word for programs; INVALID_ARGUMENT where none is given.
    """

    code = "INVALID_ARGUMENT"
    field: str

    def __init__(self, message: str, *, field: str, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, field=field)
