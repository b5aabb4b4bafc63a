"""Clocks jump: no decision asks what time it is, only how long ago something was."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("indexer", "service", "clients/python")
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime"}


def readings(source: str) -> list[int]:
    """Lines that read the wall clock: `time.time()`, `datetime.now()` and their like."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WALL
        and isinstance(node.func.value, (ast.Name, ast.Attribute))
        and ast.unparse(node.func.value).rpartition(".")[2] in ("time", "datetime", "date")
    ]


def test_such_a_line_would_be_noticed() -> None:
    assert readings("import time\ntime.monotonic()\ntime.time()\ndatetime.datetime.now()") == [3, 4]


@pytest.mark.parametrize("part", PARTS)
def test_no_decision_is_by_the_wall_clock(part: str) -> None:
    files = sorted((ROOT / part).rglob("*.py"))
    assert len(files) > 20
    read = {str(path): found for path in files if (found := readings(path.read_text("utf-8")))}
    assert not read
