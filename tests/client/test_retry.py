"""What is asked again, when, and within which time: against a real server that refuses as told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from dualform.client import (
    AsyncClient,
    Client,
    DualformError,
    InternalError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    Retry,
    UnavailableError,
)

from .answering import abort, answering, come_back, reason

QUICK = Retry(attempts=4, initial=0.01, maximum=0.02)


class Refuser:
    """Refuses the first calls in a way, and answers the others; remembers when it was called."""

    def __init__(self, times: int, refuse: Callable[[Any], None]) -> None:
        self.called: list[float] = []
        self._times = times
        self._refuse = refuse
        self._lock = threading.Lock()

    def __call__(self, context: Any) -> None:
        with self._lock:
            self.called.append(time.monotonic())
            refused = len(self.called) <= self._times
        if refused:
            self._refuse(context)

    @property
    def gaps(self) -> list[float]:
        """Seconds between the calls."""
        return [b - a for a, b in zip(self.called, self.called[1:], strict=False)]


def busy(seconds: float | None) -> Callable[[Any], None]:
    details = [reason("QUEUE_FULL")] + ([] if seconds is None else [come_back(seconds)])
    return lambda context: abort(
        context, grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is busy", *details
    )


def ask(kind: type, address: str, **settings: Any) -> Any:
    if kind is Client:
        with Client(address, **settings) as client:
            return client.indexes()

    async def asked() -> Any:
        async with AsyncClient(address, **settings) as client:
            return await client.indexes()

    return asyncio.run(asked())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_busy_server_is_asked_again_when_it_says(kind: type) -> None:
    refuser = Refuser(2, busy(0.2))
    with answering(refuser) as address:
        ask(kind, address, retry=QUICK)
    assert len(refuser.called) == 3
    assert all(0.2 <= gap < 2 for gap in refuser.gaps)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_it_is_not_where_that_would_be_too_late(kind: type) -> None:
    refuser = Refuser(9, busy(30))
    with answering(refuser) as address:
        start = time.monotonic()
        with pytest.raises(ResourceExhaustedError) as caught:
            ask(kind, address, retry=QUICK, timeout=5)
        assert time.monotonic() - start < 5
    assert len(refuser.called) == 1
    assert caught.value.retry_after == 30
    assert caught.value.reason == "QUEUE_FULL"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_nobody_waits_for_years_because_a_server_says_so(kind: type) -> None:
    refuser = Refuser(9, busy(1e10))
    with answering(refuser) as address, pytest.raises(ResourceExhaustedError) as caught:
        ask(kind, address, retry=QUICK, timeout=None)
    assert len(refuser.called) == 1
    assert caught.value.retry_after == 1e10


def test_one_deadline_for_all_tries() -> None:
    refuser = Refuser(99, busy(0.3))
    with answering(refuser) as address:
        start = time.monotonic()
        with pytest.raises(ResourceExhaustedError, match="tries"):
            ask(Client, address, retry=Retry(attempts=99, initial=0, maximum=0), timeout=1.5)
        assert time.monotonic() - start < 2.5
    assert 2 <= len(refuser.called) <= 5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),  # without RetryInfo
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.ABORTED, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_nothing_else_is_asked_again(code: grpc.StatusCode, kind: type[DualformError]) -> None:
    # Only the server's word makes a refusal worth repeating, and only of these two codes.
    told = [] if code is grpc.StatusCode.RESOURCE_EXHAUSTED else [come_back(0.01)]
    refuser = Refuser(9, lambda context: abort(context, code, "no", *told))
    with answering(refuser) as address, pytest.raises(kind):
        ask(Client, address, retry=QUICK)
    assert len(refuser.called) == 1


def test_pauses_grow_and_differ() -> None:
    retry = Retry(attempts=5, initial=0.1, maximum=0.4, multiplier=2)
    drawn = [list(retry.pauses()) for _ in range(300)]
    assert all(len(pauses) == 4 for pauses in drawn)
    for place, longest in enumerate((0.1, 0.2, 0.4, 0.4)):
        drawn_pauses = [pauses[place] for pauses in drawn]
        assert 0.8 * longest < max(drawn_pauses) <= longest  # uniform: below 0.8 in 300 draws never
        assert min(drawn_pauses) < 0.2 * longest
        assert len(set(drawn_pauses)) > 290


def test_unavailable_is_asked_again_with_the_servers_pause_on_top() -> None:
    refuser = Refuser(
        3, lambda context: abort(context, grpc.StatusCode.UNAVAILABLE, "draining", come_back(0.1))
    )
    with answering(refuser) as address:
        ask(Client, address, retry=QUICK)
    assert len(refuser.called) == 4
    assert min(refuser.gaps) >= 0.1
    with answering(Refuser(9, busy(0))) as address, pytest.raises(ResourceExhaustedError):
        ask(Client, address, retry=None)
    always = Refuser(9, lambda context: abort(context, grpc.StatusCode.UNAVAILABLE, "draining"))
    with answering(always) as address, pytest.raises(UnavailableError, match="4 tries"):
        ask(Client, address, retry=QUICK)


def test_one_client_in_many_threads() -> None:
    refuser = Refuser(40, busy(0.02))
    failures: list[BaseException] = []
    with (
        answering(refuser) as address,
        Client(address, retry=Retry(attempts=60, maximum=0.1), timeout=30) as client,
    ):

        def work() -> None:
            try:
                for _ in range(5):
                    assert client.indexes()[0].name == "here"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert len(refuser.called) == 80
