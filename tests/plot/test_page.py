"""docs/plots.md: its code runs beside a model, images and an index."""

from __future__ import annotations

import re
from pathlib import Path

import digits
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plots.md"


def test_its_code_draws(
    digits_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("indexes").mkdir()
    Path("indexes/mnist").symlink_to(digits_index)
    space = {"model": digits.network(), "images": digits.load().images}
    exec(compile(code, str(PAGE), "exec"), space)
    assert Path("attention.pdf").read_bytes().startswith(b"%PDF")
