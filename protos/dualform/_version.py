"""The version, here and nowhere else: pyproject.toml and `dualform.__version__` read it."""

__version__ = "0.1.0"
