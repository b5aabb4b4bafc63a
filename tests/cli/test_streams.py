"""Streams that are closed, or cannot say every letter."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from client.memory import Memory
from client.serving import free_port, serving
from synthetic import make_index

from dualform.client import Client, Retry

from .conftest import COMMAND, dualform


def test_letters_that_the_terminal_lacks_are_escaped(server: str, query_file: Path) -> None:
    question = ["query", "sums", "--server", server, "--layer", "fc", "--query", query_file]
    done = dualform(*question, "--group-by", "größe", PYTHONIOENCODING="ascii:strict")
    assert done.status == 2
    assert "gr\\xf6\\xdfe" in done.err
    odd = query_file.with_name("größe.npy")
    done = dualform(*question[:-1], odd, "--group-by", "label", PYTHONIOENCODING="ascii:strict")
    assert (done.status, done.out) == (2, "")
    assert "gr\\xf6\\xdfe.npy can't be read" in done.err


@pytest.mark.slow
def test_an_index_with_letters_that_the_terminal_lacks(tmp_path: Path) -> None:
    rows = np.ones((4, 3), np.float32)
    index = make_index(tmp_path, rows, None, größe=["ä", "b", "ä", "b"])
    np.save(tmp_path / "q.npy", rows[:1])
    question = ["--layer", "fc", "--query", tmp_path / "q.npy"]
    with serving({"index": index}) as address:
        for words in (
            ["query", "top-k", "--server", address, *question],
            ["query", "sums", "--server", address, *question, "--group-by", "größe"],
            ["index", "inspect", index],
        ):
            done = dualform(*words, PYTHONIOENCODING="ascii:strict")
            assert (done.status, done.err) == (0, "")
            assert "gr\\xf6\\xdfe" in done.out


@pytest.mark.parametrize("close", [">&-", "2>&-", ">&- 2>&-"])
def test_an_answer_that_went_nowhere_is_no_success(
    server: str, query_file: Path, close: str
) -> None:
    words = ["query", "sums", "--server", server, "--layer", "fc", "--query", str(query_file)]
    command = shlex.join([*COMMAND, *words, "--group-by", "label"])
    done = subprocess.run(f"{command} {close}", shell=True, capture_output=True, text=True)
    closed = ">&-" in close.split()
    said = "dualform: standard output is closed, so what this printed went nowhere\n"
    assert (done.returncode, done.stderr) == (2 * closed, said if close == ">&-" else "")


def test_a_server_whose_output_is_closed_serves(memory: Memory) -> None:
    """Its line says where it listens, and answers nobody."""
    port = free_port()
    command = [*COMMAND, "serve", f"m={memory.path}", "--port", str(port)]
    with subprocess.Popen(
        f"exec {shlex.join(command)} >&-", shell=True, stderr=subprocess.PIPE, text=True
    ) as serving_it:
        try:
            with Client(f"127.0.0.1:{port}", retry=Retry(attempts=200)) as client:
                assert [each.name for each in client.indexes()] == ["m"]
        finally:
            serving_it.terminate()
        _, said = serving_it.communicate(timeout=60)
    assert serving_it.returncode == 0
    assert "standard output" not in said
