"""The oldest versions that pyproject.toml names, as `make test-lowest` installs them."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lowest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lowest", ROOT / "scripts" / "lowest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, *needed: str) -> Path:
    path = folder / "pyproject.toml"
    words = ", ".join(f'"{text}"' for text in needed)
    path.write_text(
        f'[project]\nname = "x"\ndependencies = [{words}]\n'
        '[project.optional-dependencies]\ngpu = ["g>=9"]\nall = ["x[more]", "b>=2.1"]\n'
    )
    return path


def test_bounds_become_pins_and_nothing_else_does(lowest: ModuleType, tmp_path: Path) -> None:
    assert lowest.lowest(write(tmp_path, "a>=1.0", "types-c")) == {"a": "1.0", "b": "2.1"}


@pytest.mark.parametrize("text", ["a>=1,<2", "a~=1.0", "a==1", "b>=2"])
def test_what_it_cannot_pin_is_refused(lowest: ModuleType, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"pyproject\.toml"):
        lowest.lowest(write(tmp_path, text))


def test_what_is_installed_is_no_older_than_any_pin(lowest: ModuleType) -> None:
    pins = lowest.lowest()
    assert {"numpy", "grpcio", "protobuf", "torch", "faiss-cpu", "pytest"} <= set(pins)
    assert "faiss-gpu" not in pins
    older = [name for name, pin in pins.items() if Version(version(name)) < Version(pin)]
    assert not older
