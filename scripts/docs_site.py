"""What mkdocs builds the site of: docs/ as it is, and pages that are made of the code beside it.

mkdocs.yml names this file as a hook. Before a build it lays everything out in build/docs. What a
document links to outside of docs/ becomes a page of the site too, as a document or as code, and
what that links to likewise; a link to a folder becomes plain text. The package lies in build/api in
one folder, as in the wheel: mkdocstrings does not look into six.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs_reference

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "build" / "docs"
MERGED = ROOT / "build" / "api"
FOLDERS = [
    "protos",
    "indexer",
    "service",
    "clients/python",
    "clients/plot",
    "clients/explore",
    "clients/cli",
]
# Begin the site with something else.
HOME = {"README.md": "index.md", "docs/README.md": "index.md"}
# Where pages go that mkdocs.yml does not name, by their folder.
AT_THE_END = {"decisions": "Decisions", "results": "Results", "source": "Sources", "": "More"}
ITEM = re.compile(r"(?:[-*]|\d\.) +(?=\S)")
# What may follow upon a paragraph at once.
BEGINS = re.compile(r"[-*] |1\. ")
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^)\s]+)\)")
LANGUAGES = {
    ".py": "python",
    ".proto": "protobuf",
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
}


def on_startup(**_: Any) -> None:
    """mkdocs' hook: the package, before mkdocstrings looks where it is."""
    merge(MERGED)


def on_config(config: Any) -> Any:
    """mkdocs' hook: pages laid out, and those that the navigation does not name at its end."""
    stage(STAGED)
    config.docs_dir = str(STAGED)
    named = set(_named(config.nav))
    later: dict[str, list[str]] = {title: [] for title in AT_THE_END.values()}
    for path in sorted(STAGED.rglob("*.md")):
        name = path.relative_to(STAGED).as_posix()
        if name not in named:
            first, slash, _ = name.partition("/")
            later[AT_THE_END.get(first if slash else "", "More")].append(name)
    config.nav += [{title: pages} for title, pages in later.items() if pages]
    return config


def stage(folder: Path) -> None:
    """Lay out all that the site is built of in `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("README.md"))
    reference = folder / "reference"
    reference.mkdir()
    for name, text in docs_reference.sdk_pages().items():
        (reference / name).write_text(text, encoding="utf-8")
    (reference / "cli.md").write_text(docs_reference.cli_page(), encoding="utf-8")
    (reference / "wire.md").write_text(docs_reference.wire_page(), encoding="utf-8")
    todo = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    todo.remove("docs/README.md")
    seen = set(todo)
    while todo:
        source = todo.pop()
        text = (ROOT / source).read_text(encoding="utf-8")
        page = folder / place_of(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            page.write_text(as_mkdocs_reads(relinked(text, source)), encoding="utf-8")
            found = [each for each in linked(text, source) if each not in seen]
            todo += found
            seen |= set(found)
        else:
            page.write_text(_as_page(source, text), encoding="utf-8")


def merge(folder: Path) -> None:
    """One package of the seven folders."""
    shutil.rmtree(folder, ignore_errors=True)
    for each in FOLDERS:
        shutil.copytree(
            ROOT / each / "dualform",
            folder / "dualform",
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # griffe reads code in the section of this name alone.
        path.write_text(re.sub(r"(?m)^( +)Example:$", r"\1Examples:", text), encoding="utf-8")


def place_of(source: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if source in HOME:
        return HOME[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"source/{source}" if source.endswith(".md") else f"source/{source}.md"


def linked(text: str, source: str) -> Iterator[str]:
    """The files outside of docs/ that a document links to, each once."""
    for target in dict.fromkeys(match["target"] for match in LINK.finditer(text)):
        path = _path_of(target, source)
        if path is None or path in HOME or path.startswith("docs/"):
            continue
        if (ROOT / path).is_file():
            yield path


def relinked(text: str, source: str) -> str:
    """A document whose links lead to where the site has what they lead to in the repository."""

    def moved(match: re.Match[str]) -> str:
        path = _path_of(match["target"], source)
        if path is None:
            return match[0]
        if not (ROOT / path).is_file():
            return match["text"]
        here = posixpath.dirname(place_of(source))
        anchor = match["target"].partition("#")[2]
        target = posixpath.relpath(place_of(path), here or ".")
        return f"[{match['text']}]({target}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(moved, text)


def as_mkdocs_reads(text: str) -> str:
    """A document in CommonMark, so that Python-Markdown sees the same lists.

    It wants four spaces before what belongs to an item, where CommonMark is content with the width
    of the marker, and an empty line between a paragraph and an item.
    """
    lines: list[str] = []
    width, fenced, paragraph = 0, False, False  # of the item that a line is in; before an item
    for line in text.splitlines():
        marker = None if fenced else ITEM.match(line)
        if marker and (width or not paragraph or BEGINS.match(line)):
            lines += [""] if paragraph else []
            width, paragraph = len(marker[0]), False
        elif not line.strip():
            paragraph = False
        elif line.startswith(" " * max(width, 1)):
            paragraph = paragraph or not lines[-1].strip()
            line = " " * (4 - width) * bool(width) + line
        else:
            width, paragraph = 0, True
        fenced = fenced != line.startswith("```")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _path_of(target: str, source: str) -> str | None:
    """The path from the root that a link leads to; None for other hosts and for the page itself."""
    if "://" in target or target.startswith(("#", "mailto:")):
        return None
    folder = posixpath.dirname(source)
    return posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))


def _as_page(source: str, text: str) -> str:
    fence = "`" * 5
    language = LANGUAGES.get(os.path.splitext(source)[1], "text")
    return f"# {source}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _named(value)
    elif isinstance(nav, list):
        for each in nav:
            yield from _named(each)
