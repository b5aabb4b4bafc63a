"""Exact training-data attribution as a service: parts that lie in seven folders, as one package.

The same file lies in each folder, so that whichever is found first finds the others, and so that
type checkers see all of them (docs/decisions/0015-version.md); the wheel holds it once.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from dualform._version import __version__

__all__ = ["__version__"]
