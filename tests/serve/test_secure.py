"""Who may ask: TLS, client certificates and tokens, over real sockets; read again while serving."""

from __future__ import annotations

import hmac
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from synthetic import make_index

from dualform.serve import ConfigError, tls
from dualform.serve.access import Access, Client
from dualform.serve.config import TlsFiles
from dualform.serve.tls import Certificates
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import refusal, serving, tensor


@dataclass(frozen=True)
class Authority:
    """Signs certificates for 127.0.0.1 with the openssl command."""

    folder: Path
    name: str

    @property
    def ca(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def certificate(self, name: str) -> TlsFiles:
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        extension = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        signed = ["-CA", self.ca, "-CAkey", self.folder / f"{self.name}.key"]
        made = ["-out", files.certificate, "-keyout", files.key, "-subj", f"/CN={name}"]
        openssl("req", *NEW, *made, "-addext", extension, *signed)
        return files


NEW = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def openssl(*arguments: Any) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> list[Authority]:
    folder = tmp_path_factory.mktemp("pki")
    made = [Authority(folder, name) for name in ("ours", "theirs")]
    for each in made:
        key = folder / f"{each.name}.key"
        openssl("req", *NEW, "-out", each.ca, "-keyout", key, "-subj", f"/CN={each.name} authority")
    return made


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    rng = np.random.default_rng(3)
    return {
        name: make_index(
            tmp_path_factory.mktemp(name), rng.standard_normal((20, 6)).astype(np.float32), None
        )
        for name in ("one", "two", "three")
    }


def ask(channel: grpc.Channel, token: str | None = None, index: str = "one") -> Any:
    stub = attribution_pb2_grpc.AttributionServiceStub(channel)
    request = pb.TopKRequest(index=index, layer="fc", k=2, queries=tensor(np.ones((1, 6), "f4")))
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    return stub.TopK(request, timeout=10, metadata=metadata)


def code(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    found: Any = caught.value
    return found.code()


def trusting(authority: Authority, files: TlsFiles | None = None) -> grpc.ChannelCredentials:
    pair = (
        (None, None) if files is None else (files.key.read_bytes(), files.certificate.read_bytes())
    )
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)


def test_tls_is_spoken_to_those_who_trust_it(
    authorities: list[Authority], indexes: dict[str, Path]
) -> None:
    ours, theirs = authorities
    files = ours.certificate("server")
    with serving(indexes, tls=files, credentials=trusting(ours)) as served:
        assert ask(served.channel).coverage.total == 20
        with grpc.insecure_channel(served.address) as channel:
            assert code(lambda: ask(channel)) == grpc.StatusCode.UNAVAILABLE
        with grpc.secure_channel(served.address, trusting(theirs)) as channel:
            assert code(lambda: ask(channel)) == grpc.StatusCode.UNAVAILABLE


def test_mutual_tls_asks_for_a_certificate_of_the_right_authority(
    authorities: list[Authority], indexes: dict[str, Path]
) -> None:
    ours, theirs = authorities
    files = replace(ours.certificate("mutual"), client_ca=ours.ca)
    certificate, foreign = ours.certificate("client"), theirs.certificate("foreign")
    with serving(indexes, tls=files, credentials=trusting(ours, certificate)) as served:
        assert ask(served.channel).coverage.total == 20
        for without in (trusting(ours), trusting(ours, foreign)):
            with grpc.secure_channel(served.address, without) as channel:
                assert code(lambda channel=channel: ask(channel)) == grpc.StatusCode.UNAVAILABLE


def test_a_new_certificate_is_taken_over_without_dropping_a_connection(
    authorities: list[Authority], indexes: dict[str, Path]
) -> None:
    ours, theirs = authorities
    files, other = ours.certificate("old"), theirs.certificate("new")
    with serving(indexes, tls=files, credentials=trusting(ours)) as served:
        assert ask(served.channel).coverage.total == 20
        files.key.write_text("not a key")
        served.reload()  # a bad pair changes nothing
        with grpc.secure_channel(served.address, trusting(ours)) as channel:
            assert ask(channel).coverage.total == 20
        files.key.write_bytes(other.key.read_bytes())
        files.certificate.write_bytes(other.certificate.read_bytes())
        served.reload()
        assert ask(served.channel).coverage.total == 20
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(served.address, trusting(theirs), options) as channel:
            assert ask(channel).coverage.total == 20
        with grpc.secure_channel(served.address, trusting(ours), options) as channel:
            assert code(lambda: ask(channel)) == grpc.StatusCode.UNAVAILABLE


def test_files_of_two_pairs_are_refused(authorities: list[Authority], tmp_path: Path) -> None:
    ours, _ = authorities
    one, two = ours.certificate("first"), ours.certificate("second")
    with pytest.raises(ConfigError, match="one pair"):
        Certificates(TlsFiles(one.certificate, two.key))
    with pytest.raises(ConfigError, match="cannot be read"):
        Certificates(TlsFiles(one.certificate, tmp_path / "none"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="client_ca"):
        Certificates(replace(one, client_ca=tmp_path / "empty"))


def dated(authority: Authority, name: str, first: str, last: str) -> TlsFiles:
    """A certificate of the authority, valid between two times (YYYYMMDDHHMMSSZ)."""
    folder = authority.folder / name
    folder.mkdir()
    (folder / "database").write_text("")
    (folder / "serial").write_text("01")
    (folder / "configuration").write_text(
        f"[ca]\ndefault_ca=it\n[it]\ndatabase={folder}/database\nserial={folder}/serial\n"
        f"new_certs_dir={folder}\ndefault_md=sha256\npolicy=policy\n[policy]\ncommonName=supplied\n"
    )
    files, request = TlsFiles(folder / "it.pem", folder / "it.key"), folder / "request"
    openssl("req", *NEW[1:6], "-subj", f"/CN={name}", "-keyout", files.key, "-out", request)
    ours = ["-cert", authority.ca, "-keyfile", authority.folder / f"{authority.name}.key"]
    dates = ["-startdate", first, "-enddate", last, "-in", request, "-out", files.certificate]
    openssl("ca", "-batch", "-notext", "-config", folder / "configuration", *ours, *dates)
    return files


@pytest.mark.parametrize(
    ("years", "word"),
    [
        (("2020", "2021"), "has expired"),
        (("2120", "2121"), "is not yet valid"),
        (("2020", "2121"), None),
    ],
)
def test_a_certificate_that_no_client_would_take_is_refused(
    authorities: list[Authority], years: tuple[str, str], word: str | None
) -> None:
    times = [f"{year}0101000000Z" for year in years]
    files = dated(authorities[0], "-".join(years), *times)
    before = Certificates(authorities[0].certificate(f"before {years}"))
    if word is None:
        before.reload(files)
        return
    for take in (Certificates, before.reload):
        with pytest.raises(ConfigError, match=f"refused by clients now: .*{word}"):
            take(files)


@pytest.mark.parametrize(
    "torn", ["-----BEG", "-----BEGIN CERTIFICATE-----\nMIIB", "all but an end"]
)
def test_half_of_a_file_of_certificates_is_refused(
    authorities: list[Authority], tmp_path: Path, torn: str
) -> None:
    ours, theirs = authorities
    files = ours.certificate(f"torn {len(torn)}")
    both = ours.ca.read_bytes() + theirs.ca.read_bytes()
    (tmp_path / "ca").write_bytes(both)
    Certificates(replace(files, client_ca=tmp_path / "ca"))
    half = both[:-40] if torn.startswith("all") else ours.ca.read_bytes() + torn.encode()
    (tmp_path / "ca").write_bytes(half)
    with pytest.raises(ConfigError, match=r"client_ca.* is not whole"):
        Certificates(replace(files, client_ca=tmp_path / "ca"))
    (tmp_path / "chain").write_bytes(files.certificate.read_bytes() + half)
    with pytest.raises(ConfigError, match=r"not whole|no PEM"):
        Certificates(replace(files, certificate=tmp_path / "chain"))


@pytest.mark.parametrize("line", ["-----BEGIN CERTIFICATE-----\n", "-----BEGIN C{}-----\n"])
def test_a_file_of_half_a_million_beginnings_is_refused_at_once(
    authorities: list[Authority], tmp_path: Path, line: str
) -> None:
    ours, _ = authorities
    files = ours.certificate("beginnings")
    with (tmp_path / "ca").open("w") as file:
        file.writelines(line.format(number) for number in range(500_000))
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"client_ca.* is not whole"):
        Certificates(replace(files, client_ca=tmp_path / "ca"))
    assert time.process_time() - begin < 20  # minutes, where each is looked for to the file's end


def test_a_chain_that_is_longer_than_a_greeting_is_refused(
    authorities: list[Authority], tmp_path: Path
) -> None:
    files = authorities[0].certificate("long")
    (tmp_path / "chain").write_bytes(500 * files.certificate.read_bytes())
    with pytest.raises(ConfigError, match=r"tls.certificate .*chain can't be shown to clients"):
        Certificates(replace(files, certificate=tmp_path / "chain"))


def test_files_that_are_written_while_they_are_read_are_refused(
    authorities: list[Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = (authorities[0].certificate(f"written {name}") for name in "ab")
    check = tls._check_whole

    def written_meanwhile(*arguments: Any) -> None:
        check(*arguments)
        files.key.write_bytes(other.key.read_bytes())

    monkeypatch.setattr(tls, "_check_whole", written_meanwhile)
    with pytest.raises(ConfigError, match="changed while they were read"):
        Certificates(files)


@pytest.mark.parametrize("key", ["tls.key", "tls.certificate", "tls.client_ca", "tokens"])
def test_what_is_no_regular_file_is_refused_at_once(
    authorities: list[Authority], tmp_path: Path, key: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    files = authorities[0].certificate(f"beside {key}")

    def take(path: Path) -> object:
        if key == "tokens":
            return Access(path)
        return Certificates(replace(files, **{key.removeprefix("tls."): path}))

    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=f"{key}: .*(no regular file|Is a directory)"):
            take(path)


UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
TOKENS = """
# who asks
alice:aaaaaaaaaaaaaaaa
alice:AAAAAAAAAAAAAAAA
bob:bbbbbbbbbbbbbbbb:one,two
carol:cccccccccccccccc:three
dave:dddddddddddddddd:none
"""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path


def test_a_token_opens_every_method_and_none_is_open_without(
    indexes: dict[str, Path], tokens: Path
) -> None:
    with serving(indexes, tokens=tokens) as served:
        stub, queries = served.stub, tensor(np.ones((1, 6), "f4"))
        question = {"index": "one", "layer": "fc", "queries": queries}
        requests = {
            "ListIndexes": pb.ListIndexesRequest(),
            "GetIndex": pb.GetIndexRequest(index="one"),
            "TopK": pb.TopKRequest(k=2, **question),
            "TopGroups": pb.TopGroupsRequest(by="step", k=2, **question),
            "Attribute": pb.AttributeRequest(index="one", inputs=1, by="step", k=2),
            "SelfInfluence": pb.SelfInfluenceRequest(index="one", layer="fc", by="step"),
            "Sums": pb.SumsRequest(group_by="step", **question),
            "DualOutput": pb.DualOutputRequest(**question),
            "Explain": pb.ExplainRequest(index="one", k=1),
            "StreamWeights": pb.StreamWeightsRequest(**question),
            "GetExamples": pb.GetExamplesRequest(index="one", ids=[pb.Value(int64_value=1)]),
        }
        requests["Explain"].layers.add(layer="fc", queries=queries)
        along = tensor(np.ones((1, 1), np.float32))
        requests["Attribute"].layers.add(layer="fc", queries=queries, direction=along)
        methods = pb.DESCRIPTOR.services_by_name["AttributionService"].methods_by_name
        assert set(requests) == set(methods)
        for name, request in requests.items():

            def call(*metadata: tuple[str, str], name: str = name, request: Any = request) -> Any:
                found = getattr(stub, name)(request, metadata=metadata, timeout=10)
                return list(found) if methods[name].server_streaming else found

            refused = refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "NO_TOKEN")
            refused = refusal(lambda: call(("authorization", "Bearer bbbbbbbbbbbbbbbc")))
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "BAD_TOKEN")
            for word in ("aaaaaaaaaaaaaaaa", "AAAAAAAAAAAAAAAA"):
                metadata = ("authorization", f"Bearer {word}")
                if name in ("DualOutput", "Attribute", "SelfInfluence"):  # no values in this index
                    assert refusal(lambda: call(metadata)).reason == "NO_VALUES"  # noqa: B023
                else:
                    call(metadata)


def test_health_and_reflection_follow_the_same_rule(indexes: dict[str, Path], tokens: Path) -> None:
    metadata = (("authorization", "Bearer aaaaaaaaaaaaaaaa"),)
    for open_health in (False, True):
        with serving(indexes, tokens=tokens, open_health=open_health) as served:
            health = health_pb2_grpc.HealthStub(served.channel)
            check = health_pb2.HealthCheckRequest()
            if open_health:
                health.Check(check, timeout=10)
            else:
                assert code(lambda: health.Check(check, timeout=10)) == UNAUTHENTICATED  # noqa: B023
            assert health.Check(check, timeout=10, metadata=metadata).status == 1
            reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel)
            asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
            call = lambda **how: next(  # noqa: E731
                reflection.ServerReflectionInfo(iter(asked), timeout=10, **how)  # noqa: B023
            )
            assert code(call) == UNAUTHENTICATED
            assert call(metadata=metadata).list_services_response.service


def test_a_token_opens_its_indexes_alone(indexes: dict[str, Path], tokens: Path) -> None:
    with serving(indexes, tokens=tokens) as served:
        bob = (("authorization", "Bearer bbbbbbbbbbbbbbbb"),)
        listed = served.stub.ListIndexes(pb.ListIndexesRequest(), metadata=bob)
        assert [each.name for each in listed.indexes] == ["one", "two"]
        assert ask(served.channel, "bbbbbbbbbbbbbbbb", "two").coverage.total == 20
        for hidden in ("three", "never"):
            refused = refusal(lambda: ask(served.channel, "bbbbbbbbbbbbbbbb", hidden))  # noqa: B023
            assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_INDEX")
            assert "one, two" in refused.message
            assert refused.message.count("three") == (hidden == "three")
        refused = refusal(lambda: ask(served.channel, "bbbbbbbbbbbbbbbb", ""))
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "three" not in refused.message
        # The only one that a token opens need not be named.
        assert ask(served.channel, "cccccccccccccccc", "").coverage.total == 20
        for asked in ("", "one", "none"):
            refused = refusal(lambda: ask(served.channel, "dddddddddddddddd", asked))  # noqa: B023
            assert refused.reason == "UNKNOWN_INDEX"
            assert refused.message == "none of the indexes that 'dave' may ask is served"


def test_tokens_are_read_again_and_never_logged(
    indexes: dict[str, Path], tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "dualform")
    with serving(indexes, tokens=tokens) as served:
        ask(served.channel, "bbbbbbbbbbbbbbbb")
        assert code(lambda: ask(served.channel, "eeeeeeeeeeeeeeee")) == UNAUTHENTICATED
        tokens.write_text("erin:eeeeeeeeeeeeeeee\n")
        served.reload()
        ask(served.channel, "eeeeeeeeeeeeeeee")
        assert code(lambda: ask(served.channel, "bbbbbbbbbbbbbbbb")) == UNAUTHENTICATED
        tokens.write_text("erin:eeee eeeeeeeeeeeX\n")
        served.reload()  # a bad file changes nothing
        ask(served.channel, "eeeeeeeeeeeeeeee")
    assert "the tokens stay as they were" in caplog.text
    assert "client=bob" in caplog.text
    for secret in ("bbbbbbbb", "eeee"):
        assert secret not in caplog.text


def test_tokens_stay_in_force_where_a_reload_finds_none(
    indexes: dict[str, Path], tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that is gone by mistake does not open the server; tokens may be added, though."""
    with serving(indexes) as served:
        ask(served.channel)
        served.reload(replace(served.config, tokens=tokens))
        assert code(lambda: ask(served.channel)) == UNAUTHENTICATED
        served.reload()
        assert code(lambda: ask(served.channel)) == UNAUTHENTICATED
        ask(served.channel, "bbbbbbbbbbbbbbbb")
    assert "tokens was taken out of the configuration: restart for it" in caplog.text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "none"),
        ("alice", "line 1"),
        ("a:b:c:d", "line 1"),
        ("# x\n a b:c", "line 2"),
        ("a:b:one,,two", "line 1 .* empty name"),
        # Which of them would count?
        ("a:secret\na:other\na:secret:one", "lines 1 and 3 .* same token"),
        ("a:secret:one\nb:secret:one", "lines 1 and 2 .* same token"),
    ],
)
def test_what_is_no_file_of_tokens_is_told_without_its_words(
    tmp_path: Path, text: str, word: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as refused:
        Access(path)
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Access(tmp_path / "nowhere")


def test_the_time_that_a_token_takes_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared with all, in constant time, by digests of one length."""
    path = tmp_path / "tokens"
    path.write_text("".join(f"name{n}:{n:032x}\n" for n in range(9)))
    access = Access(path)
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr("dualform.serve.access.hmac.compare_digest", counted)
    for token in (f"{0:032x}", f"{8:032x}", "x", "x" * 5000, ""):
        compared.clear()
        found = access.client([("authorization", f"Bearer {token}")])
        assert isinstance(found, Client) == (len(token) == 32)
        assert compared == [(32, 32)] * 9


def test_a_file_of_tokens_from_another_editor(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes("# für alle\r\nalice:aaaa\r\nalice:aaaa\r\n".encode("utf-8-sig"))
    found = Access(path).client([("authorization", "Bearer aaaa")])
    assert isinstance(found, Client)
    assert found.name == "alice"
    path.write_bytes("# für alle\nalice:aaaa\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        Access(path)
