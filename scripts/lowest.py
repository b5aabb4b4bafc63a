"""Print the oldest versions that pyproject.toml names, as constraints for pip: make test-lowest.

    python scripts/lowest.py > constraints.txt
    python -m pip install --constraint constraints.txt ".[dev]"

A requirement with a lower bound gives one line; one without a bound (stubs for mypy) gives none.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Python 3.10 has none: hatchling, of [dev], brings the same parser.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
BOUNDED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+(?:b[0-9]+)?)")
UNBOUNDED = re.compile(r"[A-Za-z0-9._-]+")
# faiss-gpu owns the same module as faiss-cpu: the two are never installed together.
LEFT_OUT = {"gpu"}
# Not ours to bound: the oldest matplotlib calls names of it that later ones warn about, and tests
# make errors of warnings.
OF_THAT_TIME = ["pyparsing<3.3"]


def lowest(pyproject: Path = PYPROJECT) -> dict[str, str]:
    """Oldest version per package, of the dependencies and all extras but [gpu].

    Raises:
        ValueError: A requirement that is written otherwise than NAME>=VERSION, or bounded twice.
    """
    found: dict[str, str] = {}
    for text in _requirements(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]):
        bounded = BOUNDED.fullmatch(text)
        if bounded is None and not UNBOUNDED.fullmatch(text):
            raise ValueError(f"{pyproject.name}: {text!r} is not NAME>=VERSION")
        if bounded is not None:
            name, version = bounded["name"], bounded["version"]
            if found.setdefault(name, version) != version:
                raise ValueError(
                    f"{pyproject.name}: {name} is bounded by {found[name]} and {version}"
                )
    return found


def _requirements(project: dict[str, object]) -> Iterator[str]:
    """All requirements, without those of one extra upon another."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    lists = [
        project["dependencies"],
        *(needs for name, needs in extras.items() if name not in LEFT_OUT),
    ]
    for needs in lists:
        assert isinstance(needs, list)
        yield from (text for text in needs if not text.startswith(f"{project['name']}["))


if __name__ == "__main__":
    for package, oldest in lowest().items():
        print(f"{package}=={oldest}")
    print("\n".join(OF_THAT_TIME))
