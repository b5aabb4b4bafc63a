"""No function branches more than a reader can follow: cyclomatic complexity, as radon counts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from radon.complexity import cc_visit
from radon.visitors import Class

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["indexer", "service", "clients", "protos", "experiments", "benchmarks", "scripts"]
MOST = 15


def too_complex(text: str) -> Iterator[str]:
    """Functions and methods above the limit; what a class has is counted in its methods."""
    for block in cc_visit(text):
        if not isinstance(block, Class) and block.complexity > MOST:
            yield f"{block.lineno} {block.fullname} ({block.complexity})"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_has_too_many_branches(folder: str) -> None:
    """Name what a branch is for, and pull it out; a table is better than a chain."""
    files = [p for p in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in p.name]
    assert files
    texts = {p.relative_to(ROOT).as_posix(): p.read_text() for p in files}
    assert not [f"{name}:{each}" for name, text in texts.items() for each in too_complex(text)]


def test_the_limit_is_seen() -> None:
    branches = "".join(f"    if x == {i}:\n        return {i}\n" for i in range(MOST))
    inside = "".join(f"    {line}\n" for line in f"def f(x):\n{branches}".splitlines())
    assert list(too_complex(f"def f(x):\n{branches}")) == [f"1 f ({MOST + 1})"]
    assert list(too_complex(f"class C:\n{inside}")) == [f"2 C.f ({MOST + 1})"]
    assert not list(
        too_complex(f"def f(x):\n{branches}".replace("    if x == 0:\n        return 0\n", ""))
    )
