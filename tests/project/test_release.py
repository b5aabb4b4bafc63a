"""`make dist` and `make dist-check`: what goes in, what is required, and a broken wheel is told."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

import dualform

ROOT = Path(__file__).resolve().parents[2]
SDIST = f"dualform-{dualform.__version__}.tar.gz"
WHEEL = f"dualform-{dualform.__version__}-py3-none-any.whl"


@pytest.fixture
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path, release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own, which the script takes for its own."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or no repository")
    path = tmp_path / "clone"
    done = subprocess.run(
        ["git", "clone", "--quiet", str(ROOT), str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(release, "ROOT", path)
    return path


def write(folder: Path, *requires: str) -> Path:
    """A wheel that has metadata and nothing else."""
    path = folder / "thing-1-py3-none-any.whl"
    lines = ["Metadata-Version: 2.4", "Name: thing", "Version: 1"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing-1.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def test_extras_are_followed_and_others_left_out(release: ModuleType, tmp_path: Path) -> None:
    wheel = write(
        tmp_path,
        "a>=1",
        "b>=2; extra == 'core'",
        "thing[core]; extra == 'cpu'",
        "c; extra == 'cpu'",
        "d; extra == 'gpu'",
        "e; python_version < '3'",
    )
    assert sorted(map(str, release.requirements(wheel, ["cpu"]))) == ["a>=1", "b>=2", "c"]
    assert list(map(str, release.requirements(wheel, []))) == ["a>=1"]


def test_what_is_required_of_the_required_is_found(release: ModuleType) -> None:
    found = release.closure([Requirement("grpcio-status")])
    assert {"grpcio-status", "grpcio", "protobuf", "googleapis-common-protos"} <= set(found)
    assert "pytest" not in found


@pytest.mark.parametrize(
    ("text", "said"),
    [("no-such-thing>=1", "not installed here"), ("numpy>=999", r"numpy>=999 is required; \d")],
)
def test_a_requirement_that_is_not_met_is_told(release: ModuleType, text: str, said: str) -> None:
    with pytest.raises(release.ReleaseError, match=said):
        release.closure([Requirement(text)])


@pytest.mark.slow
def test_what_is_committed_is_built_and_nothing_else(
    release: ModuleType, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone / "indexer" / "dualform" / "stray.py").write_text("")
    release.build(tmp_path / "dist")
    assert "not in it, as not committed: indexer/dualform/stray.py" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "dist").iterdir()} == {SDIST, WHEEL}
    with zipfile.ZipFile(tmp_path / "dist" / WHEEL) as archive:
        names = set(archive.namelist())
    with tarfile.open(tmp_path / "dist" / SDIST) as tar:
        kept = {name.partition("/")[2] for name in tar.getnames()}
    assert "dualform/store/index.py" in names
    assert "dualform/stray.py" not in names
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=clone, capture_output=True, text=True
    ).stdout.split()
    assert kept == {*tracked, "PKG-INFO"}


def test_a_folder_with_other_files_is_left_alone(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(release.ReleaseError, match=r"thesis\.txt is in the way"):
        release.build(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.slow
def test_a_wheel_that_lacks_a_part_does_not_pass(
    release: ModuleType, clone: Path, tmp_path: Path
) -> None:
    """Its metadata and its contents look well: only using it tells."""
    release.build(tmp_path / "dist")
    whole = tmp_path / "dist" / WHEEL
    less = tmp_path / "less.whl"
    left_out = "dualform/optimizers/adam.py"
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(less, "w") as copy:
        assert left_out in archive.namelist()
        for name in archive.namelist():
            text = archive.read(name)
            if name.endswith("RECORD"):
                text = b"".join(
                    line
                    for line in text.splitlines(keepends=True)
                    if not line.startswith(left_out.encode())
                )
            if name != left_out:
                copy.writestr(name, text)
    shutil.move(less, whole)
    with pytest.raises(release.ReleaseError, match=r"No module named 'dualform\.optimizers\.adam'"):
        release.check(tmp_path / "dist", by_pip=False)


def test_the_citation_and_the_issue_forms_are_what_forges_read() -> None:
    """What CFF 1.2.0 requires; and of issue forms, what GitHub's syntax does."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    for work in (cited, *cited["references"]):
        assert work["authors"]
        assert all(
            {"name"} == each.keys() or {"family-names", "given-names"} <= each.keys()
            for each in work["authors"]
        )
    assert all({"type", "title", "authors"} <= work.keys() for work in cited["references"])
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
        asked = [each for each in form["body"] if each["type"] != "markdown"]
        assert asked, path
        kinds = {"checkboxes", "dropdown", "input", "textarea"}
        assert {each["type"] for each in asked} <= kinds, path
        assert all(each["attributes"]["label"] for each in asked), path
        names = [each["id"] for each in asked]
        assert len(set(names)) == len(names), path
