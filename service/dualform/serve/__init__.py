"""The gRPC server around the engine. Importing this package loads neither torch nor FAISS."""

from dualform.serve.command import check, run
from dualform.serve.config import ConfigError, ServerConfig, ServerLimits

__all__ = ["ConfigError", "ServerConfig", "ServerLimits", "check", "run"]
