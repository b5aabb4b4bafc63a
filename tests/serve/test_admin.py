"""`dualform admin` and SIGHUP: what a running server takes over, and what it says of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from synthetic import make_index

from dualform.cli.main import main
from dualform.client import Client, DataLossError

from .test_swap import damage

ROWS = (30, 50)


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(3)
    return [
        make_index(tmp_path / name, rng.standard_normal((rows, 6)).astype(np.float32), None)
        for name, rows in zip(("first", "second"), ROWS, strict=True)
    ]


class Running:
    """`dualform serve --config` on a file that can be changed, and what it logs."""

    def __init__(self, folder: Path, config: str, *, fresh: bool = False) -> None:
        self.config, self.log = folder / "server.yaml", folder / "log"
        self.config.write_text(config)
        words = ["serve", "--config", str(self.config)]
        errors = self.log.open("w+")
        self.process: Any
        if not fresh:
            self.process = warm.start("dualform", *words, errors=errors)
            return
        with errors:
            command = [sys.executable, "-m", "dualform.cli", *words]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def address(self) -> str:
        return self.process.stdout.readline().removeprefix("listening on ").strip()

    def admin(self) -> str:
        return self.log.read_text().split("admin listens on ")[1].split()[0]

    def maps(self) -> str:
        return Path(f"/proc/{self.process.pid}/maps").read_text()


@pytest.fixture
def running(
    versions: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Running]:
    config = f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nindexes: {{i: {versions[0]}}}\n"
    server = Running(tmp_path, config, fresh=getattr(request, "param", None) == "fresh")
    yield server
    server.process.kill()
    server.process.communicate()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def ask(client: Client, index: str = "i") -> Any:
    return client.top_k("fc", np.ones((1, 6), np.float32), k=1, index=index)


def test_reload_says_what_was_opened_kept_refused_and_removed(
    running: Running, versions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = versions
    with Client(running.address(), timeout=60) as client:
        admin = running.admin()

        def reload(text: str, status: int) -> list[str]:
            head = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n"
            running.config.write_text(head + text)
            assert main(["admin", "reload", "--admin", admin]) == status
            said = capsys.readouterr()
            return (said.out or said.err).splitlines()

        before = ask(client)
        assert before.coverage.total == ROWS[0]
        (kept,) = reload(f"indexes: {{i: {first}}}", 0)
        assert kept == f"kept     index i is version {before.index_version} still"

        opened, added = reload(f"indexes: {{i: {second}, j: {first}}}", 0)
        after = ask(client)
        assert after.coverage.total == ROWS[1]
        assert opened.startswith(f"opened   index i is now version {after.index_version} from ")
        assert added.startswith("opened   index j is now version ")
        assert ask(client, "j").index_version == before.index_version
        assert [each.version for each in client.indexes()] == [
            after.index_version,
            before.index_version,
        ]

        damage(first)
        log, removed, refused, kept = reload(f"indexes: {{k: {first}, i: {second}}}\nlog: json", 1)
        assert log == "refused  log has changed in the configuration: restart for it"
        assert removed == "removed  index j is served no more"
        assert refused.startswith("refused  index k cannot be served: ")
        assert ".faiss" in refused
        assert kept == f"kept     index i is version {after.index_version} still"

        nothing = " ".join(reload("indexes: [", 2))
        assert "nothing was changed: " in nothing
        assert "not valid YAML" in nothing
        assert ask(client).coverage.total == ROWS[1]


def test_maps_of_a_version_are_gone_after_the_swap(
    running: Running, versions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = versions
    with Client(running.address(), timeout=60) as client:
        ask(client)
        assert str(first) in running.maps()
        running.config.write_text(running.config.read_text().replace(str(first), str(second)))
        assert main(["admin", "reload", "--admin", running.admin()]) == 0
        ask(client)
        assert str(second) in running.maps()
        until(lambda: str(first) not in running.maps(), 10)
    capsys.readouterr()


def test_of_a_folder_of_versions_the_newest_is_taken_and_a_bad_one_refused(
    versions: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "served"
    shutil.copytree(versions[0], folder / "1")
    config = f"{{listen: '127.0.0.1:0', admin: '127.0.0.1:0', indexes: {{i: {folder}}}}}"
    server = Running(tmp_path, config)
    try:
        with Client(server.address(), timeout=60) as client:
            assert ask(client).coverage.total == ROWS[0]
            shutil.copytree(versions[1], folder / ".2")
            damage(folder / ".2")
            (folder / ".2").rename(folder / "2")
            os.utime(folder / "2" / "manifest.json")
            assert main(["admin", "reload", "--admin", server.admin()]) == 1
            assert "refused  index i stays at version" in capsys.readouterr().out
            assert ask(client).coverage.total == ROWS[0]
            assert main(["admin", "health", "--admin", server.admin()]) == 0
            shutil.copytree(versions[1], folder / ".3")
            (folder / ".3").rename(folder / "3")
            os.utime(folder / "3" / "manifest.json")
            assert main(["admin", "reload", "--admin", server.admin()]) == 0
            assert ask(client).coverage.total == ROWS[1]
    finally:
        server.process.kill()
        server.process.communicate()


def test_health_is_told_on_the_admin_address(
    running: Running, versions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    address, admin = running.address(), running.admin()
    with Client(address, timeout=60) as client:
        ask(client)
    assert main(["admin", "health", "--admin", admin]) == 0
    assert main(["admin", "health", "--admin", admin, "--index", "i"]) == 0
    assert capsys.readouterr().out == "SERVING\nSERVING\n"
    assert main(["admin", "health", "--admin", admin, "--index", "nope"]) == 2
    damage(versions[0])
    with Client(address, timeout=60) as client, pytest.raises(DataLossError):
        ask(client)
    assert main(["admin", "health", "--admin", admin]) == 1
    assert main(["admin", "health", "--admin", admin, "--alive"]) == 0
    running.process.terminate()
    assert running.process.wait(60) == 0
    assert main(["admin", "health", "--admin", admin]) == 2
    assert "no gRPC server answers" in capsys.readouterr().err


def test_admin_is_on_this_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "reload", "--admin", "192.0.2.1:50052"]) == 2
    assert "on this machine" in capsys.readouterr().err


def test_the_service_for_questions_does_not_take_admins_calls(running: Running) -> None:
    with grpc.insecure_channel(running.address()) as channel:
        call = channel.unary_unary("/dualform.v1.AdminService/Reload")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=20)
    refused: Any = caught.value
    assert refused.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("running", ["fresh"], indirect=True)
def test_sighup_while_python_imports_is_taken_later(running: Running) -> None:
    status = Path(f"/proc/{running.process.pid}/status")
    hangup = 1 << (signal.SIGHUP - 1)

    def blocked() -> bool:
        line = next(each for each in status.read_text().splitlines() if each.startswith("SigBlk"))
        return bool(int(line.split()[1], 16) & hangup)

    until(blocked)
    # torch, FAISS and gRPC are yet to come.
    assert "libtorch" not in running.maps()
    running.process.send_signal(signal.SIGHUP)
    assert running.address()
    until(lambda: "the configuration was read again" in running.log.read_text())
    running.process.terminate()
    assert running.process.wait(60) == 0
