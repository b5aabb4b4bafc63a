"""Wrong calls as errors of this package: an argument that is missing, or that does not exist."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dualform.client.errors import CallError

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
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return await function(*args, **kwargs)

    return cast(Function, awaited if inspect.iscoroutinefunction(function) else call)


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
