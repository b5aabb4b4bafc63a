"""docs/idea.md: the worked example's numbers, in tables, pictures and what its code prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "idea.md").read_text()
KEYS = np.array([[2.0, 1.0], [1.0, -1.0]])
TARGETS = np.array([[1.0, 2.0], [1.5, -0.5]])
QUERY = np.array([1.0, 2.0])
MINUS = "\N{MINUS SIGN}"


def trained() -> tuple[list[list[float]], np.ndarray, np.ndarray]:
    """Per step key, target, output, value and weight in a row; values; the last weight."""
    weight, rows, values = np.eye(2), [], []
    for key, target in zip(KEYS, TARGETS, strict=True):
        output = weight @ key
        weight = weight + 0.5 * np.outer(target - output, key)
        values.append(target - output)
        rows.append([*key, *target, *output, *(target - output), *weight.ravel()])
    return rows, np.array(values), weight


def numbers(line: str) -> list[float]:
    """Those in parentheses."""
    found = re.findall(r"\(([^()]*\d[^()]*)\)", line.replace(MINUS, "-"))
    return [float(each) for part in found for each in part.split(",")]


def test_the_tables_are_right() -> None:
    rows, values, weight = trained()
    steps = re.findall(r"^\| [01] \| (.*)$", PAGE, re.MULTILINE)
    assert [numbers(line) for line in steps] == rows
    weights = KEYS @ QUERY
    lines = re.findall(r"^\| datapoint of step . \| (\S+) \| (\([^|]*\)) \| (.*) \|$", PAGE, re.M)
    assert [float(each[0].replace(MINUS, "-")) for each in lines] == list(weights)
    added = 0.5 * weights[:, None] * values
    assert [numbers(each[1]) for each in lines] == added.tolist()
    for each, product, value in zip(lines, weights, values, strict=True):
        assert numbers(each[2])[-2:] == value.tolist()
        assert str(int(product)) in each[2].replace(MINUS, "-")
    (initial,) = re.findall(r"^\| initial weight \| \| (.*) \| W_0 x \|$", PAGE, re.MULTILINE)
    (whole,) = re.findall(r"^\| sum \| \| (.*) \| W_2 x \|$", PAGE, re.MULTILINE)
    assert numbers(initial) == QUERY.tolist()
    assert numbers(whole) == (weight @ QUERY).tolist() == (QUERY + added.sum(0)).tolist()
    assert f"turns the query x = (1, 2) into {whole}" in " ".join(PAGE.split())


def test_the_code_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/idea.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.split() == " ".join(said).split()


def test_the_pictures_are_of_these_numbers(tmp_path: Path) -> None:
    """They are what the script draws, and it draws the example's numbers."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "idea_pictures.py"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in ("idea-memory.svg", "idea-plane.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / "images" / name).read_text()
    _, values, weight = trained()
    weights = KEYS @ QUERY
    shown = re.findall(r">([^<>]*\d[^<>]*)</text>", (tmp_path / "idea-memory.svg").read_text())
    drawn = {word.replace(MINUS, "-") for word in shown}
    vectors = [*KEYS, QUERY, *values, *(0.5 * weights[:, None] * values), weight @ QUERY]
    assert {f"({x + 0.0:g}, {y + 0.0:g})" for x, y in vectors} | {
        f"{w:g}" for w in weights
    } <= drawn
