"""What stands between, or answers in the server's place: over real sockets, in clear words."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from dualform.client import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    DualformError,
    InternalError,
    PermissionDeniedError,
    ResourceExhaustedError,
    Retry,
    UnauthenticatedError,
    UnavailableError,
)
from dualform.engine.messages.catalog import Catalog
from dualform.v1 import attribution_pb2 as pb

from .answering import abort, answering, reason
from .certificates import Authority, authority
from .http2 import DATA, GRPC, Answer, frame, grpc_answer, headers, http2, spoken, status
from .memory import D_IN, Memory

THRICE = Retry(attempts=3, initial=0.01, maximum=0.01)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("certificates"))


def refused(kind: type, address: str, **settings: Any) -> DualformError:
    """The error of a call of one kind of client."""

    async def asynchronously() -> None:
        async with AsyncClient(address, **settings) as client:
            await client.indexes()

    def blocking() -> None:
        with Client(address, **settings) as client:
            client.indexes()

    settings = {"retry": THRICE, "timeout": 20, **settings}
    with pytest.raises(DualformError) as caught:
        asyncio.run(asynchronously()) if kind is AsyncClient else blocking()
    return caught.value


OK = ("grpc-status", "0")
PAGE = b"<html><body>an error</body></html>"
NOT_GRPC = (UnavailableError, "NOT_GRPC", "a web server, or a proxy that passes no gRPC on", 1)
STATUSES: dict[int, tuple[type[DualformError], str, str, int]] = {
    204: NOT_GRPC,
    301: NOT_GRPC,
    302: NOT_GRPC,
    400: NOT_GRPC,
    401: (UnauthenticatedError, "UNAUTHENTICATED", "token=", 1),
    403: (PermissionDeniedError, "PERMISSION_DENIED", "a proxy does not let this call", 1),
    404: NOT_GRPC,
    405: NOT_GRPC,
    408: (DeadlineExceededError, "PROXY_TIMEOUT", "grpc_read_timeout", 1),
    413: (ResourceExhaustedError, "REQUEST_TOO_LARGE", "client_max_body_size", 1),
    429: (UnavailableError, "UNAVAILABLE", "ask less often", 3),
    500: NOT_GRPC,
    502: (UnavailableError, "UNAVAILABLE", "grpc_pass", 3),
    503: (UnavailableError, "UNAVAILABLE", "dualform serve", 3),
    504: (DeadlineExceededError, "PROXY_TIMEOUT", "timeout server", 1),
}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("code", STATUSES)
def test_statuses_of_http(kind: type, code: int) -> None:
    """Each in words, and tried again only where that may help."""
    error_kind, reason, says, tries = STATUSES[code]
    calls: list[int] = []
    with http2(status(code, ("content-type", "text/html"), page=PAGE), calls) as address:
        error = refused(kind, address)
    assert type(error) is error_kind
    assert error.reason == reason
    assert f"{address} is no dualform server, and says HTTP {code}" in str(error)
    assert says in str(error)
    assert len(calls) == tries


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("answer", "reason", "says"),
    [
        (status(200, ("content-type", "text/html"), page=PAGE), "INTERNAL", "such as a proxy"),
        (status(200, *GRPC), "INTERNAL", "such as a proxy"),
        (grpc_answer(), "BAD_ANSWER", "no message"),
        (grpc_answer(b"\xff\xff\xff"), "BAD_ANSWER", "the answer is wrong"),
        (grpc_answer(b""), "BAD_ANSWER", "max_k of 0"),
        # Older gRPC's asyncio has no error for it.
        (grpc_answer(b"", code="99"), "INTERNAL|BAD_ANSWER", "answer"),
        (
            lambda stream, _: (
                headers(stream, (":status", "200"), *GRPC)
                + frame(3, 0, stream, bytes(4)[:3] + b"\x01")
            ),
            "INTERNAL",
            "broke the answer off",
        ),
        (lambda stream, _: b"\xff" * 100, "INTERNAL", "such as a proxy"),
    ],
    ids=["page", "only headers", "nothing", "garbage", "empty", "code", "reset", "noise"],
)
def test_answers_that_are_no_grpc(kind: type, answer: Answer, reason: str, says: str) -> None:
    with http2(answer) as address:
        error = refused(kind, address)
    assert isinstance(error, InternalError)
    assert re.fullmatch(reason, error.reason)
    assert says in str(error)


MOST = 5000  # bytes of a request; a query takes 48
MANY = np.random.default_rng(3).standard_normal((300, D_IN)).astype(np.float32)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("request_of", "method", "given", "named"),
    [
        (pb.TopKRequest, "top_k", ("fc", MANY), {"k": 2}),
        (pb.SumsRequest, "sums", ("fc", MANY), {"group_by": "label"}),
        (pb.ExplainRequest, "explain", ({"fc": MANY},), {"k": 1}),
        (pb.GetExamplesRequest, "examples", (range(10_000, 12_000),), {}),
    ],
)
def test_a_proxy_with_a_limit_on_requests_is_asked_in_smaller_ones(
    memory: Memory,
    local: Client,
    kind: type,
    request_of: Any,
    method: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    sizes: list[int] = []

    def answer(stream: int, body: bytes) -> bytes:
        sizes.append(len(body))
        if len(body) > MOST:
            return status(413, ("content-type", "text/html"), page=PAGE)(stream, body)
        message = body[5:]
        request = request_of.FromString(message) if message else pb.ListIndexesRequest()
        return grpc_answer(catalog.answer(request).SerializeToString())(stream, body)

    async def asynchronously(address: str) -> Any:
        async with AsyncClient(address, retry=None) as client:
            return [await getattr(client, method)(*given, **named) for _ in range(2)]

    def blocking(address: str) -> Any:
        with Client(address, retry=None) as client:
            return [getattr(client, method)(*given, **named) for _ in range(2)]

    with (
        closing(Catalog({"memory": memory.path}, device="cpu")) as catalog,
        http2(answer) as address,
    ):
        ask = blocking if kind is Client else lambda address: asyncio.run(asynchronously(address))
        found = ask(address)
    expected = getattr(local, method)(*given, **named)
    for answered in found:
        if method == "explain":
            assert answered["fc"].top_k.rows.tolist() == expected["fc"].top_k.rows.tolist()
        elif method == "examples":
            assert answered == expected
        else:
            name = "rows" if method == "top_k" else "values"
            np.testing.assert_allclose(getattr(answered, name), getattr(expected, name), rtol=1e-6)
    # The second question knows.
    refusals = [size > MOST for size in sizes]
    assert 0 < sum(refusals) <= 3
    assert not any(refusals[len(refusals) // 2 + 3 :])


def test_one_query_that_is_too_large_for_a_proxy_is_refused_with_the_way_out() -> None:
    def answer(stream: int, body: bytes) -> bytes:
        if len(body) > 5:
            return status(413)(stream, body)
        limits = pb.Limits(max_k=9, max_queries=100, max_message_bytes=1 << 20)
        return grpc_answer(pb.ListIndexesResponse(limits=limits).SerializeToString())(stream, body)

    with http2(answer) as address, Client(address) as client:
        for _ in range(2):
            with pytest.raises(ResourceExhaustedError, match="client_max_body_size") as caught:
                client.top_k("fc", MANY)
            assert caught.value.reason == "REQUEST_TOO_LARGE"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_is_slow_to_greet_is_waited_for(kind: type) -> None:
    """As over TLS from far away, or where a proxy is busy: one connection, one try."""
    calls: list[int] = []
    with http2(grpc_answer(), calls, greeting_s=0.7) as address:
        error = refused(kind, address, retry=None)
    assert error.reason == "BAD_ANSWER"  # so it has been reached
    assert len(calls) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_a_few_bytes_could_become_is_not_taken(kind: type) -> None:
    """A MiB of zeros, packed to a kB: a gigabyte would pack as well."""
    packed = gzip.compress(bytes(1 << 20))
    assert len(packed) < 2000

    def answer(stream: int, _: bytes) -> bytes:
        begun = headers(stream, (":status", "200"), *GRPC, ("grpc-encoding", "gzip"))
        message = b"\x01" + struct.pack(">I", len(packed)) + packed
        return begun + frame(DATA, 0, stream, message) + headers(stream, OK, end=True)

    with http2(answer) as address:
        error = refused(kind, address)
    assert error.reason == "BAD_ANSWER"  # an older gRPC hands the packed bytes on, as they are


def test_four_gigabytes_that_are_only_said() -> None:
    def answer(stream: int, _: bytes) -> bytes:
        begun = headers(stream, (":status", "200"), *GRPC)
        return begun + frame(DATA, 0, stream, b"\x00\xff\xff\xff\xff" + bytes(50))

    with http2(answer) as address:
        error = refused(Client, address, timeout=0.3)
    assert isinstance(error, DeadlineExceededError)


def says(words: bytes) -> Callable[[socket.socket], None]:
    def speak(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(words)
        connection.recv(1000)

    return speak


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_speaks_something_else(kind: type, ca: Authority) -> None:
    for words in (
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9\r\n",
    ):
        with spoken(says(words)) as address:
            error = refused(kind, address)
        assert isinstance(error, UnavailableError)
        assert error.reason == "NOT_GRPC"
        assert "does not speak HTTP/2" in str(error)
        assert "tries" not in str(error)

    signed = ca.sign("web", "DNS:localhost,IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed.certificate, signed.key)
    context.set_alpn_protocols(["http/1.1"])

    def over_tls(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as encrypted:
            says(b"HTTP/1.1 400 Bad Request\r\n\r\n")(encrypted)

    with spoken(over_tls) as address:
        error = refused(kind, address, tls=ca.certificate)
    assert error.reason == "NOT_GRPC"
    assert "TLS but not HTTP/2" in str(error)


def packed(*details: Any) -> bytes:
    found = status_pb2.Status(code=13, message="boo")
    for detail in details:
        found.details.append(
            detail if isinstance(detail, any_pb2.Any) else any_pb2.Any(**_packed(detail))
        )
    return found.SerializeToString()


def _packed(detail: Any) -> dict[str, Any]:
    one = any_pb2.Any()
    one.Pack(detail)
    return {"type_url": one.type_url, "value": one.value}


def named(kind: str, value: bytes) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"type.googleapis.com/google.rpc.{kind}", value=value)


WORD = error_details_pb2.ErrorInfo(reason="BROKEN", domain="dualform")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("details", "reason", "retry_after"),
    [
        (b"\xff\xffgarbage", "INTERNAL", None),
        (b"", "INTERNAL", None),
        (packed(named("ErrorInfo", b"\xff\xff\xff")), "INTERNAL", None),
        (packed(named("BadRequest", b"\xff\xff\xff"), WORD), "BROKEN", None),
        (packed(named("RetryInfo", b"\xff\xff\xff"), WORD), "BROKEN", None),
        (packed(named("Unheard.Of", b"\xff"), WORD), "BROKEN", None),
        (packed(any_pb2.Any(type_url="\x00", value=b"\xff"), WORD), "BROKEN", None),
        (
            packed(
                error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=-5)), WORD
            ),
            "BROKEN",
            0.0,
        ),
        (
            packed(
                error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2**62)), WORD
            ),
            "BROKEN",
            2.0**62,
        ),
    ],
)
def test_details_that_can_not_be_read_are_left_out(
    kind: type, details: bytes, reason: str, retry_after: float | None
) -> None:
    """The refusal itself is told all the same."""

    def refuse(context: Any) -> None:
        context.set_trailing_metadata(
            (("grpc-status-details-bin", details), ("x-request-id", "a"), ("x-request-id", "b"))
        )
        context.abort(grpc.StatusCode.INTERNAL, "boo")

    with answering(refuse) as address:
        error = refused(kind, address)
    assert type(error) is InternalError
    assert str(error).startswith("boo")
    assert (error.reason, error.retry_after, error.request_id) == (reason, retry_after, "b")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("settled", [False, True])
def test_a_server_that_says_nothing_in_time(kind: type, settled: bool) -> None:
    """A process that stands still, before or after it was connected: in our words, and gRPC's."""
    go_on = threading.Event()

    def silent(connection: socket.socket) -> None:
        go_on.wait(30)

    def answer(stream: int, body: bytes) -> bytes:
        go_on.wait(30)
        return b""

    with http2(answer) if settled else spoken(silent) as address:
        try:
            error = refused(kind, address, retry=None, timeout=1.2)
        finally:
            go_on.set()
    assert isinstance(error, DeadlineExceededError)
    assert re.match(r"no answer within 1\.2 s; give a longer timeout=, or ask for less", str(error))
    assert f"whether the server at {address} answers" in str(error)
    assert re.search(r"\(.*[Dd]eadline.*\)$", str(error))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_tries_took_of_the_time_is_told(kind: type) -> None:
    """The second try had less than was given, and both are said."""
    go_on = threading.Event()
    calls: list[int] = []

    def answer(stream: int, body: bytes) -> bytes:
        if len(calls) == 1:
            time.sleep(1)
            return status(503)(stream)
        go_on.wait(30)
        return b""

    with http2(answer, calls) as address:
        try:
            error = refused(kind, address, timeout=5)
        finally:
            go_on.set()
    assert len(calls) == 2
    said = re.match(r"no answer within (\S+) s; .* \(of timeout=5 s, tries and parts", str(error))
    assert said is not None, error
    assert float(said[1]) <= 4.0


def test_a_servers_own_words_for_what_came_late_are_kept() -> None:
    def late(context: Any) -> None:
        abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded", reason("UNREAD"))

    with answering(late) as address:
        error = refused(Client, address)
    assert (str(error), error.reason) == ("deadline exceeded", "UNREAD")
