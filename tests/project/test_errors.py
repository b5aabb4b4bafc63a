"""All errors are one hierarchy: whatever dualform raises by its own name is a DualformError."""

from __future__ import annotations

import importlib
import inspect

import pytest

import dualform.client
from dualform._errors import DualformError
from dualform.index import BuildError
from dualform.layers import ShapeError, UnsupportedModuleError
from dualform.questions import QuestionError
from dualform.record.errors import OptimizerError
from dualform.serve import ConfigError

from .test_layout import FOLDERS, ROOT


def exceptions() -> set[type[Exception]]:
    """Every public exception that any module of any package defines."""
    found: set[type[Exception]] = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder / "dualform").rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] in ("__init__", "__main__"):
                continue
            module = importlib.import_module(".".join(parts))
            found |= {
                kind
                for name, kind in vars(module).items()
                if inspect.isclass(kind)
                and issubclass(kind, Exception)
                and kind.__module__ == module.__name__
                and not name.startswith("_")
                and not issubclass(kind, Warning)
            }
    return found


def test_every_public_exception_is_a_dualform_error() -> None:
    found = exceptions()
    packages = {kind.__module__.split(".")[1] for kind in found}
    assert packages >= {"store", "record", "index", "layers", "replay", "engine", "serve", "client"}
    assert not [kind for kind in found if not issubclass(kind, DualformError)]


def test_the_client_has_the_same_base() -> None:
    assert dualform.client.DualformError is DualformError


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (BuildError, ValueError),
        (ConfigError, ValueError),
        (QuestionError, ValueError),
        (ShapeError, ValueError),
        (UnsupportedModuleError, ValueError),
        (OptimizerError, TypeError),
    ],
)
def test_what_was_a_builtin_error_still_is(kind: type[Exception], builtin: type) -> None:
    assert issubclass(kind, builtin)
