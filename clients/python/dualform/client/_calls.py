"""Wrong calls as errors of this package: arguments that are missing, do not exist, or are wrong."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from dualform.client.errors import CallError, InvalidArgumentError
from dualform.questions import QuestionError

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)


def checked_call(function: Function) -> Function:
    """`function`, with CallError, which says what it takes, for Python's bare TypeError."""
    signature = inspect.signature(function)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            names = [name for name in signature.parameters if name not in ("self", "cls")]
            place = re.search(r"'(\w+)'", str(error))
            raise CallError(
                f"{function.__qualname__}: {error}; it takes {', '.join(names)}",
                field=place[1] if place else None,
            ) from None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        with _refusals():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        with _refusals():
            return await function(*args, **kwargs)

    # What torch.compiler.disable sets, without torch: the call itself is not translated either.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(Function, awaited if inspect.iscoroutinefunction(function) else call)


@contextmanager
def _refusals() -> Iterator[None]:
    """Make the client's error of what is wrong with a question."""
    try:
        yield
    except QuestionError as error:
        raise InvalidArgumentError(str(error), field=error.field, reason=error.reason) from None


def outside_compiled_code(function: Function) -> Function:
    """`function`, run as it is where torch.compile would otherwise translate it: it asks a server.

    What compiles a whole function at once (`fullgraph=True`) is told so by torch.
    """
    dynamo = sys.modules.get("torch._dynamo")  # not loaded: nothing is compiled
    return function if dynamo is None else dynamo.disable(function)


def checked_calls(kind: Kind) -> Kind:
    """A class with `checked_call` around all that its users call."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod):
            setattr(kind, name, classmethod(checked_call(member.__func__)))
        elif inspect.isfunction(member):
            setattr(kind, name, checked_call(member))
    return kind
