"""One client in several event loops, threads and forked processes."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest

from dualform.client import AsyncClient, Client, FailedPreconditionError, TopKResult

from .memory import Memory


def test_a_second_run_of_asyncio(server: str, queries: np.ndarray, remote: Client) -> None:
    client = AsyncClient(server, timeout=20)
    expected = remote.top_k("fc", queries, k=3).rows
    for _ in range(3):
        found = asyncio.run(client.top_k("fc", queries, k=3))
        assert np.array_equal(found.rows, expected)
    asyncio.run(client.close())
    with pytest.raises(FailedPreconditionError, match="closed"):
        asyncio.run(client.top_k("fc", queries))
    gc.collect()  # what the dead loops left complains here, if at all: warnings are errors


def test_loops_of_several_threads_at_once(server: str, queries: np.ndarray, remote: Client) -> None:
    client = AsyncClient(server, timeout=60)
    expected = remote.top_k("fc", queries, k=3).rows
    found: list[TopKResult] = []
    start = threading.Barrier(4)

    async def ask() -> None:
        for _ in range(5):
            found.extend(
                await asyncio.gather(*(client.top_k("fc", queries, k=3) for _ in range(4)))
            )
            chunks = [chunk async for chunk in client.stream_weights("fc", queries)]
            assert sum(chunk.weights.shape[1] for chunk in chunks) == 600

    def work() -> None:
        start.wait(20)
        asyncio.run(ask())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 * 5 * 4
    assert all(np.array_equal(each.rows, expected) for each in found)
    asyncio.run(client.close())


def test_a_loop_that_closes_the_client_while_another_asks(server: str, queries: np.ndarray) -> None:
    client = AsyncClient(server, timeout=20)
    asking, closed = threading.Event(), threading.Event()
    outcome: list[object] = []

    async def ask() -> None:
        await client.indexes()
        stream = client.stream_weights("fc", queries)
        outcome.append((await anext(stream)).start)
        asking.set()
        await asyncio.to_thread(closed.wait, 20)
        async for _ in stream:  # what was asked before is answered
            pass
        with pytest.raises(FailedPreconditionError, match="closed"):
            await client.indexes()
        outcome.append("refused")

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    assert asking.wait(20)
    asyncio.run(client.close())
    closed.set()
    thread.join(20)
    assert outcome == [0, "refused"]


FORKED = """
import faulthandler, multiprocessing, sys
import numpy as np
import torch
from dualform.client import AsyncClient, Client, DualformError

path, server = sys.argv[1:]
queries = np.random.default_rng(8).standard_normal((9, 12)).astype(np.float32)
torch.set_num_threads(2)
# What makes torch start its threads, as any training does.
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
torch.randn(2_000_000).exp().sum()

def asked(client):
    sums = client.sums("fc", queries, group_by="label")
    return [client.top_k("fc", queries, k=5).rows, sums.values]

local, remote = Client.local(path), Client(server, timeout=30)
loops = AsyncClient(server, timeout=30)
expected = {"local": asked(local), "remote": asked(remote)}
import asyncio
asyncio.run(loops.indexes())

def child(name, put, threads):
    faulthandler.dump_traceback_later(20, exit=True)  # where it hangs, if it does
    torch.set_num_threads(threads)
    try:
        if name == "loops":
            put.send(asyncio.run(loops.indexes())[0].name)
            return
        client = {"local": local, "remote": remote}.get(name)
        if client is None:
            client = Client.local(path)
        found = asked(client)
        wanted = expected.get(name, expected["local"])
        same = all(np.array_equal(a, b) for a, b in zip(found, wanted))
        put.send("same" if same else f"other: {found}")
        client.close()
    except DualformError as error:
        put.send(f"{error.reason}: {error}")

context = multiprocessing.get_context("fork")
for threads in (1, 2):
    for name in ("local", "opened in the child", "remote", "loops"):
        take, put = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(name, put, threads))
        process.start()
        said = take.recv() if take.poll(30) else "hangs"
        print(threads, name, "->", said, flush=True)
        if said == "hangs":
            process.kill()
        process.join(20)
# The parent goes on.
assert all(np.array_equal(a, b) for a, b in zip(asked(remote), expected["remote"]))
assert all(np.array_equal(a, b) for a, b in zip(asked(local), expected["local"]))
remote.close()
local.close()
"""


@pytest.fixture(scope="module")
def said(memory: Memory, server: str) -> dict[str, str]:
    """By threads and client, as in "1 local": what came of it in a fork."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(memory.path), server],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (line.partition(" -> ") for line in done.stdout.splitlines())
    return {name: said for name, _, said in lines}


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_after_a_fork_with_one_thread_all_but_asyncio_answers(said: dict[str, str]) -> None:
    # gRPC's asyncio alone does not survive.
    assert said["1 loops"].startswith("FORKED: ")
    assert_remote(said["1 remote"])
    assert (said["1 local"], said["1 opened in the child"]) == ("same", "same")


def assert_remote(said: str) -> None:
    """Before grpcio 1.80 a channel would wait for ever for what asyncio had in the parent."""
    if tuple(map(int, grpc.__version__.split(".")[:2])) >= (1, 80):
        assert said == "same"
    else:
        assert said.startswith("FORKED: "), said
        assert "update grpcio" in said


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_after_a_fork_with_torchs_threads_a_local_index_says_what_to_do(
    said: dict[str, str],
) -> None:
    assert_remote(said["2 remote"])
    assert "use a Client here" in said["2 loops"]
    for name in ("2 local", "2 opened in the child"):
        assert said[name].startswith("FORKED: "), said
        assert "torch.set_num_threads(1)" in said[name]
        assert "spawn" in said[name]


WHILE_RUNNING = """
import faulthandler, multiprocessing, threading
import torch
from torch import nn
from dualform.client import DualformError, capture_queries

torch.set_num_threads(2)
torch.randn(2_000_000).exp().sum()

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
    def forward(self, x):
        if threading.current_thread() is not threading.main_thread() and not self.training:
            inside.set()
            go_on.wait()
        return self.fc(x)

inside, go_on = threading.Event(), threading.Event()
model, x = Slow().train(), torch.ones(1, 3)
other = threading.Thread(target=capture_queries, args=(model, x))
other.start()
inside.wait()

def child(put, threads):
    faulthandler.dump_traceback_later(20, exit=True)  # where it hangs, if it does
    torch.set_num_threads(threads)
    clean = model.training and not model.fc._forward_hooks
    try:
        put.send((clean, capture_queries(model, x)["fc"].tolist()))
    except DualformError as error:
        put.send((clean, error.reason))

context = multiprocessing.get_context("fork")
for threads in (1, 2):
    take, put = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(put, threads))
    process.start()
    print(take.recv() if take.poll(30) else "hangs")
    process.join(20)
go_on.set()
other.join()
assert model.training and not model.fc._forward_hooks
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_a_fork_while_another_thread_runs_a_model() -> None:
    """With one thread it answers, with two it says that it was forked."""
    done = subprocess.run(
        [sys.executable, "-c", WHILE_RUNNING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(True, [[1.0, 1.0, 1.0]])\n(True, 'FORKED')\n"


LOADER = """
import sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from dualform.client import Client

torch.randn(2_000_000).exp().sum()

class Weighted(Dataset):
    def __init__(self, client):
        self.client = client
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return self.client.top_k("fc", np.full((1, 12), i + 1, np.float32), k=1).rows[0, 0]

client = Client.local(sys.argv[1])
expected = [Weighted(client)[i] for i in range(8)]
found = [int(row) for batch in DataLoader(Weighted(client), 2, num_workers=2) for row in batch]
assert found == expected, (found, expected)
print("the same")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_a_local_index_in_a_data_loaders_workers(memory: Memory, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(memory.path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "the same\n", done.stderr
