"""The notebooks: each runs from top to bottom, and holds no output and no path of a machine.

Their code cells run one after the other in one interpreter, as a kernel would have it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import warm

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / name).read_text("utf-8"))
    assert notebook["nbformat"] == 4
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def run(name: str, folder: Path, **environment: str) -> str:
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]
    program = "__import__('matplotlib').use('agg')\n"
    program += f"import json\nfor code in json.loads({json.dumps(json.dumps(code))}):\n"
    program += "    exec(compile(code, 'cell', 'exec'), globals())\n"
    path = folder / "cells.py"
    path.write_text(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        done = warm.run_file(path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_three() -> None:
    assert NAMES == ["continual_learner.ipynb", "language_model.ipynb", "wrong_digit.ipynb"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_run_is_kept(name: str) -> None:
    found = cells(name)
    assert [cell["id"] for cell in found] == [f"cell-{number}" for number in range(len(found))]
    for cell in found:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
        text = "".join(cell["source"])
        assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users|mnt)/", text)
    assert found[0]["cell_type"] == "markdown"


def test_one_wrong_digit(tmp_path: Path) -> None:
    said = run("wrong_digit.ipynb", tmp_path)
    told = re.search(r"shows digit (\d), the network says (\d)\.", said)
    assert told is not None
    assert told[1] != told[2]
    with_them, without = re.findall(r"logit \d: (\S+), without the images (\S+)", said)[0]
    assert float(without) < float(with_them)
    assert (tmp_path / "wrong_digit" / "behind.png").stat().st_size > 3000


@pytest.mark.slow
def test_a_continual_learner(tmp_path: Path, data_dir: Path) -> None:
    said = run("continual_learner.ipynb", tmp_path, DUALFORM_DATA=str(data_dir))
    then, measured = re.findall(r"([\d.]+)% from memory, ([\d.]+)% as measured", said)[0]
    assert abs(float(then) - float(measured)) <= 0.2
    trained = re.findall(r"as trained +([\d.]+)%", said)[0]
    assert float(trained) < float(measured) - 10  # It forgets.
    assert len(re.findall(r"clothes masked in", said)) == 2


@pytest.mark.slow
def test_a_language_model(tmp_path: Path, data_dir: Path) -> None:
    said = run("language_model.ipynb", tmp_path, DUALFORM_DATA=str(data_dir))
    losses = [float(each) for each in re.findall(r"epoch \d: loss ([\d.]+)", said)]
    assert losses[-1] < losses[0]
    assert len(re.findall(r"was followed by", said)) == 5
