"""The documentation's site: no warning, no other host, no broken link, whole references."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import warm
from contrast import faint
from markdown_it import MarkdownIt

from dualform.v1 import admin_pb2, attribution_pb2

ROOT = Path(__file__).resolve().parents[2]
TAGS = r"<(h[1-4]|ol|ul|li|pre|table|tr|blockquote|img)\b"
pytestmark = pytest.mark.slow
PROTOS = sorted((ROOT / "protos" / "dualform" / "v1").glob("*.proto"))


class Page(HTMLParser):
    """What a page links to, loads, and is linked to by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loads.append(given["href"])
        self.loads += [given[name] for name in ("src", "data", "poster") if name in given]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        # A fork: the reference's script imports every package of ours.
        done = warm.run("python", "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("docs_site")


def test_every_document_is_a_page(pages: dict[Path, Page], site: Path) -> None:
    names = {path.relative_to(site).as_posix() for path in pages}
    for document in (ROOT / "docs").rglob("*.md"):
        name = document.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert name == "README.html" or name in names


def test_documents_have_on_the_site_the_shape_that_commonmark_gives_them(site: Path) -> None:
    """Python-Markdown reads some things otherwise: lists are what it takes for prose."""
    parser = MarkdownIt("commonmark").enable("table")
    for document in sorted((ROOT / "docs").rglob("*.md")):
        page = site / document.relative_to(ROOT / "docs").with_suffix(".html")
        if document.name == "README.md":
            continue
        html = page.read_text("utf-8")
        article = html[html.index("<article") : html.index("</article>")]
        expected = Counter(re.findall(TAGS, parser.render(document.read_text("utf-8"))))
        assert Counter(re.findall(TAGS, article)) == expected, document


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    loaded = {each for page in pages.values() for each in page.loads}
    assert any(each.endswith(".css") for each in loaded)
    assert any(each.endswith(".js") for each in loaded)
    elsewhere = {each for each in loaded if re.match(r"(?i)[a-z]+:|//", each)}
    assert not {each for each in elsewhere if not each.startswith("data:")}
    for style in site.rglob("*.css"):
        wanted = re.findall(r"(?:url\(|@import)\s*[\"']?(\w+:|//)", style.read_text("utf-8"))
        assert set(wanted) <= {"data:"}, style


def test_no_link_is_broken(pages: dict[Path, Page], site: Path) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # written for the root of a server
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            if not target.exists() and not target.is_dir():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and known and unquote(parts.fragment) not in known.anchors:
                broken.append(f"{path.relative_to(site)}: no anchor {link}")
    assert not broken


def test_search_has_every_page_and_opens_without_a_server(
    pages: dict[Path, Page], site: Path
) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {each["location"].partition("#")[0] for each in index["docs"]}
    names = {path.relative_to(site).as_posix() for path in pages} - {"404.html"}
    assert names <= found
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to search with")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--virtual-time-budget=30000", "--host-resolver-rules=MAP * ~NOTFOUND"),
            f"--user-data-dir={site.parent / 'profile'}",
            f"{(site / 'index.html').as_uri()}?q=preconditioner",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    hits = re.findall(r'<a href="([^"]*)\?h=[^"]*" class="md-search-result__link"', done.stdout)
    assert any(hit.endswith("glossary.html") for hit in hits), done.stderr


def test_it_can_be_read_light_and_dark_wide_and_narrow(site: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to look with")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
        running = started.chromium.launch(executable_path=browser, args=flags)
        for scheme, width in (("light", 1280), ("dark", 400)):
            page = running.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            page.set_default_timeout(90_000)
            for name in ("explorer", "reference/dualform.client"):
                page.goto((site / f"{name}.html").as_uri())
                assert not faint(page, ":is(.md-header, .md-tabs, .md-sidebar, .md-content) *")
                assert page.evaluate("document.documentElement.scrollWidth") <= width
        running.close()


def test_the_command_has_all_that_its_help_has(site: Path) -> None:
    text = Page((site / "reference" / "cli.html").read_text("utf-8")).text
    todo: list[list[str]] = [[]]
    seen = 0
    while todo:
        words = todo.pop()
        done = warm.run("dualform", *words, "--help")
        assert done.returncode == 0, done.stderr
        told = done.stdout
        assert " ".join(["dualform", *words]) in text
        for option in re.findall(r"^ +(?:-\w, )?(--[\w-]+)", told, re.MULTILINE):
            assert option in text, (words, option)
        below = re.findall(r"^    ([a-z][\w-]*)(?:  |$)", told, re.MULTILINE)
        todo += [[*words, name] for name in below] if len(words) < 2 else []
        seen += 1
    assert seen > 15


def test_the_wire_has_every_field_and_comment(pages: dict[Path, Page], site: Path) -> None:
    page = pages[site / "reference" / "wire.html"]
    words = " ".join(page.text.split())
    for module in (attribution_pb2, admin_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            assert message.name.lower() in page.anchors
            assert all(field.name in words for field in message.fields), message.name
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert all(value.name in words for value in enum.values), enum.name
        for service in module.DESCRIPTOR.services_by_name.values():
            assert all(method.name in words for method in service.methods)
    for proto in PROTOS:
        for comment in re.findall(r"((?:^ *// .*\n)+)", proto.read_text("utf-8"), re.MULTILINE):
            said = " ".join(
                line.strip().removeprefix("//").strip() for line in comment.splitlines()
            )
            assert " ".join(said.replace("`", "").split()) in words


def test_python_has_what_the_packages_export(
    pages: dict[Path, Page], site: Path, script: ModuleType
) -> None:
    packages = importlib.import_module("docs_reference").PACKAGES
    assert {"dualform.client", "dualform.record", "dualform.index"} <= set(packages)
    for name in packages:
        anchors = pages[site / "reference" / f"{name}.html"].anchors
        exported = getattr(importlib.import_module(name), "__all__", ["RecorderCallback"])
        missing = [each for each in exported if f"{name}.{each}" not in anchors]
        assert not missing, name
    client = pages[site / "reference" / "dualform.client.html"].anchors
    assert {f"dualform.client.Client.{each}" for each in ("top_k", "sums", "local")} <= client


def test_lists_are_as_python_markdown_wants_them(script: ModuleType) -> None:
    given = "1. one\n\n   ```py\n   x\n   ```\n\n   more\n- two\n  lines\n\n    code\nend\n"
    expected = (
        "1. one\n\n    ```py\n    x\n    ```\n\n    more\n\n- two\n    lines\n\n      code\nend\n"
    )
    assert script.as_mkdocs_reads(given) == expected
    assert script.as_mkdocs_reads("so:\n- a\n- b\n") == "so:\n\n- a\n- b\n"
    assert script.as_mkdocs_reads("of\n1984. Then\n") == "of\n1984. Then\n"


def test_links_out_of_the_documents_lead_to_pages(script: ModuleType) -> None:
    moved = script.relinked
    assert moved("[a](../README.md#two)", "docs/sdk.md") == "[a](index.md#two)"
    assert moved("[a](../SECURITY.md)", "docs/server.md") == "[a](source/SECURITY.md)"
    assert moved("[a](docs/sdk.md#x)", "CONTRIBUTING.md") == "[a](../sdk.md#x)"
    assert moved("[`a`](../Makefile)", "docs/sdk.md") == "[`a`](source/Makefile.md)"
    assert moved("[the folder](../deploy)", "docs/server.md") == "the folder"
    for kept in ("[a](https://pypi.org)", "[a](#here)", "![a](images/x.png)"):
        assert moved(kept, "docs/sdk.md") == kept
