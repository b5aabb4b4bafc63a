"""The page in a real browser: everything that a person does there, clicked.

One server, one browser, one page. Needs Chromium (apt-get install chromium); without it these tests
skip. Every request that the browser makes is written down, and must stay on this machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .memory import Digits

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install '.[dev]'"
)

from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402

DUALFORM = Path(sys.executable).with_name("dualform")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="module")
def address(digits: Digits, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a page on the digits, the texts, and an index that is damaged."""
    broken = tmp_path_factory.mktemp("broken") / "broken"
    shutil.copytree(digits.path, broken)
    (broken / "manifest.json").write_text("{}")
    command = [DUALFORM, "explore", digits.path, f"read={texts}", broken, "--port", "0"]
    yield from exploring(command, tmp_path_factory.mktemp("log") / "explore.log")


def exploring(command: list[object], log: Path) -> Iterator[str]:
    """A page's address; its server must end well on SIGTERM."""
    with log.open("wb") as sink:
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=sink)
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        found = re.search(r"exploring at (\S+)", line)
        assert found, log.read_text()
        yield found[1]
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text()
        assert not log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    """One page for all tests. Whatever it asked for was on this machine; no script complained."""
    requests: list[str] = []
    trouble: list[str] = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        made = context.new_page()
        made.set_default_timeout(30_000)
        expect.set_options(timeout=30_000)
        made.on("request", lambda request: requests.append(request.url))
        made.on("websocket", lambda socket: requests.append(socket.url))
        made.on("pageerror", lambda error: trouble.append(str(error)))
        yield made
        browser.close()
    assert len(requests) > 10
    hosts = {urlsplit(each).netloc for each in requests if not each.startswith("data:")}
    assert hosts == {urlsplit(address).netloc}
    assert not trouble


def settled(page: Page) -> None:
    """Nothing is being asked any more."""
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(page.locator(".results")).not_to_have_class(re.compile("asking"))


def test_pick_an_example_and_see_what_made_its_prediction(
    page: Page, address: str, digits: Digits
) -> None:
    page.goto(address)
    expect(page.get_by_text("Pick an example on the left")).to_be_visible()
    expect(page.locator(".facts")).to_contain_text("SGD, 60 steps")
    expect(page.locator(".facts")).to_contain_text("exact")
    page.get_by_role("link", name="ask about example 7", exact=True).click()
    expect(page.get_by_role("heading", name="Example 7", exact=True)).to_be_visible()
    label = int(digits.labels[7])
    expect(page.locator(".query")).to_contain_text(f"label {label}")
    cards = page.locator(".cards.weight li")
    expect(cards).to_have_count(6)
    shown = page.evaluate(
        "[...document.querySelectorAll('.query img, .cards img')]"
        ".map(each => each.complete ? each.naturalWidth : 8)"
    )
    assert set(shown) == {8}
    expect(page.locator(".groups tbody tr")).to_have_count(13)
    settled(page)
