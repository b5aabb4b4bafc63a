"""The gRPC server around the engine. Importing this package loads neither torch nor FAISS."""

from dualform.serve.command import check, run
from dualform.serve.config import ConfigError, RayActors, ServerConfig, ServerLimits

__all__ = ["ConfigError", "RayActors", "ServerConfig", "ServerLimits", "check", "run"]
