"""A real browser for the tests of the page, and what they all do there.

Needs Chromium (apt-get install chromium); whoever imports this skips without it. Every request that
the browser makes is written down, and must stay on this machine.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import warm

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)
pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[dev]'")

from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402

__all__ = ["POLL_MS", "Page", "a_page", "expect", "exploring", "opened", "shown", "values"]

# Playwright would ask at every frame, and a browser on a busy machine may draw none.
POLL_MS = 50
# On a machine whose cores are busy with clusters and compilers too: a page loads in a second alone.
PATIENCE_MS = 90_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


def exploring(command: list[object], log: Path) -> Iterator[str]:
    """The address of what `dualform explore` shows; it must end well on SIGTERM."""
    process = warm.start("dualform", "explore", *command, errors=log.open("w+b"))
    try:
        line = process.stdout.readline()
        found = re.search(r"exploring at (\S+)", line)
        assert found, log.read_text()
        yield found[1]
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text()
        assert not log.read_text()
    finally:
        process.kill()
        process.wait()
        process.close()


@contextmanager
def a_page() -> Iterator[Page]:
    """A browser's page. Whatever it asked for was on this machine, and no script complained."""
    requests: list[str] = []
    trouble: list[str] = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        made = context.new_page()
        made.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        made.on("request", lambda request: requests.append(request.url))
        made.on("websocket", lambda socket: requests.append(socket.url))
        made.on("pageerror", lambda error: trouble.append(str(error)))
        yield made
        browser.close()
    assert len(requests) > 10
    asked = [urlsplit(each.removeprefix("blob:")) for each in requests]
    assert {each.hostname for each in asked if each.scheme != "data"} == {"127.0.0.1"}
    assert not trouble


@contextmanager
def shown(page: Page) -> Iterator[None]:
    """What is done in the block makes the page ask; behind it, that is shown."""
    before = page.locator(".status").get_attribute("data-shown") or "0"
    yield
    page.wait_for_function(
        f"+document.querySelector('.status').dataset.shown > {before}", polling=POLL_MS
    )


def opened(page: Page, address: str, view: str) -> None:
    """The page at a view's link."""
    page.goto(f"{address}/?{view}")
    page.wait_for_function("document.querySelector('.status')?.dataset.shown > 0", polling=POLL_MS)


def values(page: Page, table: str, column: int) -> list[str]:
    """A column of the first such table's body; the head of rows is column 0."""
    cells = page.locator(table).first.locator(f"tbody tr :is(th, td):nth-child({column + 1})")
    return cells.all_inner_texts()
