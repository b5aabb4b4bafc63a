"""Whom the page asks, and what it says of those who can't be asked; the command's refusals."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from dualform.cli.main import main
from dualform.client import AsyncClient, DualformError, InvalidArgumentError, UnavailableError
from dualform.explore import LocalSources, ServerSources
from dualform.explore.app import run
from dualform.serve import ConfigError
from dualform.serve.explorer import check_installed

from .conftest import wait
from .memory import Digits


def test_a_damaged_index_is_there_with_the_reason(digits: Digits, tmp_path: Path) -> None:
    shutil.copytree(digits.path, tmp_path / "broken")
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    sources = LocalSources({"good": digits.path, "broken": tmp_path / "broken"})
    good, broken = wait(sources.listed())
    assert not good.trouble
    assert broken.trouble
    with pytest.raises(DualformError):
        broken.asked()
    wait(sources.close())


def test_a_server_that_is_not_there_is_said() -> None:
    client = AsyncClient("127.0.0.1:1", retry=None)
    with pytest.raises(UnavailableError):
        wait(ServerSources(client, "Client('127.0.0.1:1')", ()).listed())


def test_the_page_is_on_this_machine_alone(digits: Digits) -> None:
    sources = LocalSources({})
    for host in ("0.0.0.0", "example.org", "::"):
        with pytest.raises(InvalidArgumentError, match="on this machine alone"):
            run(sources, host=host)


@pytest.mark.parametrize("port", [-1, 65536, 99999, 2**70])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"port={port} is none") as caught:
        run(LocalSources({}), port=port)
    assert caught.value.field == "port"


def test_what_is_not_installed_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], digits: Digits
) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert main(["explore", str(digits.path)]) == 2
    assert "[explore]" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="explore needs nicegui: pip install"):
        check_installed(True)
    check_installed(False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to look at"),
        (["a", "--server", "localhost:1"], "say what to look at"),
        (["nowhere"], "there is no index at nowhere"),
        (["--server", "localhost:99999999"], "localhost:99999999"),
    ],
)
def test_the_command_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_recording_is_no_index(digits: Digits, capsys: pytest.CaptureFixture[str]) -> None:
    """Where none can be opened there is nothing to show, and what to do is said at once."""
    recording = digits.path.with_name("recording")
    assert main(["explore", str(recording)]) == 2
    assert "build one with `dualform index build" in capsys.readouterr().err
