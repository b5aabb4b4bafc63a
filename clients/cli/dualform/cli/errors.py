"""What ends a command with exit status 2 and one message."""

from __future__ import annotations


class CommandError(Exception):
    """Bad usage or input; the message says what to do next."""
