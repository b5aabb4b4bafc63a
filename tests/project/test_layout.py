"""The rules of the layout: who imports whom, what a package exports, what each file begins with."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    "protos",
    "indexer",
    "service",
    "clients/python",
    "clients/plot",
    "clients/explore",
    "clients/cli",
]
# What each part may use: those below it, never those above or beside it.
MAY_IMPORT = {
    "v1": set(),
    "layers": set(),
    "optimizers": set(),
    "questions": {"v1"},
    "store": {"optimizers", "v1"},
    "index": {"optimizers", "store", "v1"},
    "record": {"layers", "optimizers", "store", "v1"},
    "engine": {"optimizers", "questions", "store", "v1"},
    # Filters as text are the client's.
    "replay": {"client", "engine", "questions", "record", "optimizers", "store", "v1"},
    "machines": {"engine", "index", "questions", "store", "v1"},
    "serve": {"machines", "engine", "questions", "record", "index", "store", "v1"},
    "client": {"engine", "layers", "questions", "record", "index", "store", "v1"},
    "plot": {"client", "v1"},
    "explore": {"client"},
    "cli": {
        "machines",
        "serve",
        "client",
        "plot",
        "explore",
        "engine",
        "questions",
        "record",
        "index",
        "store",
        "v1",
    },
}
# The rooms of the engine, from the lowest up; a file may use its own room and those before it.
ROOMS = ["rows", "memory", "plan", "devices", "totals", "topk", "groups", "api", "messages"]
# What all of them may use.
COMMON = {"errors", "context", "threads"}
# What every part may use: files of the package itself.
AT_TOP = {"__version__", "_errors", "_install"}
MOST_FILES = 12
MOST_LEVELS = 5
# The remote client lives without torch and FAISS: it may import these inside functions only.
LAZY_IN_CLIENT = {
    "dualform.engine",
    "dualform.layers",
    "dualform.store",
    "torch",
    "faiss",
    "pyarrow",
    "pandas",
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder / "dualform").rglob("*.py")):
            part, *below = path.relative_to(ROOT / folder / "dualform").parts
            if below:
                found.append((part, path))
    return found


def imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            names.add(str(node.module))
            if node.module == "dualform":
                names |= {f"dualform.{alias.name}" for alias in node.names}
    return names


def test_every_part_is_there() -> None:
    assert {package for package, _ in modules()} == set(MAY_IMPORT)


def test_the_folders_are_merged_by_the_same_file_in_each() -> None:
    """What any of them holds besides would be seen or not by the order of sys.path alone."""
    merging = [(ROOT / folder / "dualform" / "__init__.py").read_text() for folder in FOLDERS]
    assert len(set(merging)) == 1
    files = {path.name for folder in FOLDERS for path in (ROOT / folder / "dualform").glob("*.*")}
    assert files == {"__init__.py", "_errors.py", "_install.py", "_version.py", "py.typed"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_part_imports_only_those_below_it(package: str) -> None:
    wrong = []
    for owner, path in modules():
        if owner != package:
            continue
        for name in imports(ast.parse(path.read_text())):
            parts = name.split(".")
            ours = parts[0] == "dualform" and len(parts) > 1
            if ours and parts[1] not in MAY_IMPORT[package] | {package, *AT_TOP}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


ENGINE = ROOT / "service" / "dualform" / "engine"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    below = {*ROOMS[: ROOMS.index(room) + 1], *COMMON}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ENGINE / room).glob("*.py"))
        for name in imports(ast.parse(path.read_text()))
        if name.startswith("dualform.engine") and name.split(".")[2:3] not in [[r] for r in below]
    ]
    assert not wrong


def test_every_file_of_the_engine_is_in_a_room() -> None:
    assert {path.name for path in ENGINE.iterdir() if path.is_dir()} - {"__pycache__"} == set(ROOMS)
    assert {path.stem for path in ENGINE.glob("*.py")} == {"__init__", *COMMON}
    for room in ROOMS:
        assert len(list((ENGINE / room).glob("*.py"))) - 1 <= MOST_FILES, room
        says = ast.get_docstring(ast.parse((ENGINE / room / "__init__.py").read_text())) or ""
        assert "May import" in says, f"{room} does not say what it may import"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_levels(room: str) -> None:
    uses = {
        f"dualform.engine.{room}.{path.stem}": imports(ast.parse(path.read_text()))
        for path in (ENGINE / room).glob("*.py")
    }

    def level(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"{name} imports itself through {above}"
        below = [level(other, (*above, name)) for other in uses[name] if other in uses]
        return 1 + max(below, default=0)

    levels = {name: level(name) for name in uses}
    assert max(levels.values()) <= MOST_LEVELS, levels


def test_the_client_imports_the_engine_lazily() -> None:
    wrong = []
    for owner, path in modules():
        if owner == "client":
            top = top_level(ast.parse(path.read_text()).body)
            for name in imports(ast.Module(top, [])):
                if any(name == lazy or name.startswith(f"{lazy}.") for lazy in LAZY_IN_CLIENT):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name} at its top")
    assert not wrong


def top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run at import; those under TYPE_CHECKING do not."""
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            kept += top_level(node.orelse)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            kept.append(node)
    return kept


@pytest.mark.parametrize("package", sorted(set(MAY_IMPORT) - {"v1"}))
def test_a_package_exports_a_sorted_list_that_exists(package: str) -> None:
    module = importlib.import_module(f"dualform.{package}")
    # By letters, or as ruff sorts them: constants, classes, functions.
    by_kind = sorted(module.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert list(module.__all__) in (sorted(module.__all__), by_kind)
    for name in module.__all__:
        assert hasattr(module, name), name


def test_every_module_says_what_it_is_for() -> None:
    without = [
        str(path.relative_to(ROOT))
        for package, path in modules()
        if package != "v1" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not without


def test_importing_the_client_loads_neither_torch_nor_faiss() -> None:
    program = (
        "import sys, dualform.client; "
        "print([m for m in ('torch', 'faiss', 'pyarrow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_kinds_of_layers_need_torch_alone() -> None:
    """The client asks them, and beside a model there may be torch and no more."""
    program = (
        "import sys, dualform.layers; "
        "print([m for m in ('faiss', 'pyarrow', 'pandas', 'xxhash', 'transformers', "
        "'dualform.record', 'dualform.store') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_part_is_typed() -> None:
    for folder in FOLDERS:
        for part in (ROOT / folder / "dualform").iterdir():
            if list(part.glob("*.py")):  # what a part that moved leaves behind has none
                assert (part / "py.typed").is_file(), part
