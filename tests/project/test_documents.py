"""README and the guide are true: their code runs, in order, and their links lead somewhere.

In each document the python and bash blocks run one after another in one folder, the python blocks
in one interpreter. A block that begins with `# NAME.py` is that file. `dualform explore …` is
opened once, and ended. A block that is `dualform serve …` runs in the background on a free port,
and later blocks ask that port instead of 50051. Not run: `make` and `pip` (other tests do that).
A page that goes on where another ends is run after it, in its folder and interpreter.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path

import pytest
import warm

from dualform.client import Client
from dualform.optimizers import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = [
    "README.md",
    "docs/index.md",
    "docs/idea.md",
    "docs/recipes.md",
    "docs/attribution.md",
    "docs/explorer.md",
    "docs/getting-started.md",
    "docs/replay.md",
    "docs/decisions/0006-recorder-checks.md",
]
GOES_ON = {"docs/getting-started.md": "docs/sdk.md"}
# Pages whose code needs what other tests have: those run it.
RUN_BY = {
    "docs/server.md": "tests/serve/test_config.py",
    "docs/sdk.md": "tests/client/test_end_to_end.py",
    "docs/dual-form.md": "tests/client/test_end_to_end.py",
    "docs/plots.md": "tests/plot/test_page.py",
    "docs/training-stacks.md": "tests/integrations/test_page.py",
}
DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)

DRIVER = """
import json, pathlib, re, subprocess, sys, time, urllib.request, warnings
warnings.simplefilter("error")
blocks = json.loads(pathlib.Path("blocks.json").read_text())
space, address, server = {"__name__": "__main__"}, "localhost:50051", None
try:
    for number, (language, code) in enumerate(blocks):
        print(f"--- block {number} ({language})", flush=True)
        code = code.replace("localhost:50051", address)
        if re.match(r"# \\w+\\.py\\n", code):
            pathlib.Path(code[2:code.index("\\n")]).write_text(code)
        elif language == "python":
            exec(compile(code, f"block {number}", "exec"), space)
        elif "dualform explore" in code:
            code = code.strip().replace("dualform explore", "exec dualform explore")
            words = ["bash", "-euc", code + " --port 0"]
            page = subprocess.Popen(words, stdout=subprocess.PIPE)
            said = page.stdout.readline().decode()
            with urllib.request.urlopen(re.search(r"exploring at (\\S+)", said)[1]) as answer:
                assert answer.status == 200
            page.terminate()
            page.communicate(timeout=60)
        elif code.startswith("dualform serve"):
            log = open("serve.log", "wb")
            words = ["bash", "-c", "exec " + code.strip() + " --port 0"]
            server = subprocess.Popen(words, stdout=log, stderr=log)
            while not (found := re.search(r"listening on (\\S+)", open("serve.log").read())):
                assert server.poll() is None, open("serve.log").read()
                time.sleep(0.05)
            address = found[1]
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
finally:
    if server is not None:
        server.terminate()
        server.wait(timeout=60)
"""


def blocks(text: str) -> list[tuple[str, str]]:
    """The (language, code) of each python and bash block that can run here."""
    found = re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [each for each in found if not each[1].startswith(("make ", "pip "))]


@pytest.mark.parametrize("name", RUNNABLE)
def test_its_code_runs_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = blocks((ROOT / name).read_text())
    assert todo
    if name in GOES_ON:
        todo += blocks((ROOT / GOES_ON[name]).read_text())
    (tmp_path / "blocks.json").write_text(json.dumps(todo))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{warm.commands()}{os.pathsep}{os.environ['PATH']}")
    done = warm.run(DRIVER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("--- block") == len(todo)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_all_its_python_is_run(name: str) -> None:
    """By the test above, or by one that names the page. Indented code is run by none."""
    text = (ROOT / name).read_text()
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^ {4}(?:import|from) \w", fenced, re.MULTILINE)
    if re.search(r"^```python$", text, re.MULTILINE) and name not in RUNNABLE:
        assert Path(name).name in (ROOT / RUN_BY[name]).read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_its_links_lead_to_files(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_its_make_targets_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_extras_in_the_readme_are_the_projects() -> None:
    named = set(re.findall(r"^\| `\[(\w+)\]`", (ROOT / "README.md").read_text(), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    for extra in named:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_every_path_in_the_map_exists() -> None:
    """docs/architecture.md names files from the root, or as they are imported."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    places = [ROOT, *(path.parent for path in ROOT.glob("*/dualform/__init__.py"))]
    places += [path.parent for path in ROOT.glob("*/*/dualform/__init__.py")]
    # Links are the other test's.
    named = set(re.findall(r"(?<![\w./(])(\w[\w.-]*(?:/[\w.-]+)*/(?:\w+\.\w+)?)", text))
    assert len([name for name in named if "." in name]) >= 50
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "docs/architecture.md" in (ROOT / page).read_text(), page


def test_the_sdks_table_has_every_argument() -> None:
    text = (ROOT / "docs" / "sdk.md").read_text().partition("## What is asked")[2]
    text = text.partition("```")[0]
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", text, re.MULTILINE)
    beside = re.findall(r"`(\w+)=`", text.partition("\nBeside these ")[2])
    assert beside == ["timeout", "index", "strategy", "explain_plan", "partial"]
    planned = {"top_k", "top_groups", "sums", "dual_output"}
    assert len(rows) > 10
    for call, said in rows:
        expected = {word.partition("=")[0] for word in said.split(", ") if word} | {"timeout"}
        expected |= set() if call in ("indexes", "index") else {"index"}
        expected |= {"strategy", "explain_plan"} if call in planned else set()
        expected |= {"partial"} if call in planned - {"dual_output"} else set()
        parameters = inspect.signature(getattr(Client, call)).parameters
        assert expected == set(parameters) - {"self"}, call


def test_the_ledgers_columns_are_the_families() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    said = {
        family: (re.findall(r"`(\w+)`", columns), re.findall(r"`(\w+)`", buffers))
        for family, columns, buffers in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", text, re.M)
    }
    assert said == {
        name: (list(family.settings_type._fields), list(family.buffers))
        for name, family in FAMILIES.items()
    }


def test_every_page_is_in_the_index() -> None:
    """Of docs/ itself; decisions/ has one page each and is linked as a folder."""
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [
        path.name
        for path in (ROOT / "docs").glob("*.md")
        if path.name != "README.md" and f"({path.name})" not in index
    ]
    assert not missing


def test_every_decision_has_a_number_of_its_own() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers) > 20
    for page, number in zip(pages, numbers, strict=True):
        assert page.read_text().startswith(f"# {number}: "), page.name
