"""A user's model as commands take it: "FILE.py:FUNCTION", a function that gives it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from dualform.client.errors import InvalidArgumentError


def call_function(spec: str, *, gives: str) -> Any:
    """What the function of "FILE.py:FUNCTION" gives, called without arguments.

    The file is run as if it were a script, but for its `__name__`: modules beside it are found.

    Args:
        spec: The file's path, and the function's name behind the last colon.
        gives: What is expected of it, for the error that says what a spec is.

    Raises:
        InvalidArgumentError: No such file or function, or it fails.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise InvalidArgumentError(
            f"{spec!r} is no FILE.py:FUNCTION, such as train.py:trained; the function returns "
            f"{gives}",
            field="model",
        )
    if not path.is_file():
        raise InvalidArgumentError(f"{path} is not there", field="model")
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        function = _run(path).get(name)
        if callable(function):
            return function()
    except (Exception, SystemExit) as error:  # a script may end itself
        raise InvalidArgumentError(
            f"{spec} failed: {type(error).__name__}: {error}", field="model"
        ) from error
    finally:
        sys.path.remove(folder)
    raise InvalidArgumentError(f"{path} has no function {name!r}", field="model")


def _run(path: Path) -> dict[str, Any]:
    """The names that a file defines."""
    # Dataclasses and pickle look their module up; one that is loaded already keeps its name.
    called = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent}"
    found = importlib.util.spec_from_file_location(called, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[called] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[called]
        raise
    return vars(module)
