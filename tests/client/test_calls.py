"""Whatever is passed, and whatever is left out: an answer, or an error of this package."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dualform.client import (
    AsyncClient,
    CallError,
    Client,
    DualformError,
    InvalidArgumentError,
    Retry,
    UnknownColumnError,
    capture_queries,
    dual_form,
    parse_filter,
)

from .memory import D_IN, Memory

ONE = np.ones((1, D_IN), np.float32)
RIGHT: dict[str, dict[str, Any]] = {
    "indexes": {},
    "index": {},
    "top_k": {"layer": "fc", "queries": ONE},
    "sums": {"layer": "fc", "queries": ONE, "group_by": "label"},
    "profile": {"layer": "fc", "queries": ONE},
    "dual_output": {"layer": "fc", "queries": ONE},
    "explain": {"queries": {"fc": ONE}},
    "stream_weights": {"layer": "fc", "queries": ONE},
    "examples": {"ids": [1]},
}


class Hostile:
    """Refuses to be anything."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __repr__(self) -> str:
        return "Hostile()"


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    2.5,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "nope",
    "\ud800",
    "a\x00b",
    b"bytes",
    [],
    [[]],
    ["a", 1],
    {},
    {"fc": None},
    {1: ONE},
    {"fc": "text"},
    object(),
    1j,
    np.float64(1),
    np.array(7),
    np.array([1, 2]),
    np.array(["x"]),
    np.array([None], dtype=object),
    np.zeros((0, D_IN), np.float32),
    np.ones((2, D_IN), dtype=">f4"),
    torch.ones(2, D_IN, requires_grad=True),
    torch.ones(3),
    Hostile(),
]


def asked(ask: Callable[[], Any]) -> str:
    """How it ends; any error that is not of this package goes on to the test."""
    try:
        found = ask()
        if inspect.isgenerator(found):
            list(found)
        return "answered"
    except DualformError as error:
        return type(error).__name__ if str(error) else "an error without a word"


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("name", RIGHT)
def test_strange_arguments(request: pytest.FixtureRequest, where: str, name: str) -> None:
    client = request.getfixturevalue(where)
    right = RIGHT[name]
    call = getattr(client, name)
    assert asked(lambda: call(**right)) == "answered"
    for argument in inspect.signature(call).parameters:
        for value in STRANGE:
            how = asked(lambda a=argument, v=value: call(**{**right, a: v}))
            assert how not in ("InternalError", "an error without a word"), (argument, value)


def test_what_is_missing_or_too_much(local: Client, remote: Client, server: str) -> None:
    loops = AsyncClient(server)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("group_by", lambda: local.sums("fc", ONE)),  # type: ignore[call-arg]
        ("queries", lambda: remote.top_k("fc")),  # type: ignore[call-arg]
        ("layer", lambda: remote.dual_output()),  # type: ignore[call-arg]
        ("metric", lambda: remote.top_k("fc", ONE, metric="cosine")),  # type: ignore[call-arg]
        ("ids", lambda: remote.examples()),  # type: ignore[call-arg]
        ("queries", lambda: remote.stream_weights("fc")),  # type: ignore[call-arg]
        ("server", lambda: Client()),  # type: ignore[call-arg]
        ("server", lambda: AsyncClient()),  # type: ignore[call-arg]
        ("path", lambda: Client.local()),  # type: ignore[call-arg]
        ("gpu", lambda: Client.local("x", gpu=1)),  # type: ignore[call-arg]
        ("model", lambda: capture_queries()),  # type: ignore[call-arg]
        ("client", lambda: dual_form(torch.nn.Linear(1, 1))),  # type: ignore[call-arg]
        ("text", lambda: parse_filter()),  # type: ignore[call-arg]
        ("group_by", lambda: asyncio.run(loops.sums("fc", ONE))),  # type: ignore[call-arg]
    ]
    for field, call in calls:
        with pytest.raises(CallError, match="it takes") as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, InvalidArgumentError)
        assert caught.value.field == field


def test_columns_that_an_answer_has_not(local: Client) -> None:
    hits = local.top_k("fc", ONE)
    for column in ("lable", 3, None, [], ["label"]):
        with pytest.raises(UnknownColumnError, match="'label'") as caught:
            hits[column]  # type: ignore[index]
        assert isinstance(caught.value, KeyError)
        assert str(caught.value).startswith("no metadata column")


def test_settings_of_other_kinds(memory: Memory) -> None:
    for name in ("attempts", "initial", "maximum", "multiplier"):
        for value in (None, "3", [], True, float("nan"), 1j):
            with pytest.raises(InvalidArgumentError):
                Retry(**{name: value})
    for value in STRANGE:
        for setting in ("tls", "certificate", "key", "token", "timeout", "retry"):
            asked(lambda s=setting, v=value: Client("localhost:50051", **{s: v}).close())
        asked(lambda v=value: Client(v).close())
        asked(lambda v=value: AsyncClient(v))
        asked(lambda v=value: Client.local(v).close())
        asked(lambda v=value: Client.local(memory.path, device=v).close())
        asked(lambda v=value: parse_filter(v))
        asked(lambda v=value: capture_queries(v, torch.ones(1, 2)))
        asked(lambda v=value: capture_queries(torch.nn.Linear(2, 2), torch.ones(1, 2), layers=v))
