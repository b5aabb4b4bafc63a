"""The sdist and the wheel, built from what is committed and tried where no checkout is.

    python scripts/release.py build dist            # make dist
    python scripts/release.py check dist [--pip]    # make dist-check

`check` installs the wheel in an environment of its own. The packages that `dualform[cpu,plot]` and
the demo require, and theirs, are linked there from the environment that runs this: those and no
others, so that a requirement left out of pyproject.toml is missed. With --pip, pip installs them
anew instead (torch is large).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Sequence
from email.parser import BytesParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cpu", "plot")
# What the demo takes its digits from.
BESIDES = ("scikit-learn",)
TRIAL = Path(__file__).with_name("release_trial.py").resolve()


class ReleaseError(Exception):
    """What is wrong with a release, or in the way of building it."""


def build(folder: Path) -> None:
    """The sdist of what is committed, and the wheel of the sdist; both alone in `folder`.

    Raises:
        ReleaseError: `folder` holds something else, or a build fails.
    """
    _emptied(folder)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        _hatch("sdist", _committed(work), folder)
        (sdist,) = folder.glob("*.tar.gz")
        with tarfile.open(sdist) as tar:
            _unpack(tar, work)
        _hatch("wheel", work / sdist.name.removesuffix(".tar.gz"), folder)
    for path in sorted(folder.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")


def check(folder: Path, *, by_pip: bool) -> None:
    """Judge the sdist and the wheel in `folder`, then install, ask and run the demo from them.

    Raises:
        ReleaseError: Something is wrong with them; the message has what the failing command said.
    """
    sdist, wheel = _only(folder, "*.tar.gz").resolve(), _only(folder, "*.whl").resolve()
    _run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel], folder)
    _run([sys.executable, "-m", "check_wheel_contents", wheel], folder)
    print("twine and check-wheel-contents have nothing to say")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        python = _environment(work / "venv", wheel, by_pip)
        print(_run([python, "-W", "error", TRIAL], work).strip())
        with tarfile.open(sdist) as tar:
            _unpack(tar, work, only="examples/")
        (demo,) = work.glob("dualform-*/examples/digits_demo.py")
        said = _run([python, "-W", "error", demo, "demo"], work)
        found = re.search(r"network says \d", said)
        if found is None or not (work / "demo" / "answers.png").is_file():
            raise ReleaseError(f"the demo ended without its answers:\n{said}")
        print(f"the demo ran from the sdist with the installed wheel: the {found[0]}")


def requirements(wheel: Path, extras: Sequence[str] = EXTRAS) -> list[Requirement]:
    """What a wheel says that it requires with some of its extras, its own extras followed."""
    with ZipFile(wheel) as archive:
        (name,) = [path for path in archive.namelist() if path.endswith(".dist-info/METADATA")]
        metadata = BytesParser().parsebytes(archive.read(name))
    itself = canonicalize_name(metadata["Name"])
    wanted, todo = set(extras), list(extras)
    found: list[Requirement] = []
    while todo or not found:
        extra = todo.pop() if todo else ""
        for text in metadata.get_all("Requires-Dist") or []:
            needed = Requirement(text)
            if not _applies(needed, extra):
                continue
            if canonicalize_name(needed.name) == itself:
                todo += sorted(needed.extras - wanted)
                wanted |= needed.extras
            else:
                needed.marker = None
                found += [needed] if needed not in found else []
    return found


def closure(needed: Sequence[Requirement]) -> dict[str, Distribution]:
    """What is installed here of these requirements and of theirs, by normalised name.

    Raises:
        ReleaseError: One of them is not installed here, or in a version that does not do.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(each, "") for each in needed]
    while todo:
        requirement, extra = todo.pop()
        if not _applies(requirement, extra):
            continue
        name = canonicalize_name(requirement.name)
        try:
            here = found.setdefault(name, distribution(name))
        except PackageNotFoundError:
            raise ReleaseError(f"{requirement} is required, and not installed here") from None
        if not requirement.specifier.contains(here.version, prereleases=True):
            raise ReleaseError(f"{requirement} is required; {here.version} is installed here")
        for asked in {"", *requirement.extras} - {each for key, each in seen if key == name}:
            seen.add((name, asked))
            todo += [(Requirement(text), asked) for text in here.requires or []]
    return found


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _environment(folder: Path, wheel: Path, by_pip: bool) -> Path:
    """The Python of a new environment with the wheel and what it requires."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if by_pip:
        _run([*pip, "install", f"{wheel}[{','.join(EXTRAS)}]", *BESIDES], folder)
        return python
    needed = [*requirements(wheel), *map(Requirement, BESIDES)]
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run([python, "-c", where], folder).strip())
    for here in closure(needed).values():
        for source in _top_level(here):
            if not (site / source.name).exists():
                (site / source.name).symlink_to(source)
    _run([*pip, "install", "--no-index", "--no-deps", wheel], folder)
    _run([*pip, "check"], folder)
    return python


def _top_level(here: Distribution) -> Iterator[Path]:
    """Modules, packages and metadata that a distribution brought; no programs, no .pth files."""
    if here.files is None:
        raise ReleaseError(f"{here.name} has no record of its files")
    for name in sorted({file.parts[0] for file in here.files}):
        if name not in ("..", "__pycache__") and not name.endswith(".pth"):
            yield Path(str(here.locate_file(name))).resolve()


def _committed(work: Path) -> Path:
    """The tree of the last commit below `work`; the files as they are, where git knows of none."""
    try:
        _run(["git", "archive", "--prefix=tree/", "--output", work / "tree.tar", "HEAD"], ROOT)
    except (ReleaseError, FileNotFoundError):
        print(f"git knows no commit of {ROOT}: its files are taken as they are")
        return ROOT
    with tarfile.open(work / "tree.tar") as tar:
        _unpack(tar, work)
    changed = _run(["git", "status", "--porcelain"], ROOT).splitlines()
    if changed:
        print(f"not in it, as not committed: {', '.join(line[3:] for line in changed)}")
    return work / "tree"


def _emptied(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if not path.name.endswith((".whl", ".tar.gz")):
            raise ReleaseError(f"{path} is in the way: {folder} is for releases alone")
        path.unlink()


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise ReleaseError(f"{folder} has {len(found)} of {pattern}, not one: make dist")
    return found[0]


def _hatch(target: str, tree: Path, folder: Path) -> None:
    _run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder.resolve()],
        tree,
    )


def _unpack(tar: tarfile.TarFile, folder: Path, only: str = "") -> None:
    members = [each for each in tar if each.name.partition("/")[2].startswith(only)]
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, members, filter="data")
    else:  # of Pythons before 3.10.12 and 3.11.4; the archives are ours
        tar.extractall(folder, members)


def _run(words: Sequence[str | Path], folder: Path) -> str:
    """What a command says, run in `folder` with nothing in its environment that leads to ours."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("DUALFORM_")
    }
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        command = " ".join(map(str, words[:5]))
        raise ReleaseError(f"{command} … ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("do", choices=["build", "check"])
    parser.add_argument("folder", type=Path, help="where the sdist and the wheel go, or are")
    parser.add_argument("--pip", action="store_true", help="let pip install what is required")
    arguments = parser.parse_args()
    try:
        if arguments.do == "build":
            build(arguments.folder)
        else:
            check(arguments.folder, by_pip=arguments.pip)
    except ReleaseError as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
