"""The version: one number, the same from the package, its metadata and the command."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import dualform
from dualform.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_and_its_metadata_say_the_same() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", dualform.__version__)
    assert version("dualform") == dualform.__version__


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"dualform {dualform.__version__}\n"


def test_it_loads_nothing_else() -> None:
    program = (
        "import sys; before = set(sys.modules); import dualform; dualform.__version__; "
        "print(sorted(m for m in set(sys.modules) - before if m.startswith('dualform')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "['dualform', 'dualform._version']", done.stderr


def test_the_number_stands_in_one_place() -> None:
    number = re.escape(dualform.__version__)
    written = re.compile(rf"""version\w*["']?\s*[=:]\s*["']?{number}\b""")
    files = ["pyproject.toml", "CITATION.cff", "Makefile"]
    for folder in ("protos", "indexer", "service", "clients"):  # not build/, with copies of them
        files += [str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("**/dualform/*.py")]
    found = [file for file in files if written.search((ROOT / file).read_text())]
    assert found == ["protos/dualform/_version.py"]


def test_the_changelog_begins_with_what_is_not_released_yet() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert any(title.split()[0] == dualform.__version__ for title in sections[1:])
