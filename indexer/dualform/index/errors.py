"""What can be wrong with what a build is asked for; what is wrong with files is a StoreError."""

from __future__ import annotations

from dualform._errors import DualformError


class BuildError(DualformError, ValueError):
    """A recording can't be indexed as asked; the message says what to do next."""
