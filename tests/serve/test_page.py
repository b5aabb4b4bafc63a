"""The metrics' page: who may read it, over what, and who cannot keep others from it."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from client.certificates import Authority, authority
from prometheus_client.parser import text_string_to_metric_families
from synthetic import make_index

from dualform.serve import page
from dualform.serve.config import TlsFiles
from dualform.v1 import attribution_pb2 as pb

from .serving import Served, serving, tensor

SERVICE = "dualform.v1.AttributionService"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(3).standard_normal((40, 6)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("index"), keys, None)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text("all:aaaaaaaa\nbob:bbbbbbbb:i\n")
    return tmp_path / "tokens"


def address(served: Served) -> str:
    assert served.server._page is not None
    return served.server._page.address


def read(url: str, token: str | None = None, context: ssl.SSLContext | None = None) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=10, context=context) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return response.read().decode()


def test_who_accepts_what_is_no_media_type_gets_text(index: Path) -> None:
    with serving({"i": index}, metrics="127.0.0.1:0") as served:
        asked = urllib.request.Request(f"http://{address(served)}/metrics")
        asked.add_header("Accept", "application/openmetrics-text; version=\xff;;;q=abc")
        with urllib.request.urlopen(asked, timeout=10) as response:
            assert b"grpc_server_call" in response.read()


def status(url: str, token: str | None = None, context: ssl.SSLContext | None = None) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        read(url, token, context)
    with refused.value as error:
        return error.code


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


def test_metrics_take_a_token_for_all_indexes(index: Path, tokens: Path) -> None:
    with serving({"i": index}, metrics="127.0.0.1:0", tokens=tokens) as served:
        url = f"http://{address(served)}"
        assert status(f"{url}/metrics") == 401
        assert status(f"{url}/metrics", "aaaaaaab") == 401
        assert status(f"{url}/metrics", "bbbbbbbb") == 403
        assert status(f"{url}/elsewhere", "aaaaaaaa") == 404
        text = read(f"{url}/metrics", "aaaaaaaa")
    assert "dualform_index_serving" in text
    assert "aaaaaaaa" not in text


def test_metrics_speak_tls_where_questions_do(index: Path, ours: Authority, tmp_path: Path) -> None:
    signed = ours.sign("server", "DNS:localhost,IP:127.0.0.1")
    files = TlsFiles(signed.certificate, signed.key)
    theirs = authority(tmp_path, "theirs")
    other = theirs.sign("other", "DNS:localhost,IP:127.0.0.1")
    credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes())
    with serving({"i": index}, metrics="127.0.0.1:0", tls=files, credentials=credentials) as served:
        url = f"https://{address(served)}/metrics"
        assert "dualform_index_serving" in read(url, context=trusting(ours))
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            read(url.replace("https", "http"))
        signed.certificate.write_bytes(other.certificate.read_bytes())
        signed.key.write_bytes(other.key.read_bytes())
        served.reload()
        assert "dualform_index_serving" in read(url, context=trusting(theirs))
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            read(url, context=trusting(ours))


def test_metrics_ask_for_a_certificate_where_questions_do(index: Path, ours: Authority) -> None:
    server, client = (ours.sign(name, "DNS:localhost,IP:127.0.0.1") for name in ("s", "c"))
    files = TlsFiles(server.certificate, server.key, ours.certificate)
    credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes())
    with serving({"i": index}, metrics="127.0.0.1:0", tls=files, credentials=credentials) as served:
        url = f"https://{address(served)}/metrics"
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            read(url, context=trusting(ours))
        context = trusting(ours)
        context.load_cert_chain(client.certificate, client.key)
        assert "dualform_index_serving" in read(url, context=context)


def test_a_session_is_not_taken_up_again_where_certificates_are_asked_for(
    index: Path, ours: Authority, tmp_path: Path
) -> None:
    """It shows none, and whose it was may not be trusted any more."""
    server, client = (ours.sign(name, "DNS:localhost,IP:127.0.0.1") for name in ("s2", "c2"))
    files = TlsFiles(server.certificate, server.key, ours.certificate)
    theirs = authority(tmp_path, "theirs")
    credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes())
    context = trusting(ours)
    context.load_cert_chain(client.certificate, client.key)
    with serving({"i": index}, metrics="127.0.0.1:0", tls=files, credentials=credentials) as served:
        host, _, port = address(served).rpartition(":")

        def connect(session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
            plain = socket.create_connection((host, int(port)), 10)
            wrapped = context.wrap_socket(plain, server_hostname=host, session=session)
            wrapped.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            return wrapped

        with connect() as first:
            assert first.recv(100).startswith(b"HTTP/1.1 200")
            session = first.session
        with connect(session) as again:
            assert not again.session_reused
        served.reload(replace(served.config, tls=replace(files, client_ca=theirs.certificate)))
        with suppress(ssl.SSLError, ConnectionError), connect(session) as after:
            assert not after.recv(100)


def test_strangers_who_wait_do_not_keep_metrics_from_being_read(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as opened, serving({"i": index}, metrics="127.0.0.1:0") as served:
        host, _, port = address(served).rpartition(":")
        beginnings = [b"", b"GET /metrics HT", b"GET / HTTP/1.1\r\nx: " + b"y" * 9000]
        for number in range(3 * page.MOST_CONNECTIONS):
            waiting = opened.enter_context(socket.create_connection((host, int(port)), timeout=10))
            waiting.sendall(beginnings[number % 3])
        assert "dualform_index_serving" in read(f"http://{host}:{port}/metrics")
        assert len(served.server._page._open) <= page.MOST_CONNECTIONS
        monkeypatch.setattr(page, "PATIENCE_S", 0.2)
        with socket.create_connection((host, int(port)), timeout=10) as late:
            late.sendall(b"GET /metrics HT")
            assert late.recv(10) == b""
        for nonsense in (b"\0" * 100 + b"\r\n\r\n", b"y" * 100_000, b"POST / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=10) as odd:
                odd.sendall(nonsense)
                try:
                    told = odd.recv(100)
                except ConnectionResetError:
                    told = b""
                assert not told or told.startswith(b"HTTP/1.1 405 ")


@pytest.fixture
def measured(index: Path) -> Iterator[Served]:
    with serving({"i": index}, metrics="127.0.0.1:0") as served:
        yield served


def samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(read(f"http://{address(served)}/metrics"))
        for each in family.samples
    }


def test_calls_are_counted_by_the_names_of_grpcs_own_metrics(measured: Served) -> None:
    request = pb.TopKRequest(layer="fc", k=2, queries=tensor(np.ones((3, 6), np.float32)))
    answer = measured.stub.TopK(request)
    parts = list(
        measured.stub.StreamWeights(pb.StreamWeightsRequest(layer="fc", queries=request.queries))
    )
    with pytest.raises(grpc.RpcError):
        measured.stub.TopK(pb.TopKRequest(layer="nope"))
    found = samples(measured)
    method, ok = ("grpc_method", f"{SERVICE}/TopK"), ("grpc_status", "OK")
    stream = ("grpc_method", f"{SERVICE}/StreamWeights")
    assert found["grpc_server_call_started_total", (method,)] == 2
    assert found["grpc_server_call_duration_seconds_count", (method, ok)] == 1
    for way, sizes in (
        ("sent", {method: answer.ByteSize(), stream: sum(part.ByteSize() for part in parts)}),
        ("rcvd", {method: request.ByteSize(), stream: request.ByteSize() - 2}),  # no k
    ):
        name = f"grpc_server_call_{way}_total_compressed_message_size_bytes_sum"
        assert {of: found[name, (of, ok)] for of in sizes} == sizes
    assert found["dualform_scans_total", ()] >= 2
    assert found["dualform_storage_read_bytes_total", ()] >= 0


def test_who_is_refused_before_a_method_is_told_and_counted(
    index: Path, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dualform")
    with serving({"i": index}, metrics="127.0.0.1:0", tokens=tokens) as served:
        names = ["grpc.health.v1.Health/Check", *(f"some.Service/M{n}" for n in range(20))]
        for name in names:
            with pytest.raises(grpc.RpcError) as refused:
                served.channel.unary_unary(f"/{name}")(b"", metadata=(("x-request-id", name),))
            error: grpc.Call = refused.value  # type: ignore[assignment]
            assert dict(error.trailing_metadata())["x-request-id"] == name
        text = read(f"http://{address(served)}/metrics", "aaaaaaaa")
    told = [each.facts for each in caplog.records if each.name == "dualform.calls"]  # type: ignore[attr-defined]
    assert [(each["id"], each["code"], each["reason"]) for each in told] == [
        (name, "UNAUTHENTICATED", "NO_TOKEN") for name in names
    ]
    # However many names strangers think of.
    assert 'grpc_method="other",grpc_status="UNAUTHENTICATED"} 20.0' in text
    assert "some.Service" not in text
    assert 'grpc_server_call_started_total{grpc_method="grpc.health.v1.Health/Check"} 1.0' in text
