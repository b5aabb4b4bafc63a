"""Every refusal: its class, its field, what it says; the same over the network and locally."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import pickle
import shutil
import socket
import threading
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import make_index

from dualform.client import (
    AsyncClient,
    CancelledError,
    Client,
    DataLossError,
    DeadlineExceededError,
    DualformError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    Retry,
    UnavailableError,
)
from dualform.engine.errors import CancelledError as EngineCancelledError
from dualform.engine.messages.catalog import Catalog
from dualform.store.index import VERSION

from .memory import D_IN, Memory
from .serving import free_port, serving

ONE = np.ones((1, D_IN), np.float32)
NAN = np.full((1, D_IN), np.nan, np.float32)
INF = np.full((1, D_IN), np.inf, np.float32)
by_contribution = partial(dict, rank_by="contribution")


class NoArray:
    """What says that it is an array, and is none."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise RuntimeError("boom")


REFUSALS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[DualformError], str, str]] = [
    ("top_k", ("fc", ONE[:, :5]), {}, InvalidArgumentError, "queries", "12"),
    ("top_k", ("fc", ONE[:0]), {}, InvalidArgumentError, "queries", "empty"),
    ("top_k", ("fc", NAN), {}, InvalidArgumentError, "queries", "finite"),
    ("sums", ("fc", INF), {"group_by": "label"}, InvalidArgumentError, "queries", "finite"),
    ("top_k", ("fc", ONE.astype(np.float64)), {}, InvalidArgumentError, "queries", "float32"),
    ("top_k", ("fc", ONE.astype(np.float16)), {}, InvalidArgumentError, "queries", "float32"),
    ("top_k", ("fc", ONE.astype(int)), {}, InvalidArgumentError, "queries", "float32"),
    ("top_k", ("fc", torch.ones(1, D_IN).bfloat16()), {}, InvalidArgumentError, "queries", "float"),
    ("top_k", ("fc", torch.ones(1, D_IN).double()), {}, InvalidArgumentError, "queries", "float()"),
    ("top_k", ("fc", torch.ones(1, D_IN).to_sparse()), {}, InvalidArgumentError, "queries", "arr"),
    (
        "top_k",
        ("fc", torch.ones(1, D_IN, device="meta")),
        {},
        InvalidArgumentError,
        "queries",
        "ar",
    ),
    ("top_k", ("fc", np.ma.masked_equal(ONE, 1)), {}, InvalidArgumentError, "queries", "filled"),
    ("top_k", ("fc", io.StringIO("1 2 3")), {}, InvalidArgumentError, "queries", "float32"),
    ("top_k", ("fc", NoArray()), {}, InvalidArgumentError, "queries", "array (boom)"),
    ("top_k", ("fc", ONE), {"k": True}, InvalidArgumentError, "k", "an int is needed"),
    ("top_k", ("fc", ONE), {"timeout": "9"}, InvalidArgumentError, "timeout", "seconds"),
    ("top_k", ("fc", ONE), {"timeout": True}, InvalidArgumentError, "timeout", "seconds"),
    ("top_k", ("fc", ONE[0]), {}, InvalidArgumentError, "queries", "reshape(1, -1)"),
    ("top_k", ("fc", ONE[None]), {}, InvalidArgumentError, "queries", "reshape(-1, d_in)"),
    ("top_k", ("fc", [[1.0], [1.0, 2.0]]), {}, InvalidArgumentError, "queries", "array"),
    ("top_k", ("fc", ONE), {"k": 0}, InvalidArgumentError, "k", "at least 1"),
    ("top_k", ("fc", ONE), {"k": -3}, InvalidArgumentError, "k", "at least 1"),
    ("top_k", ("fc", ONE), {"k": 2.5}, InvalidArgumentError, "k", "an int is needed"),
    ("top_k", ("fc", ONE), {"k": 10**30}, InvalidArgumentError, "k", "64 bits"),
    ("top_k", ("fc", ONE), {"k": 10**9}, ResourceExhaustedError, "k", "16,384"),
    ("top_k", ("fc", ONE), {"order": "best"}, InvalidArgumentError, "order", "'smallest'"),
    ("top_k", ("fc", ONE), {"index": "nope"}, NotFoundError, "index", "nope"),
    ("top_k", ("fc", ONE), {"index": ""}, InvalidArgumentError, "index", "empty"),
    ("top_k", ("nope", ONE), {}, NotFoundError, "layer", "fc"),
    ("top_k", (0, ONE), {}, InvalidArgumentError, "layer", "'0'"),
    ("top_k", ("fc", ONE), {"group_by": "nope"}, InvalidArgumentError, "group_by", "label"),
    ("top_k", ("fc", ONE), {"group_by": 3}, InvalidArgumentError, "group_by", "a str"),
    ("top_k", ("fc", ONE), {"where": 3}, InvalidArgumentError, "where", "a str"),
    ("top_k", ("fc", ONE), {"where": "label = "}, InvalidArgumentError, "where", "position 9"),
    (
        "top_k",
        ("fc", ONE),
        {"where": "label = 1 and lable = 2"},
        InvalidArgumentError,
        "where",
        "position 15: unknown column 'lable'",
    ),
    (
        "top_k",
        ("fc", ONE),
        {"where": "label = 1 or label = 'x'"},
        InvalidArgumentError,
        "where",
        "position 14: column 'label'",
    ),
    ("top_k", ("fc", ONE), {"rank_by": "best"}, InvalidArgumentError, "rank_by", "'contribution'"),
    ("top_k", ("fc", ONE), {"rank_by": ["x"]}, InvalidArgumentError, "rank_by", "'contribution'"),
    ("top_k", ("fc", ONE), by_contribution(), InvalidArgumentError, "unit", "units 0 to 4"),
    ("top_k", ("fc", ONE), by_contribution(unit=-1), InvalidArgumentError, "unit", "units 0 to 4"),
    ("top_k", ("fc", ONE), by_contribution(unit=5), InvalidArgumentError, "unit", "units 0 to 4"),
    (
        "top_k",
        ("fc", ONE),
        by_contribution(unit=1.0),
        InvalidArgumentError,
        "unit",
        "an int is needed",
    ),
    (
        "top_k",
        ("fc", ONE),
        by_contribution(unit=0, at_step=-1),
        InvalidArgumentError,
        "at_step",
        "0 to 86",
    ),
    (
        "top_k",
        ("fc", ONE),
        by_contribution(unit=0, at_step=87),
        InvalidArgumentError,
        "at_step",
        "0 to 86",
    ),
    ("top_k", ("fc", ONE), by_contribution(unit=0, k=10**9), ResourceExhaustedError, "k", "16,384"),
    ("top_k", ("fc", ONE), {"unit": 0}, InvalidArgumentError, "unit", "rank_by='contribution'"),
    ("top_k", ("fc", ONE), {"at_step": 9}, InvalidArgumentError, "at_step", "'contribution'"),
    ("top_k", ("fc", ONE), {"timeout": 0}, InvalidArgumentError, "timeout", "above 0"),
    ("sums", ("fc", ONE), {"group_by": None}, InvalidArgumentError, "group_by", "column"),
    ("dual_output", ("fc", ONE), {"at_step": -1}, InvalidArgumentError, "at_step", "-1"),
    ("dual_output", ("fc", ONE), {"at_step": 10**6}, InvalidArgumentError, "at_step", "86"),
    ("examples", ("abc",), {}, InvalidArgumentError, "ids", "['abc']"),
    ("examples", (np.ones((2, 2), int),), {}, InvalidArgumentError, "ids", "ravel"),
    ("examples", ([1.5],), {}, InvalidArgumentError, "ids", "int64 or string"),
    ("examples", ([b"x"],), {}, InvalidArgumentError, "ids", "bytes"),
    ("index", ("nope",), {}, NotFoundError, "index", "nope"),
]


@pytest.mark.parametrize(("method", "given", "named", "kind", "field", "says"), REFUSALS)
def test_refusals_are_the_same_everywhere(
    remote: Client,
    local: Client,
    server: str,
    method: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
    kind: type[DualformError],
    field: str,
    says: str,
) -> None:
    async def ask() -> None:
        async with AsyncClient(server) as client:
            await getattr(client, method)(*given, **named)

    caught = []
    for call in (
        lambda: getattr(remote, method)(*given, **named),
        lambda: getattr(local, method)(*given, **named),
        lambda: asyncio.run(ask()),
    ):
        with pytest.raises(DualformError) as error:
            call()
        assert type(error.value) is kind, error.value
        assert error.value.field == field
        assert says in str(error.value)
        caught.append((error.value.reason, error.value.code))
    assert len(set(caught)) == 1
    # Nothing that was refused has hurt the server.
    assert remote.top_k("fc", ONE, k=1).rows.shape == (1, 1)


def test_an_output_without_values(tmp_path: Path) -> None:
    path = make_index(tmp_path, np.ones((9, D_IN), np.float32), None, label=[1] * 9)
    with serving({"keys": path}) as address, Client(address) as remote:
        for client in (remote, Client.local(path)):
            with pytest.raises(FailedPreconditionError, match="values") as caught:
                client.dual_output("fc", ONE)
            assert caught.value.reason == "NO_VALUES"
            assert client.sums("fc", ONE, group_by="label").values.tolist() == [[9.0 * D_IN]]


def test_a_damaged_index_is_data_loss_and_the_other_answers(tmp_path: Path, memory: Memory) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(memory.path, hurt)
    for file in hurt.glob("layers/*/*.faiss"):
        file.write_bytes(file.read_bytes()[:-40])
    with serving({"good": memory.path, "hurt": hurt}) as address, Client(address) as client:
        health = {index.name: index.health for index in client.indexes()}
        assert health == {"good": "serving", "hurt": "damaged"}
        with pytest.raises(DataLossError) as caught:
            client.top_k("fc", ONE, index="hurt")
        assert "keys.faiss" in str(caught.value)
        assert client.top_k("fc", ONE, index="good", k=1).rows.shape == (1, 1)
        with pytest.raises(InvalidArgumentError, match="good, hurt") as several:
            client.top_k("fc", ONE)
        assert several.value.field == "index"
    with Client.local(hurt) as client, pytest.raises(DataLossError, match=r"keys\.faiss"):
        client.top_k("fc", ONE)


def test_an_index_from_a_newer_version(tmp_path: Path, memory: Memory) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(memory.path, newer)
    manifest = json.loads((newer / "manifest.json").read_text())
    manifest["version"] = VERSION + 1
    (newer / "manifest.json").write_text(json.dumps(manifest))
    with Client.local(newer) as client, pytest.raises(FailedPreconditionError, match="upgrade"):
        client.top_k("fc", ONE)


def test_local_paths_that_are_no_index(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="dualform index build"):
        Client.local(tmp_path / "nope")
    with Client.local(tmp_path) as client, pytest.raises(NotFoundError, match="not an index"):
        client.top_k("fc", ONE)
    with pytest.raises(InvalidArgumentError, match="cuda:N"):
        Client.local(tmp_path, device="tpu")


@pytest.mark.parametrize("server", ["localhost", "http://localhost:50051", "", 50051])
def test_addresses_that_can_not_be(server: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
        Client(server)
    with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
        AsyncClient(server)


def test_nobody_there(queries: np.ndarray) -> None:
    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with Client(address, retry=None) as client:
        with pytest.raises(UnavailableError, match="dualform serve") as caught:
            client.top_k("fc", queries)
        assert f"at {address}" in str(caught.value)
        assert "tries" not in str(caught.value)
    assert time.monotonic() - started < 5
    thrice = Retry(attempts=3, initial=0.01)
    with Client(address, retry=thrice) as client, pytest.raises(UnavailableError) as caught:
        client.indexes()
    assert "(3 tries)" in str(caught.value)


@pytest.mark.parametrize(
    "timeout",
    [0.5, np.float32(0.5), np.float16(0.5), Fraction(1, 2)],
    ids=["float", "float32", "float16", "Fraction"],
)
def test_a_server_that_never_says_anything(timeout: Any) -> None:
    """Of a float32 gRPC made a time of day that was a minute off: at once, or much later."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"127.0.0.1:{silent.getsockname()[1]}", retry=None) as client,
    ):
        started = time.monotonic()
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            client.indexes(timeout=timeout)
        assert 0.4 < time.monotonic() - started < 5


def test_retries_stay_inside_the_deadline() -> None:
    endless = Retry(attempts=1000, initial=0.05, maximum=0.05)
    with Client(f"127.0.0.1:{free_port()}", retry=endless) as client:
        started = time.monotonic()
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            client.indexes(timeout=0.5)
        assert 0.3 < time.monotonic() - started < 3


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_comes_up_late_is_found(
    memory: Memory, queries: np.ndarray, is_async: bool
) -> None:
    port, told = free_port(), threading.Event()
    patient = Retry(attempts=200, initial=0.05, maximum=0.1)
    answers: list[Any] = []

    def ask() -> None:
        if not is_async:
            with Client(f"127.0.0.1:{port}", retry=patient) as client:
                told.set()
                answers.append(client.top_k("fc", queries, k=2))
            return

        async def wait() -> None:
            async with AsyncClient(f"127.0.0.1:{port}", retry=patient) as client:
                told.set()
                answers.append(await client.top_k("fc", queries, k=2))

        asyncio.run(wait())

    thread = threading.Thread(target=ask)
    thread.start()
    assert told.wait(30)
    time.sleep(0.4)
    assert not answers
    with serving({"memory": memory.path}, port=port):
        thread.join(30)
        assert not thread.is_alive()
    expected = memory.weights(queries).argmax(axis=1)
    np.testing.assert_array_equal(answers[0].rows[:, 0], expected)


def test_argument_errors_are_not_retried(memory: Memory) -> None:
    counting = Counting({"memory": memory.path})
    with serving({"memory": memory.path}, catalog=counting) as address, Client(address) as client:
        with pytest.raises(NotFoundError):
            client.top_k("nope", ONE)
        with pytest.raises(ResourceExhaustedError):
            client.top_k("fc", ONE, k=10**9)
    assert counting.asked == ["ListIndexesRequest", "TopKRequest", "TopKRequest"]


def test_deadlines(memory: Memory) -> None:
    slow = Slow({"memory": memory.path})
    with serving({"memory": memory.path}, catalog=slow) as address:
        with Client(address) as client:
            client.indexes()
            started = time.monotonic()
            with pytest.raises(DeadlineExceededError) as caught:
                client.top_k("fc", ONE, timeout=0.3)
            assert time.monotonic() - started < 5
            assert caught.value.code == "DEADLINE_EXCEEDED"
        # The client's own timeout counts where the call names none.
        with Client(address, timeout=0.3) as client:
            client.indexes()
            with pytest.raises(DeadlineExceededError):
                client.top_k("fc", ONE)

        async def ask() -> None:
            async with AsyncClient(address) as client:
                await client.top_k("fc", ONE, timeout=0.3)

        with pytest.raises(DeadlineExceededError):
            asyncio.run(ask())
    assert slow.stopped.wait(30)


def test_deadlines_locally(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.engine.messages.catalog.Catalog", Slow)
    with Client.local(memory.path) as client, pytest.raises(DeadlineExceededError) as caught:
        client.top_k("fc", ONE, timeout=0.2)
    assert "longer timeout=" in str(caught.value)


def test_a_given_up_asyncio_question_stops_the_local_scan(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualform.engine.messages.catalog.Catalog", Slow)

    async def ask() -> None:
        async with AsyncClient.local(memory.path) as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.top_k("fc", ONE), 0.2)

    started = time.monotonic()
    asyncio.run(ask())
    assert time.monotonic() - started < 10


def test_defects_are_internal_errors(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken({"memory": memory.path})
    with (
        serving({"memory": memory.path}, catalog=broken) as address,
        Client(address) as client,
        pytest.raises(InternalError),
    ):
        client.top_k("fc", ONE)
    monkeypatch.setattr("dualform.engine.messages.catalog.Catalog", Broken)
    with Client.local(memory.path) as client:
        with pytest.raises(InternalError, match="ZeroDivisionError") as caught:
            client.top_k("fc", ONE)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_closed_client_says_so(server: str, memory: Memory) -> None:
    for client in (Client(server), Client.local(memory.path)):
        client.close()
        client.close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            client.indexes()


def test_closing_is_no_cancellation_of_who_asks(memory: Memory) -> None:
    """Tasks that nobody cancelled ended with asyncio's CancelledError, which is nobody's error."""
    slow = Slow({"memory": memory.path})

    async def asking(client: AsyncClient) -> asyncio.Task[Any]:
        await client.indexes()
        task = asyncio.create_task(client.top_k("fc", ONE))
        await asyncio.sleep(0.2)
        return task

    async def closed(address: str) -> None:
        client = AsyncClient(address)
        task = await asking(client)
        await client.close()
        with pytest.raises(CancelledError, match="closed while it asked"):
            await task
        assert not task.cancelled()

    async def cancelled(address: str) -> None:
        async with AsyncClient(address) as client:
            task = await asking(client)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert slow.stopped.wait(10)  # and the server is told
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.top_k("fc", ONE), 0.2)

    with serving({"memory": memory.path}, catalog=slow) as address:
        client = Client(address)
        client.indexes()
        threading.Timer(0.2, client.close).start()
        with pytest.raises(CancelledError):
            client.top_k("fc", ONE)
        asyncio.run(closed(address))
        slow.stopped.clear()
        asyncio.run(cancelled(address))


def test_a_client_that_is_closed_between_two_tries_asks_no_more() -> None:
    """It opened a connection anew, which nothing closed."""

    async def main() -> None:
        retry = Retry(attempts=10**6, initial=0.01, maximum=0.01)
        client = AsyncClient(f"127.0.0.1:{free_port()}", retry=retry, timeout=20)
        task = asyncio.create_task(client.indexes())
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises((CancelledError, FailedPreconditionError), match="closed while it"):
            await task

    asyncio.run(main())


def test_what_cannot_be_pickled_or_copied_says_so(remote: Client, local: Client) -> None:
    clients = [remote, local, AsyncClient("localhost:1")]
    for client in clients:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"^(Async)?Client can be .*; make one where"):
                way(client)
    assert remote.top_k("fc", ONE, k=1).rows.shape == (1, 1)


@pytest.mark.parametrize(
    "timeout", [1e10, 1e300, 2**70, 10**400, float("inf")], ids=lambda t: f"{t}"[:9]
)
def test_a_timeout_beyond_all_clocks_is_none(remote: Client, timeout: float) -> None:
    assert remote.top_k("fc", ONE, k=1, timeout=timeout).rows.shape == (1, 1)


def test_errors_survive_pickling() -> None:
    error = InvalidArgumentError("k is 0", reason="BAD_K", field="k")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason, copy.field) == ("k is 0", "BAD_K", "k")
    assert CancelledError("x").reason == "CANCELLED"


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"initial": -1.0}, {"initial": 3.0}, {"multiplier": 0.5}]
)
def test_retry_values_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        Retry(**wrong)


def test_numbers_of_numpys_are_taken_as_pythons() -> None:
    retry = Retry(
        attempts=np.int8(127),  # type: ignore[arg-type]
        initial=np.float32(0.5),  # type: ignore[arg-type]
        maximum=np.float16(2),  # type: ignore[arg-type]
        multiplier=np.float32(2),  # type: ignore[arg-type]
    )
    assert retry == Retry(127, 0.5, 2.0, 2.0)
    assert {type(pause) for pause in retry.pauses()} == {float}
    with pytest.raises(InvalidArgumentError, match="initial=1000"):
        Retry(initial=10**400)


def test_pauses_grow_jitter_and_are_bounded() -> None:
    retry = Retry(attempts=7, initial=0.1, maximum=0.5)
    bounds = [0.1, 0.2, 0.4, 0.5, 0.5, 0.5]
    runs = [list(retry.pauses()) for _ in range(50)]
    for pauses in runs:
        assert len(pauses) == 6
        assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert len({tuple(pauses) for pauses in runs}) == 50


class Counting(Catalog):
    """Keeps the kinds of what was asked."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.asked: list[str] = []

    def answer(self, request: Any, stop: Any = None) -> Any:
        self.asked.append(type(request).__name__)
        return super().answer(request, stop)


class Slow(Catalog):
    """A scan that only ends when it is told to stop."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.stopped = threading.Event()

    def answer(self, request: Any, stop: Any = None) -> Any:
        if type(request).__name__ not in ("TopKRequest", "TopKQuestion"):
            return super().answer(request, stop)
        while not stop():
            time.sleep(0.01)
        self.stopped.set()
        raise EngineCancelledError("the caller gave up")


class Broken(Catalog):
    """A defect in the engine."""

    def answer(self, request: Any, stop: Any = None) -> Any:
        if type(request).__name__ not in ("TopKRequest", "TopKQuestion"):
            return super().answer(request, stop)
        raise ZeroDivisionError("a defect")
