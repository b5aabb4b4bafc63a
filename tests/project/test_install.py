"""What an error says to install: a command for wherever this dualform came from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dualform._install import pip_install

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        (None, "pip install 'dualform[cpu]'"),
        (
            {"url": "file:///home/me/dualform", "dir_info": {"editable": True}},
            "pip install --editable '/home/me/dualform[cpu]'",
        ),
        (
            {"url": "file:///home/my%20work/dualform", "dir_info": {}},
            "pip install '/home/my work/dualform[cpu]'",
        ),
        (
            {"url": "file:///tmp/dualform-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/dualform-0.1.0-py3-none-any.whl[cpu]'",
        ),
        (
            {"url": "https://forge.example/dualform.git", "vcs_info": {"vcs": "git"}},
            "pip install 'dualform[cpu] @ git+https://forge.example/dualform.git'",
        ),
        (
            {"url": "https://forge.example/dualform-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'dualform[cpu] @ https://forge.example/dualform-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_the_command_is_for_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: object, said: str
) -> None:
    """`noted` is direct_url.json as PEP 610 has it; none is written for what an index gave."""
    record = tmp_path / "dualform-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.4\nName: dualform\nVersion: 0.1.0\n")
    if noted is not None:
        (record / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.syspath_prepend(tmp_path)
    assert pip_install("cpu") == said


def test_a_checkout_on_the_path_alone_is_named() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'protos')!r})\n"
        "from dualform._install import pip_install\nprint(pip_install('plot'))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", program], capture_output=True, text=True
    )
    assert done.stdout == "pip install '.[plot]' in the folder of a dualform checkout\n", done


def test_documents_install_the_checkout_until_there_is_a_package_to_name() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = [page.name for page in pages if re.search(r"pip install \S*dualform", page.read_text())]
    assert not named


def test_every_message_asks_for_the_command() -> None:
    """None of them names a source of its own."""
    wrong = [
        path.name
        for folder in ("protos", "indexer", "service", "clients")  # not build/, with copies of them
        for path in (ROOT / folder).glob("**/dualform/**/*.py")
        if path.name != "_install.py" and re.search(r"pip install \S*dualform", path.read_text())
    ]
    assert not wrong
