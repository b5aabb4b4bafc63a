"""What lies in an index, a recording or a configuration is never run."""

from __future__ import annotations

import ast
from pathlib import Path

import yaml

from dualform.serve import config

ROOT = Path(__file__).resolve().parents[2]
UNPICKLE = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
# Between a server and its own actors, over Ray, which does so itself.
ACTORS = ROOT / "service" / "dualform" / "machines"


def runs(source: str) -> set[str]:
    """What of a source runs, or may run, what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= UNPICKLE & {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= UNPICKLE & {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "yaml.unsafe_load"):
                found.add(called)
            found |= {
                "allow_pickle"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            }
    return found


def test_such_lines_would_be_noticed() -> None:
    source = (
        "import pickle\nfrom dill import loads\neval(x)\ntorch.load(f)\nnp.load(f, allow_pickle=y)"
    )
    assert runs(source) == {"pickle", "dill", "eval", "torch.load", "allow_pickle"}


def test_nothing_read_is_run() -> None:
    files = [
        path for part in ("indexer", "service", "clients") for path in (ROOT / part).rglob("*.py")
    ]
    assert len(files) > 200
    found = {str(path): what for path in files if (what := runs(path.read_text("utf-8")))}
    assert {path for path in found if not Path(path).is_relative_to(ACTORS)} == set()


def test_a_configuration_makes_plain_values_only() -> None:
    assert issubclass(config._Loader, yaml.SafeLoader)
