"""What ends a command with exit status 2 and one message."""

from __future__ import annotations

from dualform._errors import DualformError


class CommandError(DualformError):
    """Bad usage or input; the message says what to do next."""
