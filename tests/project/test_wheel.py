"""The wheel: complete, and enough for a remote client without torch and FAISS."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import dualform

ROOT = Path(__file__).resolve().parents[2]
FILES = ["__init__.py", "_errors.py", "_install.py", "_version.py", "py.typed"]
PARTS = ["v1", "store", "record", "index", "engine", "replay", "serve", "client", "plot", "cli"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_part_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        listed = archive.namelist()
    names = set(listed)
    assert len(listed) == len(names)
    for part in PARTS:
        assert f"dualform/{part}/__init__.py" in names
        assert f"dualform/{part}/py.typed" in names
    at_top = {name for name in names if re.fullmatch(r"dualform/[^/]+", name)}
    assert at_top == {f"dualform/{file}" for file in FILES}
    assert "dualform/v1/attribution_pb2_grpc.py" in names
    strangers = [name for name in names if not name.startswith(("dualform/", "dualform-"))]
    assert not strangers
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_client_alone_asks_a_real_server(
    wheel: Path, server: str, queries: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)  # this environment's pip installs into it
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile", wheel]
    done = subprocess.run([str(word) for word in install], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = f"""
import importlib.util
for module in ("torch", "faiss", "pyarrow"):
    assert importlib.util.find_spec(module) is None, module
import numpy as np
import dualform
from dualform.client import Client
assert dualform.__version__ == {dualform.__version__!r}
queries = np.load({str(queries)!r})
with Client({server!r}) as client:
    (index,) = client.indexes()
    hits = client.top_k("2", queries, k=3)
    sums = client.sums("2", queries, group_by="label")
    output = client.dual_output("2", queries)
print(hits.rows.shape, sums.values.shape, output.values.shape)
"""
    asked = subprocess.run(
        [str(python), "-W", "error", "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == "(1, 3) (1, 10) (1, 256)"
