"""The user's own model, for pictures and texts to ask about: what its layers see of them."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.client import DualformError, InvalidArgumentError, capture_queries

Payload = bytes | str


@dataclass(frozen=True, eq=False)
class Model:
    """A model, and how what was uploaded becomes its input.

    Attributes:
        module: The trained `torch.nn.Module`.
        prepare: From bytes of a picture, or a text, to what the module's forward takes: one
            argument, or a tuple of several, of one example.
    """

    module: Any
    prepare: Callable[[Payload], Any]
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def queries(
        self, payload: Payload, layers: Sequence[str]
    ) -> dict[str, npt.NDArray[np.float32]]:
        """What layers see of it, float32 [n, d_in]; n is 1, or the places of a sequence.

        Raises:
            InvalidArgumentError: `prepare` or the model fails on it, or lacks such a layer.
        """
        try:
            with self._turn:
                inputs = self.prepare(payload)
                several = inputs if isinstance(inputs, tuple) else (inputs,)
                return capture_queries(self.module, *several, layers=list(layers))
        except DualformError:
            raise
        except Exception as error:  # the user's code
            raise InvalidArgumentError(
                f"the model does not take it: {type(error).__name__}: {error}"
            ) from error


def load_model(spec: str) -> Model:
    """The model of "FILE.py:FUNCTION".

    The function takes nothing and returns (model, prepare).

    Raises:
        InvalidArgumentError: No such file or function, or it fails, or returns something else.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise InvalidArgumentError(
            f"{spec!r} is no FILE.py:FUNCTION; the function returns (model, prepare)", field="model"
        )
    if not path.is_file():
        raise InvalidArgumentError(f"{path} is not there", field="model")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)  # as if it were run
    try:
        found.loader.exec_module(module)
        given = getattr(module, name)()
    except (Exception, SystemExit) as error:  # a script may end itself
        raise InvalidArgumentError(
            f"{spec} failed: {type(error).__name__}: {error}", field="model"
        ) from error
    finally:
        sys.path.remove(folder)
    if not isinstance(given, tuple) or len(given) != 2 or not callable(given[1]):
        raise InvalidArgumentError(
            f"{spec} returned {type(given).__name__}; (model, prepare) is needed, where prepare "
            "makes the model's input of a picture's bytes or of a text",
            field="model",
        )
    return Model(*given)
