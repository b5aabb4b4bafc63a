"""The lines to copy give the numbers that the page shows."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

from dualform.client import AsyncClient
from dualform.explore import LocalSources, View, load_model
from dualform.explore.answers import Attributed, Groups, LogitParts, Network, Query, Refused
from dualform.explore.asking import Asker
from dualform.explore.lines import QUERY_FILE, Whole, lines_of
from dualform.explore.network import network_of
from dualform.explore.queries import Uploads, query_of
from dualform.explore.sources import Source

from .conftest import wait
from .memory import Digits, write_model
from .test_answers import ask


@pytest.fixture(autouse=True)
def _where_they_are_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def pasted(python: str) -> subprocess.CompletedProcess[str]:
    """Runs these lines, with names and a process of their own; a warning ends it."""
    Path("lines.py").write_text(python)
    return warm.run_file(Path.cwd() / "lines.py")


def test_they_run_and_say_the_same(client: AsyncClient, digits: Digits, tmp_path: Path) -> None:
    view = View(layer="2", example=7, k=3, step=50, filters=("label != 3", "label != 4"))
    found = ask(client, view)
    np.save(tmp_path / QUERY_FILE, found.query.vector)
    source = Source("d", None, None, "", f"Client.local({str(digits.path)!r})", ("--local", "x"))
    lines = lines_of(source, view, found.unit, found.column)
    done = pasted(lines.python)
    assert done.returncode == 0, done.stderr
    assert not isinstance(found.by_weight, Refused)
    assert not isinstance(found.by_contribution, Refused)
    for each in (*found.by_weight, *found.by_contribution):
        assert f" {each.example} " in done.stdout
    assert isinstance(found.groups, Groups)
    assert len(lines.commands.splitlines()) == 5


def test_commands_ask_the_same(client: AsyncClient, digits: Digits, tmp_path: Path) -> None:
    view = View(layer="2", example=7, k=3, by="row", filters=("label != 3",))
    found = ask(client, view)
    np.save(tmp_path / QUERY_FILE, found.query.vector)
    (source,) = wait(LocalSources({"d": digits.path}).listed())
    lines = lines_of(source, view, found.unit, found.column).commands.splitlines()
    words = shlex.split(lines[1])
    assert words[0] == "dualform"
    done = warm.run(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert not isinstance(found.by_contribution, Refused)
    (rows,) = json.loads(done.stdout)["rows"]
    assert rows == [each.row for each in found.by_contribution]


@pytest.mark.parametrize("server", [True, False])
def test_texts_are_quoted(server: bool) -> None:
    source = Source(
        "d", "my index" if server else None, None, "", "Client('h:1')", ("--server", "h:1")
    )
    view = View(layer='a "b"', filters=("task = 'it''s'",))
    lines = lines_of(source, view, None, "")
    parsed = ast.walk(ast.parse(lines.python))
    texts = {each.value for each in parsed if isinstance(each, ast.Constant)}
    assert {view.layer, view.where} <= texts
    assert ("my index" in texts) == server
    for line in lines.commands.splitlines():
        words = shlex.split(line)
        assert words[words.index("--layer") + 1] == view.layer
        assert words[words.index("--where") + 1] == view.where


@pytest.mark.parametrize("function", ["trained", "own"])
def test_the_whole_network_is_asked_alike(
    client: AsyncClient, digits: Digits, tmp_path: Path, function: str
) -> None:
    """The copied Python gives the page's examples and scores; the command too, of own inputs. The
    model's file imports one beside it, which is not where the lines are pasted."""
    folder = tmp_path / "models"
    folder.mkdir()
    spec = write_model(digits, folder, function)
    (folder / "beside_it.py").touch()
    file = Path(spec.rpartition(":")[0])
    file.write_text("import beside_it\n" + file.read_text())
    model = load_model(spec)
    more: dict[str, Any] = {"example": 7} if function == "trained" else {"input": 7}
    view = View(layer="2", k=3, filters=("label != 3",), **more)
    (source,) = wait(LocalSources({"d": digits.path}).listed())
    asked: list[Query] = []

    async def steps() -> Network:
        info = await client.index()
        layer = info.layers["2"]
        query = await query_of(client, None, info, layer, view, Uploads(model))
        assert query is not None
        assert source.opens is not None
        asked.append(query)
        asker = Asker(client, None, info, layer, view, lambda _: None)
        return await network_of(asker, model, source.opens, query, "label")

    network = wait(steps())
    found, classes = network.attributed, network.classes
    assert isinstance(found, Attributed)
    assert isinstance(classes, LogitParts)
    np.save(tmp_path / QUERY_FILE, asked[0].vector)
    whole = Whole(model, asked[0].made, "margin", found.token, "label", classes.unit)
    lines = lines_of(source, view, None, "", whole)
    done = pasted(lines.python)
    assert done.returncode == 0, done.stderr
    # Its number, query, rank, group, score: of 3 examples; then, below a head, of 9 classes.
    table = [line.split() for line in done.stdout.rstrip().splitlines()[-13:]]
    for words, each in zip(table[:3], found.found, strict=True):
        assert words[3] == str(each.example)
        assert float(words[4]) == pytest.approx(each.score, rel=1e-5)
    of_classes = dict(zip(classes.names, classes.values.sum(axis=1), strict=True))
    said = {int(words[3]): float(words[4]) for words in table[4:]}
    assert said == pytest.approx(of_classes, rel=1e-5)
    commands = [line for line in lines.commands.splitlines() if "attribute" in line]
    assert len(commands) == 2 * (function == "own")
    if commands:
        for command, names in zip(
            commands, ([each.example for each in found.found], classes.names), strict=True
        ):
            words = shlex.split(command)
            assert words[0] == "dualform"
            done = warm.run(*words, "--json")
            assert done.returncode == 0, done.stderr
            data = json.loads(done.stdout)
            there = zip(data["groups"][7], data["counts"][7], strict=True)
            groups = [group for group, count in there if count]
            assert (sorted(groups) if "label" in words else groups) == names
