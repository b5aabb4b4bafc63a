"""A user's file that gives a model: run as a script would be, and nothing else is disturbed."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest

from dualform.client import InvalidArgumentError
from dualform.client.model_file import call_function

FILE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Given:
    number: int

def given():
    from beside_it import NUMBER  # while the function runs
    return Given(NUMBER)

def fails():
    raise KeyError("weights")
"""


@pytest.mark.parametrize("name", ["users_own_file", "json"])
def test_it_runs_as_a_script_would(name: str, tmp_path: Path) -> None:
    """Dataclasses and pickle need the module by its name; a loaded one keeps its own."""
    (tmp_path / f"{name}.py").write_text(FILE)
    (tmp_path / "beside_it.py").write_text("NUMBER = 3")
    before = list(sys.path)
    try:
        found = call_function(f"{tmp_path / name}.py:given", gives="a number")
        assert found.number == 3
        assert pickle.loads(pickle.dumps(found)) == found
        assert sys.path == before
        assert sys.modules["json"] is json
    finally:
        sys.modules.pop("beside_it", None)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "users_other_file.py"
    path.write_text(FILE)
    for spec, says in (
        (f"{path}:fails", "failed: KeyError: 'weights'"),
        (f"{path}:other", "has no function 'other'"),
        (f"{path}:Given", r"Given failed: TypeError: .*number"),
        (str(path), r"is no FILE\.py:FUNCTION, .* returns a number"),
        (f"{tmp_path}/no.py:given", r"no\.py is not there"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            call_function(spec, gives="a number")
    path.write_text("import nothing_of_this_name")
    sys.modules.pop(path.stem)
    with pytest.raises(InvalidArgumentError, match="No module named 'nothing_of_this_name'"):
        call_function(f"{path}:given", gives="a number")
    assert path.stem not in sys.modules
