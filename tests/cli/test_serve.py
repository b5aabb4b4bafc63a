"""`dualform serve`: its arguments, its configuration, its signals."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from client.memory import Memory

from dualform.cli.errors import CommandError
from dualform.cli.serve import named_indexes
from dualform.client import Client

from .conftest import COMMAND, dualform, serving


def test_names_of_indexes(tmp_path: Path) -> None:
    named = named_indexes([f"{tmp_path}/a/", "b=x/y", "../c=d/e"])
    assert named == {"a": tmp_path / "a", "b": Path("x/y"), "e": Path("../c=d/e")}
    with pytest.raises(CommandError, match="NAME="):
        named_indexes(["x/a", "y/a"])


def test_serves_several_until_told(memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(
        f"listen: 127.0.0.1:0\nindexes: {{first: {memory.path}}}\nlimits: {{max_k: 7}}\n"
    )
    more = [f"second={memory.path}", memory.path, f"bad={tmp_path}"]
    with (
        serving("--config", tmp_path / "server.yaml", *more) as address,
        Client(address) as client,
    ):
        health = {index.name: index.health for index in client.indexes()}
        rows = client.index("second").layers["fc"].rows
    assert health == {
        "first": "serving",
        "second": "serving",
        memory.path.name: "serving",
        "bad": "damaged",
    }
    assert rows == 600


def test_interrupting_it_is_an_orderly_end(memory: Memory) -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", str(memory.path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("listening on 127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_what_can_not_be_served(memory: Memory, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"indexes: {{memory: {memory.path}}}\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("indexs: {}\n")
    for arguments, says in (
        ([], "no index to serve"),
        ([tmp_path / "nope"], "nope"),
        ([memory.path, memory.path], "NAME="),
        ([f"memory={memory.path}", "--config", config], "memory"),
        (["--config", wrong], "indexs"),
        (["--config", tmp_path / "missing.yaml"], "missing.yaml"),
        ([memory.path, "--host", "0.0.0.0"], "insecure"),
        ([memory.path, "--port", "99999"], "99999"),
    ):
        done = dualform("serve", *arguments)
        assert (done.status, done.out) == (2, ""), (arguments, done)
        assert says in done.err, (arguments, done)


def test_a_taken_port(memory: Memory, server: str) -> None:
    done = dualform("serve", memory.path, "--port", server.rpartition(":")[2])
    assert done.status == 2
    assert server.rpartition(":")[2] in done.err


@pytest.mark.parametrize("option", ["--tls", "--tokens-file=x", "--conf=x"])
def test_options_of_later_are_refused(memory: Memory, option: str) -> None:
    done = dualform("serve", memory.path, option)
    assert done.status == 2
    assert "unrecognized arguments" in done.err
