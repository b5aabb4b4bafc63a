"""The walkthrough: it runs as it is, and what it says and draws is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "walkthrough.py"


@pytest.mark.slow
def test_it_runs_and_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = warm.run_file(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"shows digit (\d), the network says (\d)\.", done.stdout)
    assert told is not None
    assert told[1] != told[2]
    # The ten images masked took away what spoke for the wrong answer.
    before, after = re.findall(rf"logit {told[2]} +(-?[\d.]+)$", done.stdout, re.MULTILINE)
    assert float(after) < float(before)
    for name in ("matches", "attention", "sums", "profile", "contributions"):
        with Image.open(tmp_path / "walkthrough" / f"{name}.png") as picture:
            assert picture.width > 500
            assert len(picture.convert("L").getcolors() or []) > 10


def test_it_opens_as_a_notebook() -> None:
    cells = re.findall(r"^# %%( \[markdown\])?$", SCRIPT.read_text(), re.MULTILINE)
    assert len(cells) > 12
