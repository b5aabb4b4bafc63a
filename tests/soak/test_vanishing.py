"""Clients that leave unread streams behind: what the server held for them is free again.

glibc keeps much of what is freed, for whoever asks next, and how much differs from round to round
by more than a leak would. A server that nobody asks any more returns what is free after a few
seconds: what is left then is in use.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm
from synthetic import make_index

from dualform.client import Client
from dualform.serve.server import LOOK_S, QUIET_LOOKS

from .counts import count, tell
from .served import Process, server

ROWS, D, QUERIES = 200_000, 64, 64
STREAMS = 33
"""As many as one client may have: half of what may run and wait."""
PART_MB = 1.05
"""Of a part of a stream, of which each has 49; one was read."""
MOST_MB = STREAMS * PART_MB
"""By which the server may have grown after all rounds but two: what it takes for a part of each
stream of one round. Where a part of each, or a copy, stayed in every round, it would be as many
times that as there are rounds. What is in use differs by 10 MB or so, for pages that are in use in
part are not returned."""
PATIENCE_S = 60

CLIENT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
import grpc
import numpy as np
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

address, streams, queries, d = sys.argv[1], *map(int, sys.argv[2:])
asked = np.ones((queries, d), np.float32)
tensor = pb.Tensor(dtype=1, shape=asked.shape, data=asked.tobytes())
request = pb.StreamWeightsRequest(layer="fc", queries=tensor)
channel = grpc.insecure_channel(address)
stub = attribution_pb2_grpc.AttributionServiceStub(channel)
calls = [stub.StreamWeights(request) for _ in range(streams)]
for call in calls:
    next(call)
print("begun", flush=True)
signal.sigwait({signal.SIGTERM})
channel.close()
print("closed", flush=True)
signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(0).standard_normal((ROWS, D)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("vanishing"), keys, None, rows_per_step=1000)


def still(process: Process) -> float:
    """MB once they stand still."""
    end, seen = time.monotonic() + PATIENCE_S, 0.0
    while abs(seen - (now := process.anonymous_mb())) > 1 and time.monotonic() < end:
        seen = now
        time.sleep(0.5)
    return now


def in_use(process: Process) -> float:
    """MB once what is free was returned."""
    time.sleep((QUIET_LOOKS + 3) * LOOK_S)
    return still(process)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(7200)
def test_unread_streams_of_clients_that_vanish(index: Path, tmp_path: Path) -> None:
    used: list[float] = []
    with server(index, tmp_path) as process:
        before = process.at_rest()
        with Client(process.address) as client:
            client.top_k("fc", np.ones((1, D), np.float32), k=1)
        tell(f"vanishing: {in_use(process):.0f} MB before the first round")
        for number in range(count(4, 60)):
            how = ("closed", "killed")[number % 2]
            with warm.start(CLIENT, process.address, STREAMS, QUERIES, D) as leaving:
                assert leaving.stdout.readline() == "begun\n", leaving.errors()
                most = still(process)
                if how == "killed":
                    leaving.kill()
                else:
                    leaving.terminate()
                    assert leaving.stdout.readline() == "closed\n", leaving.errors()
                left = process.closes_all_but(before.total())
                kept = still(process)
                used.append(in_use(process))
            tell(
                f"vanishing: round {number + 1}, {how}: {most:.0f} MB with {STREAMS} streams, "
                f"{kept:.0f} MB without, {used[-1]:.0f} MB in use"
            )
            assert left == before, (left - before, before - left)
            # Parts were there to be let go of.
            assert most > used[-1] + MOST_MB
    assert max(used[-2:]) < used[1] + MOST_MB
