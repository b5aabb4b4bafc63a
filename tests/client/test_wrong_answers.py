"""A server that answers what can't be: a typed error says so, never a wrong result or a hang."""

from __future__ import annotations

import asyncio
import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from dualform.client import (
    AsyncClient,
    Client,
    FailedPreconditionError,
    InternalError,
    dual_form,
)
from dualform.engine.messages.catalog import Catalog
from dualform.v1 import attribution_pb2 as pb

from .memory import D_IN, D_OUT, ROWS, Memory
from .mutating import Answers, mutating, mutations

QUERIES = np.random.default_rng(8).standard_normal((3, D_IN)).astype(np.float32)
MODEL = torch.nn.Sequential(OrderedDict(fc=torch.nn.Linear(D_IN, D_OUT, bias=False)))
ATTRIBUTED = {"target": 1, "by": "label", "check_model": False}

# By rpc: the methods that ask it, with what they are given.
ASKED: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("ListIndexes", "indexes", (), {}),
    ("GetIndex", "index", ("memory",), {}),
    ("TopK", "top_k", ("fc", QUERIES), {"k": 3, "explain_plan": True}),
    ("TopK", "top_k", ("fc", QUERIES), {"k": 3, "group_by": "task", "distinct": "label"}),
    ("TopK", "top_k", ("fc", QUERIES), {"k": 4, "where": "step = 3 and label = 1"}),
    ("TopGroups", "top_groups", ("fc", QUERIES), {"by": "label", "k": 7}),
    ("Sums", "sums", ("fc", QUERIES), {"group_by": "label", "absolute": True}),
    ("Sums", "sums", ("fc", QUERIES), {"group_by": "noise", "bins": [-1, 0.0, 1]}),
    ("Sums", "profile", ("fc", QUERIES), {"bins": 3}),
    ("DualOutput", "dual_output", ("fc", QUERIES), {}),
    ("DualOutput", "dual_output", ("fc", QUERIES), {"group_by": "task"}),
    ("Explain", "explain", ({"fc": QUERIES},), {"k": 2, "group_by": "label", "output": True}),
    ("StreamWeights", "stream_weights", ("fc", QUERIES), {}),
    ("GetExamples", "examples", ([1, 2, 3],), {}),
    ("SelfInfluence", "self_influence", (), {"by": "label"}),
    ("Attribute", "attribute", (MODEL, torch.from_numpy(QUERIES)), {"k": 7, **ATTRIBUTED}),
    ("Attribute", "scores", (MODEL, torch.from_numpy(QUERIES)), ATTRIBUTED),
]

# What the server alone knows: names, texts, versions, numbers that are its own, how many rows there
# are, and what a column or payload holds. Everything else follows from the question.
ITS_WORD = re.compile(
    r"""(.*\.)?(name|kind|optimizer|reason|health(_reason)?|version|index_version)=.*
    |indexes:(none|less)
    |index\.(steps|layers\[0\]\.(d_in|d_out|rows|row_space|bias|values|columns\[\d\]\.type))=.*
    |index\.(layers:|layers\[0\]\.columns:)(none|less|turned)
    |limits\.max_\w+=\d{3,}
    |(.*\.)?coverage(\[0\])?\.(total=\d+|(nonfinite|dropped)=\d+|missing=0)
    |(.*\.)?coverage(:absent)?$|(.*\.)?coverage\.rows=(0|1|3)$
    |(.*\.)?columns(:none|:less|:turned|\[\d\]\.(type|data|valid)=.*)
    |(.*\.)?groups\.(type|valid|dictionary).*
    |(.*\.)?(scores|values|initial|trained|residual|rows|outputs|weights|by_layer)\.data=.*
    |(.*\.)?(trained|residual):absent
    |(.*\.)?plan\..*(strategy|seconds)=.*|plan\.costs:.*
    |examples\[\d\]\.(data|text)=.*""",
    re.VERBOSE,
)


@pytest.fixture(scope="module")
def wrong(memory: Memory) -> Iterator[tuple[str, Answers]]:
    """A server whose answers can be changed."""
    with (
        closing(Catalog({"memory": memory.path}, device="cpu")) as catalog,
        mutating(catalog) as found,
    ):
        yield found


def ask(client: Client, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    found = getattr(client, method)(*given, **named)
    return list(found) if method == "stream_weights" else found


def seen_by(client: Client, answers: Answers, asked: tuple[Any, ...]) -> list[Any]:
    """The messages that answer a question, unchanged."""
    rpc, *how = asked
    seen: list[Any] = []

    def look(messages: list[Any]) -> list[Any]:
        seen.extend(messages)
        return messages

    answers.changes = {rpc: look}
    ask(client, *how)
    return seen


def in_first(change: Callable[[Any], None]) -> Callable[[list[Any]], list[Any]]:
    def apply(messages: list[Any]) -> list[Any]:
        change(messages[0])
        return messages

    return apply


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked[1]}-{len(str(asked[3]))}")
def test_every_field_in_every_wrong_way(wrong: tuple[str, Answers], asked: tuple[Any, ...]) -> None:
    """Refused, unless only the server can know."""
    address, answers = wrong
    ends: dict[str, str] = {}
    with Client(address, retry=None) as client:
        first = seen_by(client, answers, asked)[0]
        for what, change in mutations(first):
            changed = copy.deepcopy(first)
            change(changed)
            if changed == first:
                continue
            answers.changes = {asked[0]: in_first(change)}
            try:
                ask(client, *asked[1:])
            except InternalError as error:
                ends[what] = f"{error.reason}: {error}"
            else:
                ends[what] = "answered"
    taken = [what for what, end in ends.items() if end == "answered"]
    assert [what for what in taken if not ITS_WORD.fullmatch(what)] == []
    assert 0 < len(taken) < len(ends)
    assert all(ends[w].startswith("BAD_ANSWER: the answer is wrong: ") for w in ends.keys() - taken)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked[1]}-{len(str(asked[3]))}")
def test_asyncio_refuses_the_same(wrong: tuple[str, Answers], asked: tuple[Any, ...]) -> None:
    address, answers = wrong
    rpc, method, given, named = asked
    with Client(address, retry=None) as client:
        first = seen_by(client, answers, asked)[0]

        def how(change: Callable[[Any], None]) -> str:
            answers.changes = {rpc: in_first(change)}
            try:
                ask(client, method, given, named)
            except InternalError as error:
                return str(error)
            return "answered"

        chosen = list(mutations(first))[::9]
        expected = [how(change) for _, change in chosen]

    async def all_of_them() -> list[str]:
        found = []
        async with AsyncClient(address, retry=None) as other:
            for _, change in chosen:
                answers.changes = {rpc: in_first(change)}
                try:
                    answer = getattr(other, method)(*given, **named)
                    if method == "stream_weights":
                        async for _ in answer:
                            pass
                    else:
                        await answer
                except InternalError as error:
                    found.append(str(error))
                else:
                    found.append("answered")
        return found

    assert asyncio.run(all_of_them()) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked[1]}-{len(str(asked[3]))}")
def test_bytes_that_are_no_message(wrong: tuple[str, Answers], asked: tuple[Any, ...]) -> None:
    address, answers = wrong
    rpc, method, given, named = asked

    async def asynchronously() -> Any:
        async with AsyncClient(address, retry=None) as other:
            answer = getattr(other, method)(*given, **named)
            if method == "stream_weights":
                return [part async for part in answer]
            return await answer

    for sent in (b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x07", b"<html>Sign in</html>"):
        answers.changes = {rpc: lambda _, sent=sent: [sent]}
        with Client(address, retry=None) as client, pytest.raises(InternalError) as caught:
            ask(client, method, given, named)
        assert caught.value.reason == "BAD_ANSWER", sent
        with pytest.raises(InternalError) as caught:
            asyncio.run(asynchronously())
        assert caught.value.reason == "BAD_ANSWER", sent


def part(start: int, count: int, version: str, n: int = 3) -> pb.StreamWeightsResponse:
    weights = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[n, count], data=bytes(4 * n * count))
    return pb.StreamWeightsResponse(start=start, weights=weights, index_version=version)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([(0, 300), (300, 300)], None),
        ([], "the weights of 0 rows, where the layer has 600"),
        ([(0, 300)], "the weights of 300 rows"),
        ([(0, 300), (301, 299)], "those from 300 on come next"),
        ([(0, 300), (200, 400)], "those from 300 on come next"),
        ([(300, 300), (0, 300)], "those from 0 on come next"),
        ([(0, 600), (600, 1)], "weights of row 600, where the layer has 600 rows"),
        ([(0, 601)], "weights of row 600"),
        ([(0, 300), (300, 0), (300, 300)], "those from 300 on come next"),
        ([(0, 300), (300, 300, "other")], "another version"),
        ([(0, 600, "", 2)], r"\[2, 600\], where float32 \[3, \*\] was asked for"),
        ([(-1, 601)], "weights of rows -1"),
        ([(2**62, 1)], "weights of rows"),
    ],
)
def test_streams_with_gaps_overlaps_and_wrong_ends(
    wrong: tuple[str, Answers], parts: list[tuple[Any, ...]], says: str | None
) -> None:
    address, answers = wrong
    with Client(address, retry=None) as client:
        version = client.index().version

        def change(_: list[Any]) -> list[Any]:
            return [part(p[0], p[1], (p[2:3] or [""])[0] or version, *p[3:]) for p in parts]

        answers.changes = {"StreamWeights": change}
        if says is None:
            assert sum(c.weights.shape[1] for c in client.stream_weights("fc", QUERIES)) == ROWS
            return
        with pytest.raises(InternalError, match=says) as caught:
            list(client.stream_weights("fc", QUERIES))
        assert caught.value.reason == "BAD_ANSWER"


def test_a_stream_that_never_ends_is_left(wrong: tuple[str, Answers]) -> None:
    address, answers = wrong
    taken: list[int] = []
    with Client(address, retry=None, timeout=None) as client:
        version = client.index().version

        def for_ever(_: list[Any]) -> Iterator[Any]:
            for start in range(10**9):
                taken.append(start)
                yield part(start, 1, version)

        answers.changes = {"StreamWeights": for_ever}
        with pytest.raises(InternalError, match="where the layer has 600 rows"):
            for _ in client.stream_weights("fc", QUERIES):
                pass


def test_sizes_that_are_only_said_are_not_believed(wrong: tuple[str, Answers]) -> None:
    address, answers = wrong
    with Client(address, retry=None) as client:
        for shape in ([3, 2**62], [2**62, 0], [0, 2**62], [3] * 100, [-1, -9], [2**62, 2**62]):

            def change(messages: list[Any], shape: list[int] = shape) -> list[Any]:
                for tensor in (messages[0].values, messages[0].counts):
                    del tensor.shape[:]
                    tensor.shape.extend(shape)
                return messages

            answers.changes = {"Sums": change}
            with pytest.raises(InternalError) as caught:
                client.sums("fc", QUERIES, group_by="label")
            assert caught.value.reason == "BAD_ANSWER"


def few_at_a_time(queries: int, message_bytes: int) -> Callable[[Any], None]:
    """Limits by which a question is asked in parts."""

    def change(message: Any) -> None:
        message.limits.max_queries, message.limits.max_message_bytes = queries, message_bytes

    return in_first(change)


def narrower(message: Any) -> None:
    for name in ("values", "initial", "trained", "residual"):
        tensor = getattr(message, name)
        tensor.CopyFrom(
            pb.Tensor(
                dtype=tensor.dtype, shape=[tensor.shape[0], 1], data=bytes(4 * tensor.shape[0])
            )
        )


def called_otherwise(message: Any) -> None:
    groups = np.frombuffer(message.groups.data, "<i8")
    message.groups.data = (groups - 7).astype("<i8").tobytes()


@pytest.mark.parametrize(
    ("rpc", "method", "given", "named", "change", "reason"),
    [
        ("DualOutput", "dual_output", ("fc", QUERIES), {}, narrower, "BAD_ANSWER"),
        ("DualOutput", "dual_output", ("fc", QUERIES), {},
         lambda message: message.ClearField("residual"), "BAD_ANSWER"),
        ("Sums", "sums", ("fc", QUERIES), {"group_by": "label"}, called_otherwise, "INDEX_CHANGED"),
        ("Attribute", "scores", (MODEL, torch.from_numpy(QUERIES)), ATTRIBUTED, called_otherwise,
         "BAD_ANSWER"),
        ("SelfInfluence", "self_influence", (), {"by": "label"}, called_otherwise, "BAD_ANSWER"),
        ("SelfInfluence", "self_influence", (), {"by": "label"},
         lambda message: setattr(message, "total", 5), "INDEX_CHANGED"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together(
    wrong: tuple[str, Answers],
    rpc: str,
    method: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
    change: Callable[[Any], Any],
    reason: str,
) -> None:
    address, answers = wrong
    parts: list[int] = []

    def second(message: Any) -> None:
        parts.append(1)
        if len(parts) == 2:
            change(message)

    # Of two groups a part: so many bytes are taken for each at first.
    limits = few_at_a_time(2, 128 if method == "self_influence" else 1 << 20)
    answers.changes = {"GetIndex": limits, "ListIndexes": limits}
    with Client(address, retry=None) as client:
        ask(client, method, given, named)  # which goes well
        answers.changes[rpc] = in_first(second)
        with pytest.raises((InternalError, FailedPreconditionError)) as caught:
            ask(client, method, given, named)
    assert caught.value.reason == reason
    assert len(parts) == 2


def test_rows_that_were_dropped_are_counted_by_any_word(wrong: tuple[str, Answers]) -> None:
    address, answers = wrong
    counts = {"every": 3, "rows": 4, "least": 1, "numbers": 2}

    def of(change: dict[str, int]) -> Callable[[Any], None]:
        return lambda message: message.index.layers[0].dropped.update(change)

    answers.changes = {"GetIndex": in_first(of(counts))}
    with Client(address, retry=None) as client:
        assert client.index().layers["fc"].dropped == counts
        answers.changes = {"GetIndex": in_first(of({**counts, "rows": -1}))}
        with pytest.raises(InternalError, match="rows dropped by 'rows' of -1") as caught:
            client.index()
    assert caught.value.reason == "BAD_ANSWER"


def test_outputs_of_another_width_than_the_layers(wrong: tuple[str, Answers]) -> None:
    address, answers = wrong
    inputs = torch.from_numpy(QUERIES)
    answers.changes = {"DualOutput": in_first(narrower)}
    with Client(address, retry=None) as client:
        with pytest.raises(InternalError, match="1 units, the layer 5"):
            client.attribute(MODEL, inputs, target=1, by="label", k=2)
        with (
            dual_form(MODEL, client),
            pytest.raises(InternalError, match="1 units, the layer 5") as caught,
        ):
            MODEL(inputs)
    assert caught.value.reason == "BAD_ANSWER"
