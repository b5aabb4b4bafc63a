"""The user's own model, to ask about what it is given: what its layers see, and what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.client import (
    Client,
    DualformError,
    InvalidArgumentError,
    NotFoundError,
    capture_queries,
    dual_form,
)
from dualform.client.model_file import call_function
from dualform.explore.keys import plain

Payload = bytes | str
Opens = Callable[[], Client]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Logits:
    """What a model says of one input.

    Attributes:
        values: float32 [classes].
        token: Of a model of sequences, whose they are; None of another.
    """

    values: npt.NDArray[np.float32]
    token: int | None


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model, and where its inputs come from: from what was kept or uploaded, or its own.

    Attributes:
        module: The trained `torch.nn.Module`.
        prepare: From bytes of a picture, or a text, to what the module's forward takes: one
            argument, a tuple of several, or a mapping of named ones, of one example. None where
            there are `inputs`.
        inputs: What its forward takes, of all examples to ask about; None where there is `prepare`.
        labels: Their classes; None where they are not known.
        spec: "FILE.py:FUNCTION", for lines to copy.
        turn: Held by whoever runs the module: some runs replace its layers.
    """

    module: Any
    prepare: Callable[[Payload], Any] | None = None
    inputs: Any = None
    labels: Any = None
    spec: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def count(self) -> int:
        """How many inputs it brings."""
        return 0 if self.prepare is not None else _length(self.inputs)

    def numbered(self, number: int) -> Any:
        """One of its own inputs.

        Raises:
            NotFoundError: It has none of this number.
        """
        if not 0 <= number < self.count:
            has = f"it has 0 to {self.count - 1:,}" if self.count else "it brings none of its own"
            raise NotFoundError(f"there is no input {number} of {self.spec}; {has}")
        return _one(self.inputs, number)

    def labelled(self, number: int) -> str:
        """What its own labels say of an input, in words."""
        if self.labels is None or number >= len(self.labels):
            return ""
        return f", label {plain(self.labels[number])}"

    def slicing(self, number: int) -> str:
        """How Python has one of `inputs`."""
        one = f"[{number} : {number + 1}]"
        if isinstance(self.inputs, Mapping):
            return f"{{name: each{one} for name, each in inputs.items()}}"
        if isinstance(self.inputs, tuple):
            return f"tuple(each{one} for each in inputs)"
        return f"inputs{one}"

    def prepared(self, payload: Payload) -> Any:
        """A picture or text as the module takes it.

        Raises:
            InvalidArgumentError: `prepare` fails on it, or there is none.
        """
        if self.prepare is None:
            raise InvalidArgumentError(
                f"{self.spec} brings inputs of its own; for pictures and texts its function "
                "returns (model, prepare)"
            )
        with _users():
            return self.prepare(payload)

    async def queries(
        self, inputs: Any, layers: Sequence[str]
    ) -> dict[str, npt.NDArray[np.float32]]:
        """What layers see of one input, float32 [n, d_in]; n is 1, or the places of a sequence.

        Raises:
            InvalidArgumentError: The module fails on it, or lacks such a layer.
        """

        def run() -> dict[str, npt.NDArray[np.float32]]:
            given, named = _arguments(inputs)
            with _users():
                return capture_queries(self.module, *given, layers=list(layers), kwargs=named)

        async with self.turn:
            return await _in_thread(run)

    async def logits(
        self, inputs: Any, token: int | None, opens: Opens | None = None, **how: Any
    ) -> Logits:
        """What it says of one input, as it is or in dual form.

        Args:
            inputs: As the module takes them.
            token: Of a model of sequences, whose logits; None for the last.
            opens: Who answers for its layers; None runs it as it is.
            how: `where`, `at_step` and `index`, as for `dual_form`.

        Raises:
            InvalidArgumentError: The module fails on it, or what it gives is no logits.
            DualformError: Whatever `dual_form` refuses.
        """

        def run() -> Logits:
            with _users():
                if opens is None:
                    return _logits(self.module, inputs, token)
                with opens() as client, dual_form(self.module, client, **how):
                    return _logits(self.module, inputs, token)

        async with self.turn:
            return await _in_thread(run)


def load_model(spec: str) -> Model:
    """The model of "FILE.py:FUNCTION".

    The function takes nothing and returns (model, prepare), (model, inputs) or (model, inputs,
    labels).

    Raises:
        InvalidArgumentError: No such file or function, or it fails, or returns something else.
    """
    given = call_function(spec, gives="(model, prepare) or (model, inputs)")
    if isinstance(given, tuple) and len(given) == 2 and callable(given[1]):
        return Model(given[0], given[1], spec=spec)
    if isinstance(given, tuple) and len(given) in (2, 3) and _length(given[1]):
        model, inputs, *labels = given
        if labels:
            _check_labels(spec, inputs, labels[0])
        return Model(model, None, inputs, labels[0] if labels else None, spec)
    raise InvalidArgumentError(
        f"{spec} returned {type(given).__name__}; (model, prepare) is needed, where prepare makes "
        "the model's input of a picture's bytes or of a text, or (model, inputs) or (model, "
        "inputs, labels)",
        field="model",
    )


def _check_labels(spec: str, inputs: Any, labels: Any) -> None:
    """Refuse labels that are not one for each input; None is for none."""
    if labels is None:
        return
    try:
        count = len(labels)
    except TypeError:  # a number, or a tensor of one
        count = None
    if count != _length(inputs):
        given = type(labels).__name__ if count is None else f"{count:,}"
        raise InvalidArgumentError(
            f"{spec} returned {_length(inputs):,} inputs, and for labels {given}; one label for "
            "each input is needed, or (model, inputs) without labels",
            field="model",
        )


@contextmanager
def _users() -> Any:
    """What the user's code raises is an error of what it was given."""
    try:
        yield
    except DualformError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"the model does not take it: {type(error).__name__}: {error}"
        ) from error


async def _in_thread(run: Callable[[], T]) -> T:
    """What a thread gives. It can't be stopped, so whoever is cancelled waits for its end: behind
    it the model is as it was."""
    task = asyncio.ensure_future(asyncio.to_thread(run))
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(asyncio.wait([task]))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()
        raise asyncio.CancelledError
    return task.result()


def _logits(module: Any, inputs: Any, token: int | None) -> Logits:
    import torch

    given, named = _arguments(inputs)
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        with torch.no_grad():
            said = module(*given, **named)
    finally:
        for each in training:
            each.training = True
    if isinstance(said, Mapping):
        said = said.get("logits")
    said = getattr(said, "logits", said)
    if not isinstance(said, torch.Tensor) or not 1 <= said.dim() <= 3 or not said.numel():
        shape = list(said.shape) if isinstance(said, torch.Tensor) else type(said).__name__
        raise InvalidArgumentError(
            f"the model gives {shape}; logits [1, classes] or [1, tokens, classes] are shown"
        )
    if said.dim() < 3:
        return Logits(said.reshape(-1).float().cpu().numpy(), None)
    token = said.shape[1] - 1 if token is None or token >= said.shape[1] else token
    return Logits(said[0, token].float().cpu().numpy(), token)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _length(inputs: Any) -> int:
    """How many examples inputs are; 0 where that can't be told."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, tuple):
        return next((_length(each) for each in inputs if _length(each)), 0)
    shape: Any = getattr(inputs, "shape", ())
    return int(shape[0]) if len(shape) else 0


def _one(inputs: Any, number: int) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _one(each, number) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_one(each, number) for each in inputs)
    return inputs[number : number + 1] if _length(inputs) else inputs
