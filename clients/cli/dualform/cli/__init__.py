"""The `dualform` command; importing it loads neither torch nor grpc."""

from dualform.cli.main import main, program

__all__ = ["main", "program"]
