"""Every request message and filter text, at random: answered or refused, and rightly.

Not INTERNAL, no crash, nothing that takes seconds, no answer to what is wrong, and no refusal of
what is right. In process first, then a part of it through a server's socket.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError
from serve.serving import serving
from synthetic import make_index

from dualform.client import parse_filter
from dualform.client.errors import InvalidArgumentError
from dualform.engine.errors import EngineError
from dualform.engine.messages.catalog import Catalog
from dualform.engine.rows.filters import evaluate
from dualform.v1 import attribution_pb2 as pb

from .counts import count, seeds, tell
from .fuzzing import D_IN, D_OUT, KINDS, STEPS, Maker
from .opinions import valid

ROWS = 40
MOST_SECONDS = 5.0
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    return make_index(
        tmp_path_factory.mktemp("fuzzed"),
        keys,
        values,
        shard_rows=15,
        label=[t % 3 for t in range(ROWS)],
        task=["ab"[t % 2] for t in range(ROWS)],
        weight=[t / 4 for t in range(ROWS)],
        flag=[t % 5 == 0 for t in range(ROWS)],
    )


@pytest.fixture(scope="module")
def catalog(index: Path) -> Iterator[Catalog]:
    catalog = Catalog({"i": index}, device="cpu")
    layer = catalog.answer(pb.GetIndexRequest()).index.layers[0]
    assert {column.name for column in layer.columns} <= {"step", "slot", "position", *MINE}
    assert (layer.d_in, layer.d_out) == (D_IN, D_OUT)
    assert catalog.answer(pb.GetIndexRequest()).index.steps == STEPS
    yield catalog
    catalog.close()


MINE = ("label", "task", "weight", "flag")


def answered(catalog: Catalog, kind: type[Any], data: bytes) -> tuple[str, Any]:
    """The code that it ends with, and the request."""
    try:
        request = kind.FromString(data)
    except DecodeError:
        return "UNREADABLE", None
    try:
        if kind is pb.StreamWeightsRequest:
            parts = list(catalog.stream(request))
            assert sum(part.weights.shape[1] for part in parts) == ROWS
        else:
            check_shapes(request, catalog.answer(request))
        return "OK", request
    except EngineError as error:
        return error.code, request


def check_shapes(request: Any, response: Any) -> None:
    """An answer has as many parts as was asked for."""
    if isinstance(request, pb.TopKRequest):
        shape = list(response.rows.shape)
        assert (shape[0], shape[-1]) == (request.queries.shape[0], request.k)
        assert len(response.rows.data) == 8 * np.prod(shape)
        assert 0 <= response.coverage.rows <= response.coverage.total == ROWS
    elif isinstance(request, pb.TopGroupsRequest):
        assert list(response.scores.shape) == [request.queries.shape[0], request.k]
        assert list(response.counts.shape) == list(response.scores.shape)
    elif isinstance(request, pb.AttributeRequest):
        assert list(response.rows.shape) == [request.inputs, len(request.layers)]
        assert response.scores.shape[0] == request.inputs
        assert not request.k or response.scores.shape[1] == request.k
    elif isinstance(request, pb.SelfInfluenceRequest):
        (paged,) = response.scores.shape
        assert list(response.counts.shape) == [paged]
        left = max(0, response.total - request.first)
        assert paged == min(left, request.count or left)
    elif isinstance(request, (pb.SumsRequest, pb.DualOutputRequest)):
        assert response.values.shape[0] == request.queries.shape[0]
    elif isinstance(request, pb.ExplainRequest):
        assert len(response.layers) == len(request.layers)
    elif isinstance(request, pb.GetExamplesRequest):
        assert len(response.examples) == len(request.ids)


def test_requests(catalog: Catalog) -> None:
    wanted = count(1000, 600_000)
    codes: Counter[str] = Counter()
    slowest = (0.0, -1)
    for seed in seeds(wanted):
        kind, data = Maker(seed).request()
        began = time.process_time()
        code, request = answered(catalog, kind, data)
        slowest = max(slowest, (time.process_time() - began, seed))
        codes[code] += 1
        if request is None:
            continue
        opinion, about = valid(request), f"seed {seed}: {kind.__name__} ended in {code}"
        assert code in REFUSALS or code == "OK", about
        assert opinion is not False or code != "OK", about
        assert opinion is not True or code in ("OK", "RESOURCE_EXHAUSTED"), about
    assert slowest[0] < MOST_SECONDS, slowest
    assert codes["OK"] > wanted / 10
    assert codes.total() - codes["OK"] > wanted / 4
    tell(f"fuzz: {wanted:,} requests, slowest {slowest[0]:.2f} s: {dict(codes)}")


def test_requests_through_a_socket(index: Path) -> None:
    wanted, together = count(300, 30_000), 64
    codes: Counter[str] = Counter()
    names = {kind: kind.__name__.removesuffix("Request") for kind in KINDS}
    with serving({"i": index}) as served:
        service = "/dualform.v1.AttributionService/"
        unary = {kind: served.channel.unary_unary(service + name) for kind, name in names.items()}
        stream = served.channel.unary_stream(service + names[pb.StreamWeightsRequest])
        for first in seeds(wanted)[::together]:
            calls = []
            for seed in range(first, first + together):
                kind, data = Maker(10**9 + seed).request()
                if kind is pb.StreamWeightsRequest:
                    call: Any = stream(data, timeout=60)
                else:
                    call = unary[kind].future(data, timeout=60)
                calls.append((seed, kind, call))
            for seed, kind, call in calls:
                if kind is pb.StreamWeightsRequest:
                    with contextlib.suppress(grpc.RpcError):
                        list(call)
                code = call.code().name
                assert code in REFUSALS or code == "OK", (seed, code, call.details())
                codes[code] += 1
        assert served.health() == 1
    tell(f"fuzz: {codes.total():,} requests through a socket: {dict(codes)}")


WORDS = [
    "label",
    "task",
    "weight",
    "flag",
    "step",
    "colour",
    "=",
    "!=",
    "<>",
    "<",
    "<=",
    ">",
    ">=",
    "in",
    "not",
    "and",
    "or",
    "(",
    ")",
    ",",
    "is",
    "null",
    "between",
    "true",
    "false",
    "1",
    "2",
    "0",
    "-1",
    "1.5",
    "1e3",
    "'a'",
    "'b'",
    "''",
    "'it''s'",
    '"label"',
    '"x"',
    "like",
    "*",
    "+",
    "-",
    ";",
    "--",
    "/*",
    "*/",
    "select",
    "from",
    ".",
    "::",
    "null",
    "case",
    "when",
    "end",
    "exists",
    "any",
    "all",
    "interval",
    "date",
    "0x1f",
    "1e999",
    "9223372036854775808",
    "[",
    "]",
    "{",
    "}",
    "@",
    "#",
    "$1",
    "?",
    ":",
    "%",
    "||",
    "~",
    "`",
    "\\",
    "\x00",
    "é",
    "\n",
    "if",
    "cast",
]
PATTERNS = (
    "{c} {o} {l}",
    "{c} in ({l}, {l})",
    "{c} between {l} and {l}",
    "{c} is null",
    "{c} is not null",
    "not {f}",
    "({f})",
    "{f} and {f}",
    "{f} or {f}",
    "{c} not in ({l})",
)


def filter_text(chance: random.Random, depth: int = 0) -> str:
    text = chance.choice(PATTERNS[:5] if depth > 3 else PATTERNS)
    while "{" in text:
        text = text.replace("{c}", chance.choice(MINE), 1)
        text = text.replace("{o}", chance.choice(("=", "!=", "<>", "<", "<=", ">", ">=")), 1)
        text = text.replace("{l}", chance.choice(("1", "-2", "1.5", "'a'", "true", "1e3")), 1)
        text = text.replace("{f}", filter_text(chance, depth + 1) if "{f}" in text else "", 1)
    return text


def changed_text(chance: random.Random) -> str:
    words = filter_text(chance).split(" ")
    for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
        at = chance.randrange(len(words) + 1)
        match chance.randrange(3):
            case 0:
                words.insert(at, chance.choice(WORDS))
            case 1 if len(words) > 1:
                del words[min(at, len(words) - 1)]
            case _:
                words[min(at, len(words) - 1)] = chance.choice(WORDS)
    return " ".join(words)


def test_filter_texts() -> None:
    """What is taken is a condition for SQLite too, and selects the same rows."""
    wanted = count(750, 150_000)
    outcomes: Counter[str] = Counter()
    rows = [(t % 3 if t % 7 else None, "ab"[t % 2], t / 4, t % 5 == 0, t) for t in range(ROWS)]
    names = ("label", "task", "weight", "flag", "step")
    columns = {name: pa.array([row[i] for row in rows]) for i, name in enumerate(names)}
    base = sqlite3.connect(":memory:")
    base.execute("create table t (label int, task text, weight real, flag bool, step int)")
    base.executemany("insert into t values (?, ?, ?, ?, ?)", rows)
    slowest = 0.0
    for seed in seeds(wanted):
        text = changed_text(random.Random(seed))
        began = time.process_time()
        try:
            found = evaluate(parse_filter(text), columns)
        except (InvalidArgumentError, EngineError) as error:
            outcomes[error.code] += 1
            continue
        finally:
            slowest = max(slowest, time.process_time() - began)
        outcomes["taken"] += 1
        try:
            selected = base.execute(f"select step from t where {text}").fetchall()
        except sqlite3.Error as error:
            raise AssertionError(f"seed {seed}: {text!r} was taken: {error}") from None
        assert np.flatnonzero(found).tolist() == [row[0] for row in selected], (seed, text)
    assert slowest < MOST_SECONDS
    assert set(outcomes) == {"taken", "INVALID_ARGUMENT"}
    assert min(outcomes.values()) > wanted / 10
    tell(f"fuzz: {wanted:,} filter texts, slowest {slowest:.2f} s: {dict(outcomes)}")
