"""Very much of anything, and files that are gone, clicked in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from contrast import faint

from .browser import Page, a_page, expect, exploring, opened, shown, values
from .memory import Digits, Many, make_wide

pytestmark = pytest.mark.slow

MOST_HTML = 300_000


@pytest.fixture(scope="module")
def address(many: Many, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a page on 100,000 classes, and on digits of which the pictures are gone."""
    gone = tmp_path_factory.mktemp("gone") / "gone"
    shutil.copytree(digits.path, gone)
    (gone / "examples.bin").unlink()
    command = [many.path, gone, "--port", "0", "--model", many.model]
    yield from exploring(command, tmp_path_factory.mktemp("log") / "explore.log")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with a_page() as made:
        yield made


def test_a_hundred_thousand_classes_and_texts_of_10_mb(
    page: Page, address: str, many: Many, tmp_path: Path
) -> None:
    opened(page, address, "index=many")
    expect(page.locator(".facts")).to_contain_text("100,000")
    expect(page.locator(".offer")).to_have_count(12)
    with shown(page):
        page.get_by_title("ask about example 7", exact=True).click()
    expect(page.locator(".query .text")).to_contain_text("letters …")
    expect(page.locator(".cards.weight li").first).to_contain_text(f"example {many.best}")
    expect(page.locator(".cards.weight .nothing")).to_have_count(5)
    names = values(page, ".groups", 0)
    assert len(names) == 24 + 4
    assert names[24] == "every other label"
    parts = [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in values(page, ".groups", 3)]
    assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=2e-3)
    assert len(page.content()) < MOST_HTML
    network = page.locator(".parts.layers")
    expect(network.get_by_role("row", name="every other label")).to_be_visible()
    assert not faint(page, ".explorer *")
    # What follows is asked of the same page: it has stayed usable.
    with shown(page):
        page.get_by_role("link", name=f"the output without label {names[3]}").click()
    expect(page.get_by_role("link", name="remove the filter label is null")).to_be_visible()
    assert names[3] not in values(page, ".groups", 0)
    slider = page.get_by_role("slider", name="training step")
    slider.focus()
    with shown(page):
        slider.press("ArrowLeft")
    expect(page.locator(".control-label")).to_have_text("after 4 steps")
    with shown(page):
        page.locator(".cards.weight li").nth(1).get_by_text("ask about it").click()
    expect(page.get_by_text("What the model takes is not known of this")).to_be_visible()
    (tmp_path / "book.txt").write_text(many.text)
    with shown(page):
        page.locator("input[type=file]").set_input_files(tmp_path / "book.txt")
    expect(page.get_by_text("book.txt, as layer 0 of the model sees it")).to_be_visible()
    expect(page.locator(".query .text")).to_contain_text("letters …")
    assert len(page.content()) < MOST_HTML


def test_pictures_that_are_gone_leave_the_rest(page: Page, address: str, digits: Digits) -> None:
    opened(page, address, "index=gone")
    expect(page.locator(".offer .nothing").first).to_have_text("what was kept can't be read")
    with shown(page):
        page.get_by_title("ask about example 8", exact=True).click()
    expect(page.locator(".query .refused")).to_contain_text("examples.bin: missing")
    expect(page.locator(".trouble")).to_have_count(0)
    expect(page.locator(".cards.weight li")).to_have_count(6)
    expect(page.locator(".groups tbody tr")).to_have_count(13)
    rows = sum(map(int, values(page, ".groups", 5)[:10]))
    assert rows == int(digits.times().sum())


def test_a_hundred_thousand_units(page: Page, tmp_path: Path) -> None:
    wide, model = make_wide(tmp_path)
    names = tmp_path / "names.txt"
    names.write_text("".join(f"called {number}\n" for number in range(100_000)))
    command = [wide, "--port", "0", "--model", model, "--names", names]
    for address in exploring(command, tmp_path / "explore.log"):
        opened(page, address, "index=wide&input=3")
        expect(page.get_by_text("10 of 100,000 units").first).to_be_visible()
        units = values(page, ".output", 0)
        assert all(re.fullmatch(r"(\d+) called \1", each) for each in units)
        rows = values(page, ".parts.layers", 0)
        assert rows[-4:] == ["every other label", "initial weights", "no row explains", "together"]
        last = values(page, ".parts.layers", 3)[-1]
        assert last == values(page, ".output >> nth=1", 1)[0]
        assert len(page.content()) < MOST_HTML
        with shown(page):
            page.get_by_role("link", name=f"contributions to unit {units[4]}").first.click()
        expect(page.get_by_role("heading", name=f"Added most to unit {units[4]}")).to_be_visible()
        assert not faint(page, ".explorer *")
        with shown(page):
            page.locator(".cards.layers li").first.get_by_text("leave it out").click()
        expect(page.get_by_role("columnheader", name="filtered")).to_be_visible()
