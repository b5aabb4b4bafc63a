"""The configuration file: what it may say, and what a mistake is told."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_index

from dualform.questions.placement import gpu_memory
from dualform.serve import ConfigError, ServerConfig, ServerLimits
from dualform.serve.addresses import check_addresses

from .serving import serving

# The example of the user's documentation.
PAGE = Path(__file__).parents[2] / "docs" / "server.md"
DOCUMENTED = PAGE.read_text().split("```yaml\n")[1].split("```")[0]


def load(folder: Path, text: str) -> ServerConfig:
    path = folder / "server.yaml"
    path.write_text(text)
    return ServerConfig.load(path)


def test_documented_file_equals_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, DOCUMENTED)
    assert config == ServerConfig({"mnist": tmp_path / "indexes/mnist"})
    assert (config.host, config.port) == ("127.0.0.1", 50051)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, "indexes: {a: below/a, b: /abs/b}")
    assert config.indexes == {"a": tmp_path / "below/a", "b": Path("/abs/b")}


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing yet\n") == ServerConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 5", ["'port'", "listen", "indexes", "device", "limits", "insecure"]),
        ("limits: {max_kk: 5}", ["'max_kk'", "max_k", "queued_scans"]),
        ("tls: {certificate: a.pem}", ["tls", "key is missing"]),
        ("tls: {certificate: a.pem, key: b, ca: c}", ["unknown key 'ca'", "client_ca"]),
        # As templates leave behind whose variable is empty: clients would not be asked for one.
        ("tls: {certificate: a.pem, key: b, client_ca: ''}", ["tls.client_ca is ''"]),
        ("tls: {certificate: a.pem, key: b, client_ca: false}", ["tls.client_ca is False"]),
        ("tls: {certificate: a.pem, key: b, client_ca: []}", ["tls.client_ca is []"]),
        ("tls: {certificate: 3, key: b}", ["tls.certificate", "path"]),
        ("tokens: [a]", ["tokens", "path"]),
        ("open_health: 3", ["open_health", "true and false"]),
        ("log: xml", ["log", "text, json"]),
        ("metrics: 9464", ["metrics", "HOST:PORT"]),
        ("metrics: 0.0.0.0:9464", ["metrics", "insecure: true"]),
        ("? [a, b]\n: 3", ["line 1", "keys are words"]),
        ("listen: localhost:99999", ["listen", "65535"]),
        ("memory: 4GB", ["memory", "'4GB'", "such as 4GiB"]),
        ("memory: 4", ["memory", "MiB, GiB or TiB"]),
        ("memory: -4GiB", ["memory", "'-4GiB'"]),
        ("memory: 0GiB", ["memory", "from 1"]),
        ("explore: 8080", ["explore", "true, false and HOST:PORT"]),
        ("explore: 0.0.0.0:8080", ["explore", "on this machine alone"]),
        ("{explore: true, tokens: t.txt}", ["explore", "dualform explore --server"]),
        ("admin: 50052", ["admin", "HOST:PORT"]),
        ("admin: 0.0.0.0:50052", ["admin", "on this machine alone"]),
        ("{admin: '10.0.0.1:50052', insecure: true}", ["admin", "on this machine alone"]),
        ("telemetry: http://collector", ["telemetry", "true and false"]),
        ("tokens_file: tokens", ["unknown key 'tokens_file'"]),
        ("limits: {max_k: '5'}", ["limits.max_k", "'5'", "integers"]),
        ("limits: {max_k: true}", ["limits.max_k", "True"]),
        ("limits: {max_k: 0}", ["limits.max_k", "from 1"]),
        ("limits: {max_message_mib: 2048}", ["max_message_mib", "2,047"]),
        ("limits: {concurrent_scans: 0}", ["concurrent_scans"]),
        ("limits: {queued_scans: -1}", ["queued_scans"]),
        ("limits: 5", ["limits", "key: value"]),
        ("- a", ["key: value"]),
        ("indexes: [a]", ["indexes", "name: path"]),
        ("indexes: {}", ["indexes", "at least one"]),
        ("indexes: {1: a}", ["indexes", "quotes"]),
        ("indexes: {a: null}", ["indexes", "None"]),
        ("device: gpu", ["device", "'gpu'", "auto, cpu, cuda"]),
        ("device: cuda:01", ["device", "'cuda:01'", "cuda:N"]),
        ("device: [cuda:0, cpu]", ["device", "'cpu'", "[cuda:0, cuda:1]"]),
        ("device: [cuda, cuda:0]", ["device", "named once"]),
        ("device: []", ["device", "[]", "cuda:N"]),
        ("device: 1", ["device", "1", "cuda:N"]),
        ("gpu_memory: 80%", ["gpu_memory", "'80%'", "0.8", "20GiB"]),
        ("gpu_memory: 1.5", ["gpu_memory", "1.5", "up to 1"]),
        ("gpu_memory: 0", ["gpu_memory", "above 0"]),
        ("gpu_memory: true", ["gpu_memory", "True"]),
        ("gpu_memory: 0GiB", ["gpu_memory", "'0GiB'"]),
        ("listen: 50051", ["listen", "HOST:PORT"]),
        ("listen: ':50051'", ["listen", "HOST:PORT"]),
        ("listen: 127.0.0.1", ["listen", "HOST:PORT"]),
        ("listen: unix:/run/dualform", ["HOST:PORT", "sockets in the file system"]),
        ("listen: /run/dualform", ["HOST:PORT", "sockets in the file system"]),
        ("listen: 127.0.0.1:99999", ["listen", "HOST:PORT"]),
        ("listen: '::1:50051'", ["listen", "[::1]:50051"]),
        ("listen: 0.0.0.0:50051", ["listen", "insecure: true"]),
        ("listen: example.org:50051", ["listen", "insecure: true"]),
        ("listen: '[::]:50051'", ["listen", "insecure: true"]),
        ("insecure: yes please", ["insecure", "true and false"]),
        ("a: [", ["not valid YAML"]),
        (f"gpu_memory: {'9' * 400}GiB", ["gpu_memory", "such as 20GiB"]),
        (f"memory: {'9' * 400}GiB", ["memory", "such as 4GiB"]),
        (f"memory: {'9' * 12}TiB", ["memory", "such as 4GiB"]),
        ("gpu_memory: \u0663GiB", ["gpu_memory", "such as 20GiB"]),
        ("memory: \u0663GiB", ["memory", "such as 4GiB"]),
        ("gpu_memory: 2", ["gpu_memory", "is 2;", "1MiB at least"]),
        ("gpu_memory: 0.5MiB", ["gpu_memory", "1MiB at least"]),
        ("gpu_memory: .inf", ["gpu_memory", "inf"]),
        ("gpu_memory: .nan", ["gpu_memory", "nan"]),
        (f"gpu_memory: {'9' * 400}", ["line 1", "64 bits"]),
        (f"gpu_memory: {'9' * 5000}", []),
        (f"limits: {{max_k: 0x{'f' * 5000}}}", ["line 1", "64 bits"]),
        ("gpu_memory: 2026-99-99", ["not valid YAML", "month"]),
        ("device: !!int x", ["not valid YAML", "'x'"]),
        ("device: !!bool x", ["not valid YAML", "KeyError: 'x'"]),
        ("device: !!timestamp x", ["not valid YAML"]),
        ("device: " + "[" * 500, ["not valid YAML"]),
        ("indexes: {a: '~nouser/x'}", ["indexes.a", "'~nouser/x'", "whole path"]),
        ("tokens: ~nouser/x", ["tokens", "'~nouser/x'", "whole path"]),
        ('indexes: {a: "x\\0y"}', ["indexes.a", "null byte"]),
        ("listen: 127.0.0.1:1\nlisten: 127.0.0.1:2", ["listen", "twice"]),
    ],
)
def test_mistakes_are_told(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for word in ["server.yaml", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("1TiB", 1 << 40)],
)
def test_memory_has_a_unit(tmp_path: Path, text: str, size: int) -> None:
    assert load(tmp_path, f"memory: {text}").memory == size


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ServerConfig.load(tmp_path / "missing.yaml")


@pytest.mark.parametrize("listen", ["localhost:1", "[::1]:0", "127.8.8.8:65535"])
def test_loopback_needs_nothing_said(listen: str) -> None:
    assert ServerConfig(listen=listen).insecure is False


def test_beyond_loopback_when_said_outright(tmp_path: Path) -> None:
    config = load(tmp_path, "{listen: '0.0.0.0:0', insecure: true}")
    assert (config.host, config.port) == ("0.0.0.0", 0)


def test_replacing_checks_again() -> None:
    with pytest.raises(ConfigError, match="insecure: true"):
        replace(ServerConfig(), listen="0.0.0.0:1")


def test_limits_have_the_engine_s_defaults() -> None:
    from dualform.engine.messages.catalog import Limits

    ours, engines = ServerLimits(), Limits()
    assert (ours.max_k, ours.max_queries, ours.max_message_mib) == (
        engines.max_k,
        engines.max_queries,
        engines.max_message_mib,
    )


def test_configuration_loads_neither_torch_nor_faiss() -> None:
    code = (
        "import sys; from dualform.serve import ServerConfig, policy; ServerConfig(); "
        "policy.apply(); "
        "print([m for m in ('torch', 'faiss', 'grpc', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "given",
    ["9" * 400 + "GiB", 10**5000, 2, "\u0663GiB", float("inf"), True],
    ids=lambda given: str(type(given)),
)
def test_no_amount_of_gpu_memory(given: object) -> None:
    with pytest.raises(ValueError, match=r"^gpu_memory is .*, such as 20GiB, 1MiB at least"):
        gpu_memory(given)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(1 << 30), 1 << 30),
        ("1MiB", 1 << 20),
        (1 << 20, 1 << 20),
        (1, 1.0),
    ],
)
def test_the_least_of_gpu_memory(given: object, size: float) -> None:
    assert gpu_memory(given) == size


def test_a_small_file_with_a_large_meaning_is_told_in_few_words(tmp_path: Path) -> None:
    text, nested = "log: ", "[x, x, x, x, x, x, x, x, x, x]"
    for name in "abcdefg":
        nested = f"[&{name} {nested}" + 9 * f", *{name}" + "]"
    with pytest.raises(ConfigError, match="log is ") as caught:
        load(tmp_path, text + nested)
    assert len(str(caught.value)) < 2000


def test_a_file_that_would_take_minutes_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(tmp_path, "limits: [" + "1," * (1 << 19) + "1]")


def test_the_pages_client_without_the_sdk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = np.random.default_rng(2).standard_normal((50, 20)).astype(np.float32)
    index = make_index(tmp_path, keys, None)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with serving({"i": index}) as served:
        code = code.replace("localhost:50051", served.address)
        # README's index calls its layers otherwise.
        exec(code.replace('layer="0"', 'layer="fc"'), {})
    scores = keys.astype(np.float64).sum(1)
    assert re.findall(r"\d+", capsys.readouterr().out) == [
        str(row) for row in np.argsort(-scores)[:5]
    ]


def test_addresses_that_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may lead to one address twice; an address that is everywhere is each."""
    real = socket.getaddrinfo
    twice = lambda *asked, **more: 2 * real(*asked, **more)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", twice)
        free = ServerConfig(listen="localhost:0", metrics="localhost:0")
        assert check_addresses(free) == []
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            taken = ServerConfig(listen=f"localhost:{port}", metrics="localhost:0")
            assert check_addresses(taken) == ["listen"]
        assert check_addresses(ServerConfig(listen=f"localhost:{port}")) == []
    for everywhere in ("0.0.0.0", "[::]"):
        config = ServerConfig(listen=f"{everywhere}:5997", admin="127.0.0.1:5997", insecure=True)
        with pytest.raises(ConfigError, match="admin and listen are both"):
            check_addresses(config)


def test_everywhere_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4Only(socket.socket):
        def __init__(self, family: int = -1, *more: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *more)

    monkeypatch.setattr(socket, "socket", Ipv4Only)
    assert check_addresses(ServerConfig(listen="[::]:5996", insecure=True)) == []
    with pytest.raises(ConfigError, match=r"listen: cannot listen on \[::1\]:5996"):
        check_addresses(ServerConfig(listen="[::1]:5996"))
