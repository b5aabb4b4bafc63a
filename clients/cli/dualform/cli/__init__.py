"""The `dualform` command; importing it loads neither torch nor grpc."""

import dualform.cli.first_signals  # noqa: F401 (before all others)
from dualform.cli.main import main, program

__all__ = ["main", "program"]
