"""How a server is trusted, and a caller known: TLS, certificates and tokens, over real sockets."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dualform.cli.main import main
from dualform.client import (
    AsyncClient,
    Client,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from dualform.client._connection import connection_of

from .answering import ELSEWHERE, answering, anyone, ask_both, wants_a_token
from .certificates import Authority, Signed, authority


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def of_server(ca: Authority) -> Signed:
    return ca.sign("server", "DNS:localhost,IP:127.0.0.1")


def credentials(signed: Signed, client_ca: Path | None = None) -> Any:
    return grpc.ssl_server_credentials(
        [(signed.key.read_bytes(), signed.certificate.read_bytes())],
        None if client_ca is None else client_ca.read_bytes(),
        client_ca is not None,
    )


def test_tls(ca: Authority, of_server: Signed) -> None:
    calls: list[Any] = []
    with answering(calls.append, credentials=credentials(of_server)) as address:
        port = address.rpartition(":")[2]
        ask_both(address, tls=ca.certificate)
        ask_both(f"localhost:{port}", tls=str(ca.certificate))
    assert [call.auth_context()["transport_security_type"] for call in calls] == [[b"ssl"]] * 4


def test_tls_with_a_certificate_of_the_clients_own(ca: Authority, of_server: Signed) -> None:
    signed = ca.sign("client", "DNS:client")
    with answering(anyone, credentials=credentials(of_server, ca.certificate)) as address:
        ask_both(address, tls=ca.certificate, certificate=signed.certificate, key=str(signed.key))
        with (
            Client(address, tls=ca.certificate, retry=None) as client,
            pytest.raises(UnavailableError, match="certificate=, key="),
        ):
            client.indexes()


def test_a_server_that_is_not_trusted_is_refused_at_once(
    ca: Authority, of_server: Signed, tmp_path: Path
) -> None:
    other = authority(tmp_path, "other")
    elsewhere = ca.sign("elsewhere", "DNS:example.org")
    for signed, trusted in (
        (of_server, other.certificate),
        (of_server, True),
        (elsewhere, ca.certificate),
    ):
        calls: list[Any] = []
        with answering(calls.append, credentials=credentials(signed)) as address:
            start = time.monotonic()
            with (
                Client(address, tls=trusted, token="let-me-in") as client,
                pytest.raises(UnavailableError, match="is not trusted") as caught,
            ):
                client.indexes()
        assert caught.value.reason == "TLS_REFUSED"
        assert "tries" not in str(caught.value)
        assert time.monotonic() - start < 10
        assert not calls


@pytest.mark.parametrize(
    ("start", "end", "what"),
    [
        ("20200101000000Z", "20200201000000Z", "has expired"),
        ("20800101000000Z", "20800201000000Z", "is not yet valid"),
    ],
)
def test_a_certificate_out_of_date(ca: Authority, start: str, end: str, what: str) -> None:
    """Nothing that is named here helps: it is renewed there, or a clock is wrong."""
    old = ca.sign_for("old", "DNS:localhost,IP:127.0.0.1", start, end)
    with (
        answering(anyone, credentials=credentials(old)) as address,
        Client(address, tls=ca.certificate) as client,
        pytest.raises(UnavailableError, match="out of date") as caught,
    ):
        client.indexes()
    if not re.search(r"VERIFY_FAILED[^:]", str(caught.value)):  # an older gRPC says no more
        assert re.search(f"is out of date .*{what}.*; renew", str(caught.value))
    assert caught.value.reason == "TLS_REFUSED"


def test_one_side_with_tls_and_the_other_without(ca: Authority, of_server: Signed) -> None:
    with (
        answering(anyone) as address,
        Client(address, tls=ca.certificate) as client,
        pytest.raises(UnavailableError, match="does not speak TLS"),
    ):
        client.indexes()
    with (
        answering(anyone, credentials=credentials(of_server)) as address,
        Client(address, retry=None) as client,
        pytest.raises(UnavailableError, match="tls=True"),
    ):
        client.indexes()


def test_a_token_goes_with_every_call(
    ca: Authority, of_server: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings in ({}, {"tls": ca.certificate}):
        safe = credentials(of_server) if settings else None
        with answering(wants_a_token, credentials=safe) as address:
            ask_both(address, token="let-me-in", **settings)
            with (
                Client(address, **settings) as client,
                pytest.raises(UnauthenticatedError, match="DUALFORM_TOKEN"),
            ):
                client.indexes()
            with (
                Client(address, token="guest", **settings) as client,
                pytest.raises(PermissionDeniedError, match="guests"),
            ):
                client.indexes()
            monkeypatch.setenv("DUALFORM_TOKEN", "let-me-in")
            ask_both(address, **settings)
            with (
                Client(address, token="wrong", **settings) as client,
                pytest.raises(UnauthenticatedError, match="12 long"),
            ):
                client.indexes()
            with (
                Client(address, token="", **settings) as client,
                pytest.raises(UnauthenticatedError, match="give a token"),
            ):
                client.indexes()
            monkeypatch.delenv("DUALFORM_TOKEN")


@pytest.mark.parametrize("server", [ELSEWHERE, "example.org:1", "ipv4:127.0.0.1:1,192.0.2.1:1"])
def test_a_token_does_not_leave_this_machine_in_the_clear(
    server: str, ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match="tls=True") as caught:
            kind(server, token="let-me-in")
        assert caught.value.field == "token"
        assert "let-me-in" not in str(caught.value)
    Client(server, token="let-me-in", tls=ca.certificate).close()
    monkeypatch.setenv("DUALFORM_TOKEN", "let-me-in")
    with pytest.raises(InvalidArgumentError, match="DUALFORM_TOKEN would travel"):
        Client(server)
    Client(server, token="").close()
    monkeypatch.delenv("DUALFORM_TOKEN")
    with pytest.raises(InvalidArgumentError, match="tls=True"):  # a name of the control plane's
        Client("xds:///localhost:50051", token="let-me-in")
    assert "let-me-in" not in repr(connection_of("localhost:1"))


def test_settings_that_can_not_be_meant(tmp_path: Path, ca: Authority) -> None:
    text = tmp_path / "text.pem"
    text.write_text("hello")
    pem = ca.certificate
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tls", {"tls": ""}),
        ("tls", {"tls": 1}),
        ("tls", {"tls": tmp_path / "none.pem"}),
        ("tls", {"tls": text}),
        ("tls", {"tls": tmp_path}),
        ("key", {"tls": True, "certificate": pem}),
        ("certificate", {"tls": True, "key": ca.key}),
        ("certificate", {"certificate": pem, "key": ca.key}),
        ("key", {"tls": True, "certificate": pem, "key": pem}),
        ("token", {"token": "two words"}),
        ("token", {"token": "line\n"}),
        ("token", {"token": "gr\xfc\xdfe"}),
        ("token", {"token": b"bytes"}),
    ]
    for field, settings in wrong:
        with pytest.raises(InvalidArgumentError) as caught:
            Client("localhost:50051", **settings)
        assert caught.value.field == field, settings


def test_the_command_reaches_a_server_the_same_way(
    ca: Authority,
    of_server: Signed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.save(tmp_path / "q.npy", np.ones((1, 3), np.float32))
    secret, wrong, empty = (tmp_path / name for name in ("secret", "wrong", "empty"))
    secret.write_text("let-me-in\n")
    wrong.write_text("other")
    empty.write_text("\n")
    question = ["query", "top-k", "--layer", "0", "--query", str(tmp_path / "q.npy")]

    def said(*options: object) -> str:
        assert main([*question, *map(str, options)]) == 2  # it has no index to answer from
        return capsys.readouterr().err

    trusted = ("--tls", ca.certificate)
    with answering(wants_a_token, credentials=credentials(of_server)) as address:
        server = ("--server", address)
        assert "Method not implemented" in said(*server, *trusted, "--token-file", secret)
        assert "12 long is not known" in said(*server, *trusted, "--token-file", wrong)
        assert "give a token" in said(*server, *trusted)
        assert "is empty" in said(*server, *trusted, "--token-file", empty)
        assert "can't be read" in said(*server, *trusted, "--token-file", tmp_path / "none")
        assert "is not trusted" in said(*server, "--tls", "--token-file", secret)
        monkeypatch.setenv("DUALFORM_TOKEN", "let-me-in")
        assert "Method not implemented" in said(*server, *trusted)
    assert "--tls is for --server" in said("--local", tmp_path, *trusted)
    assert "certificate= is missing" in said("--server", "localhost:1", "--tls", "--key", ca.key)
