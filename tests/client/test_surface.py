"""What the package shows: its names, the same methods on both clients, light imports."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dualform.client
from dualform.client import AsyncClient, Client, DualformError, InvalidArgumentError, errors
from dualform.questions import (
    ExamplesQuestion,
    ExplainQuestion,
    OutputQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)

from .memory import Memory


def test_all_is_sorted_and_complete() -> None:
    names = dualform.client.__all__
    assert names == sorted(names)
    public = {
        name
        for name, value in vars(dualform.client).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(names)


def test_every_error_is_exported() -> None:
    ours = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in ours if DualformError in kind.__bases__]
    assert len(kinds) == 12
    assert {kind.__name__ for kind in ours} <= set(dualform.client.__all__)
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes))


def test_both_clients_have_the_same_methods() -> None:
    def surface(client: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member)).replace("Async", "")
            for name, member in inspect.getmembers(client)
            if callable(member) and (not name.startswith("_") or name == "__init__")
        }

    assert surface(Client) == surface(AsyncClient)
    for name in surface(Client):
        if name not in ("__init__", "local", "stream_weights"):  # an iterator comes without waiting
            assert inspect.iscoroutinefunction(getattr(AsyncClient, name)), name
            assert not inspect.iscoroutinefunction(getattr(Client, name)), name


def test_every_question_takes_index_and_timeout() -> None:
    for name in (
        "top_k",
        "top_groups",
        "attribute",
        "scores",
        "attribute_text",
        "self_influence",
        "sums",
        "profile",
        "dual_output",
        "explain",
        "stream_weights",
        "examples",
    ):
        parameters = inspect.signature(getattr(Client, name)).parameters
        assert {"index", "timeout"} <= set(parameters), name


def test_what_is_not_there_yet_is_refused(remote: Client, queries: np.ndarray) -> None:
    for call in (
        lambda: remote.top_k("fc", queries, metric="cosine"),  # type: ignore[call-arg]
        lambda: remote.sums("fc", queries, group_by="step", weights=[1]),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match="unexpected keyword"):
            call()
    assert not hasattr(remote, "replay")


QUESTIONS = {
    "top_k": TopKQuestion,
    "top_groups": TopGroupsQuestion,
    "sums": SumsQuestion,
    "profile": SumsQuestion,
    "dual_output": OutputQuestion,
    "explain": ExplainQuestion,
    "stream_weights": StreamWeightsQuestion,
    "examples": ExamplesQuestion,
}
# What a method calls otherwise, or does itself.
OTHERWISE = {
    "explain": {"layers": "queries"},
    "profile": {"group_by": None, "strategy": None, "explain_plan": None, "partial": None},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_method_takes_its_questions_fields_with_their_defaults(name: str) -> None:
    parameters = dict(inspect.signature(getattr(Client, name)).parameters)
    assert parameters.pop("timeout").default is None
    del parameters["self"]
    names = OTHERWISE.get(name, {})
    wanted = {}
    for field in dataclasses.fields(QUESTIONS[name]):
        called = names.get(field.name, field.name)
        if called is not None:
            missing = field.default is dataclasses.MISSING
            wanted[called] = inspect.Parameter.empty if missing else field.default
    if name == "profile":
        wanted["bins"] = 50  # how many, not which
    assert {each: parameter.default for each, parameter in parameters.items()} == wanted


@pytest.mark.parametrize("which", ["remote", "local"])
def test_a_call_that_lacks_an_argument_is_refused_in_words(
    which: str, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(which)
    for call, field, says in (
        (lambda: client.top_k("fc"), "queries", "takes layer, queries, k"),
        (
            lambda: client.sums("fc", np.ones((1, 12), np.float32)),
            "group_by",
            "takes layer, queries, group_by",
        ),
        (lambda: client.examples(), "ids", "takes ids, index"),
        (lambda: client.stream_weights("fc"), "queries", "stream_weights"),
    ):
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            call()
        assert caught.value.field == field


def test_a_call_of_the_async_client_too() -> None:
    async def ask() -> None:
        async with AsyncClient("localhost:1") as client:
            await client.top_k("fc")  # type: ignore[call-arg]

    with pytest.raises(InvalidArgumentError, match="missing a required argument: 'queries'"):
        asyncio.run(ask())


REMOTE_ONLY = """
import sys
from importlib.abc import MetaPathFinder

OURS = ("v1", "_errors", "_install", "_version", "questions", "client")
ALLOWED = {f"dualform.{part}" for part in OURS}

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        heavy = {"torch", "faiss", "pyarrow", "pandas", "yaml", "safetensors",
                 "xxhash", "tqdm", "scipy", "sklearn", "grpc_status", "grpc_health"}
        part = ".".join(name.split(".")[:2])
        ours = part.startswith("dualform.") and part not in ALLOWED
        if top in heavy or ours:
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Block())
import asyncio
import numpy as np
from dualform.client import AsyncClient, Client, Filter, NotFoundError

queries = np.load(sys.argv[2])
where = Filter()
where.comparison.column = "label"
where.comparison.operator = 8
with Client(sys.argv[1]) as client:
    assert client.index().layers["fc"].values
    hits = client.top_k("fc", queries, k=3, where=where, group_by="task")
    client.sums("fc", queries, group_by="label")
    client.dual_output("fc", queries)
    assert next(client.stream_weights("fc", queries)).start == 0
    client.examples([1])
    try:
        client.top_k("nope", queries)
    except NotFoundError as error:
        assert error.field == "layer", error.field
    else:
        raise SystemExit("no error")

async def ask():
    async with AsyncClient(sys.argv[1]) as client:
        return await client.top_k("fc", queries, k=3, where=where, group_by="task")

assert np.array_equal(asyncio.run(ask()).rows, hits.rows)
try:
    import torch
except ImportError:
    print("answered", hits.coverage.rows)
"""


def test_remote_mode_needs_grpc_protobuf_and_numpy_only(
    server: str, memory: Memory, queries: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "q.npy", queries)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REMOTE_ONLY, server, str(tmp_path / "q.npy")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"answered {memory.label.count(None)}\n"


def test_local_mode_leaves_the_thread_policy_alone(memory: Memory) -> None:
    program = """
import os, sys
import numpy as np, torch
before = torch.get_num_threads(), dict(os.environ)
from dualform.client import Client
with Client.local(sys.argv[1]) as client:
    client.top_k("fc", np.ones((2, 12), np.float32), k=3)
    client.sums("fc", np.ones((2, 12), np.float32), group_by="label")
assert (torch.get_num_threads(), dict(os.environ)) == before
assert "faiss" not in sys.modules
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(memory.path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "same\n", done.stderr
