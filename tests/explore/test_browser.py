"""The page in a real browser: everything that a person does there, clicked.

One server, one browser, one page.
"""

from __future__ import annotations

import http.client
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from contrast import faint

from .browser import POLL_MS, Page, a_page, expect, exploring, opened, shown, values
from .memory import TEXTS, Digits, a_picture, kept, write_model

pytestmark = pytest.mark.slow
# What a screen reader calls a control.
NAME = """e => e.getAttribute("aria-label") || e.innerText || e.labels?.[0]?.innerText
  || e.closest("label")?.innerText"""


@pytest.fixture(scope="module")
def address(digits: Digits, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a page on the digits, the texts, and an index that is damaged."""
    broken = tmp_path_factory.mktemp("broken") / "broken"
    shutil.copytree(digits.path, broken)
    (broken / "manifest.json").write_text("{}")
    model = write_model(digits, tmp_path_factory.mktemp("model"))
    command = [digits.path, f"read={texts}", broken, "--port", "0"]
    command += ["--model", model]
    for count in (10, 27):
        names = tmp_path_factory.mktemp("names") / "names.txt"
        names.write_text("".join(f"name {number}\n" for number in range(count)))
        command += ["--names", names]
    yield from exploring(command, tmp_path_factory.mktemp("log") / "explore.log")


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    """One page for all tests."""
    with a_page() as made:
        yield made


def chosen(page: Page, label: str, option: str) -> None:
    """An option of a select box, picked."""
    page.get_by_role("combobox", name=label, exact=True).click()
    with shown(page):
        page.get_by_role("option", name=option, exact=True).click()


def test_pick_an_example_and_see_what_made_its_prediction(
    page: Page, address: str, digits: Digits
) -> None:
    opened(page, address, "index=digits")
    expect(page.get_by_text("Pick an example, or upload a query")).to_be_visible()
    expect(page.locator(".facts")).to_contain_text("SGD, 60 steps")
    expect(page.locator(".facts")).to_contain_text("exact")
    with shown(page):
        page.get_by_title("ask about example 7", exact=True).click()
    expect(page.get_by_role("heading", name="Example 7", exact=True)).to_be_visible()
    label = int(digits.labels[7])
    expect(page.locator(".query")).to_contain_text(f"label {label}")
    cards = page.locator(".cards.weight li")
    expect(cards).to_have_count(6)
    widths = page.evaluate(
        "[...document.querySelectorAll('.query img, .cards img')]"
        ".map(each => each.complete ? each.naturalWidth : 8)"
    )
    assert set(widths) == {8}
    expect(page.locator(".groups tbody tr")).to_have_count(13)


def test_layers_classes_rows_and_numbers_are_picked(page: Page, address: str) -> None:
    opened(page, address, "index=digits&example=7")
    last = values(page, ".output", 1)
    chosen(page, "layer", "0")
    expect(page.locator(".facts")).to_contain_text("64 to 32")
    expect(page.get_by_role("heading", name="Output of layer 0")).to_be_visible()
    assert values(page, ".output", 1) == last
    chosen(page, "layer", "2")
    chosen(page, "each", "row by itself")
    expect(page.locator(".cards.weight li").first).to_contain_text("step")
    amount = page.get_by_label("how many")
    amount.fill("9")
    with shown(page):
        amount.blur()
    expect(page.locator(".cards.weight li")).to_have_count(9)
    with shown(page):
        page.get_by_role("link", name="contributions to unit 3").first.click()
    expect(page.get_by_role("heading", name="Added most to unit 3")).to_be_visible()
    assert "unit=3" in page.url


def test_filters_leave_rows_out_at_once(page: Page, address: str, digits: Digits) -> None:
    opened(page, address, "index=digits&example=7")
    label = int(digits.labels[7])
    before = values(page, ".output", 1)
    with shown(page):
        page.get_by_role("link", name=f"the output without label {label}").click()
    chip = page.get_by_role("link", name=f"remove the filter label is null or label != {label}")
    expect(chip).to_be_visible()
    assert values(page, ".output", 1) == before
    after = values(page, ".output", 3)
    assert after != before
    expect(page.locator(".winner").first).to_contain_text("with the filters")
    box = page.get_by_label("only rows with")
    box.fill("step < 30")
    with shown(page):
        page.get_by_role("button", name="Add filter").click()
    expect(page.locator(".filters li")).to_have_count(2)
    assert values(page, ".output", 3) != after
    with shown(page):
        chip.click()
    expect(page.locator(".filters li")).to_have_count(1)
    box.fill("colour = 3")
    with shown(page):
        box.press("Enter")
    expect(page.locator(".refused").first).to_contain_text("colour")


def test_a_remainder_is_shown_where_it_is_asked_for(page: Page, address: str) -> None:
    opened(page, address, "index=digits&example=7&residual=0")
    expect(page.locator(".prediction .refused")).to_contain_text("unexplained, as residual")
    with shown(page):
        page.get_by_role("link", name="Show it all the same").first.click()
    expect(page.locator(".prediction table")).to_be_visible()
    with shown(page):
        page.get_by_role("link", name="the usual, not any remainder").click()
    assert "residual" not in page.url


def test_the_slider_shows_any_time_of_training(page: Page, address: str) -> None:
    opened(page, address, "index=digits&example=7")
    trained = values(page, ".output", 1)
    slider = page.get_by_role("slider", name="training step")
    slider.focus()
    with shown(page):
        slider.press("Home")
    expect(page.locator(".control-label")).to_have_text("after 0 steps")
    expect(page).to_have_url(re.compile("step=0"))
    assert values(page, ".output", 1) != trained
    expect(page.get_by_text("No rows pass the filters.").first).to_be_visible()
    with shown(page):
        slider.press("End")
    expect(page.get_by_text("the trained network (60 steps)")).to_be_visible()
    assert values(page, ".output", 1) == trained


def test_the_reverse_is_asked_and_the_link_leads_back(page: Page, address: str) -> None:
    opened(page, address, "index=digits&example=7&by=row")
    other = page.locator(".cards.weight li").nth(1)
    name = other.locator("b").inner_text()
    here = page.url
    with shown(page):
        other.get_by_text("ask about it").click()
    expect(page.get_by_role("heading", name=name.capitalize(), exact=True)).to_be_visible()
    assert "seen=" in page.url
    said = page.locator(".results").all_inner_texts()
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    link = page.evaluate("navigator.clipboard.readText()")
    page.evaluate("history.back()")
    expect(page.get_by_role("heading", name="Example 7", exact=True)).to_be_visible()
    expect(page).to_have_url(here)
    opened(page, address, link.partition("?")[2])
    assert page.locator(".results").all_inner_texts() == said


def test_a_text_shows_which_tokens_it_was(page: Page, address: str) -> None:
    opened(page, address, "index=digits")
    chosen(page, "index", "read")
    page.get_by_label("id of a training example").fill("text 05")
    with shown(page):
        page.get_by_label("id of a training example").press("Enter")
    expect(page.get_by_role("heading", name="Example text 05")).to_be_visible()
    expect(page.get_by_role("link", name="ask about position 22")).to_have_attribute(
        "aria-current", "true"
    )
    before = values(page, ".output", 1)
    with shown(page):
        page.get_by_title("ask about position 3", exact=True).click()
    expect(page.locator(".query")).to_contain_text("position 3")
    assert values(page, ".output", 1) != before
    texts = page.locator(".cards.weight .text").all_inner_texts()
    assert texts
    assert set(texts) <= set(TEXTS)
    expect(page.locator(".cards.weight mark").first).to_have_attribute("title", re.compile(r"\d"))
    expect(page.get_by_text("Training named no classes")).to_be_visible()


def test_a_query_is_uploaded_and_the_lines_are_copied(
    page: Page, address: str, digits: Digits, tmp_path: Path
) -> None:
    opened(page, address, "index=digits&layer=0&example=7")
    weights = page.locator(".cards.weight").inner_text()
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download query.npy").click()
    coming.value.save_as(tmp_path / "query.npy")
    assert np.array_equal(np.load(tmp_path / "query.npy")[0], digits.images[7].numpy())
    with shown(page):
        page.locator("input[type=file]").set_input_files(tmp_path / "query.npy")
    expect(page.get_by_text("query 0 of 1 in query.npy")).to_be_visible()
    assert page.locator(".cards.weight").inner_text() == weights
    page.get_by_role("button", name="Copy Python").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    lines = page.evaluate("navigator.clipboard.readText()")
    assert "client.top_groups(" in lines
    (tmp_path / "seven.png").write_bytes(a_picture(digits, 7))
    with shown(page):
        page.locator("input[type=file]").set_input_files(tmp_path / "seven.png")
    expect(page.get_by_text("seven.png, as layer 0 of the model sees it")).to_be_visible()
    picture = page.get_by_role("img", name="the query")
    picture.scroll_into_view_if_needed()  # it is loaded once it is looked at
    expect(picture).to_have_js_property("naturalWidth", 8)
    expect(page.get_by_role("heading", name="Prediction")).to_be_visible()
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    page.locator("input[type=file]").set_input_files(tmp_path / "broken.npy")
    expect(page.locator(".trouble")).to_contain_text("broken.npy can't be read")


def test_trouble_is_said(page: Page, address: str) -> None:
    for view, words in (
        ("index=broken", "is not an index"),
        ("index=nowhere", "there are digits, read, broken"),
        ("index=digits&layer=9", "has no layer '9'; it has 0, 2"),
        ("index=digits&example=99999", "no row of example 99999"),
        ("index=digits&example=7&k=999", "1 to 60 are shown"),
    ):
        page.goto(f"{address}/?{view}")
        expect(page.locator(".trouble")).to_contain_text(words)


def test_the_whole_network_is_asked(page: Page, address: str, digits: Digits) -> None:
    opened(page, address, "index=digits&example=7&k=3")
    with torch.no_grad():
        logits = digits.model(kept(digits, 7))[0]
    winner = int(logits.argmax())
    title = page.get_by_role("heading", name="whole network")
    network = page.locator(".results section", has=title)
    expect(network.locator(".winner")).to_have_text(f"unit {winner} name {winner} is largest")
    assert values(page, ".output >> nth=1", 1)[0] == f"{float(logits.max()):,.4g}"
    cards = page.locator(".cards.layers li")
    expect(cards).to_have_count(3)
    expect(cards.first).to_contain_text("layer 0")
    classes = values(page, ".parts.layers", 3)  # "layer 2", behind the classes, all, and layer 0
    assert len(classes) == 13
    assert classes[-1] == f"{float(logits.max()):,.4g}"
    best = cards.first.locator("b").first.inner_text()
    with shown(page):
        cards.first.get_by_role("link", name="the output without example").click()
    expect(network.get_by_role("columnheader", name="filtered")).to_be_visible()
    assert best not in page.locator(".cards.layers").inner_text()
    opened(page, address, "index=digits&example=10")  # no picture of it was kept
    expect(page.get_by_text("What the model takes is not known of this")).to_be_visible()
    opened(page, address, "index=read&example=%22text+05%22")
    expect(page.get_by_text("the model does not take it")).to_be_visible()


def test_training_is_drawn_and_units_have_names(page: Page, address: str, digits: Digits) -> None:
    opened(page, address, "index=digits&example=7&step=20")
    drawn = page.get_by_role("img", name="loss from")
    last = f"{digits.losses[-1]:,.4g} in step 59"
    expect(drawn).to_have_accessible_name(re.compile(re.escape(last)))
    expect(page.locator(".curve")).to_contain_text(f"{digits.losses[19]:,.4g} in step 19")
    expect(page.locator(".groups tbody th").first).to_have_text("0 name 0")
    expect(page).to_have_title("Example 7 · digits · dualform explorer")
    opened(page, address, "index=read&example=%22text+05%22")
    expect(page.locator(".curve")).to_have_count(0)
    expect(page.locator(".winner").first).to_contain_text(re.compile(r"unit (\d+) name \1 is"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_telephone(page: Page, address: str, scheme: Any) -> None:
    """Nothing is wider than the screen, and all text stands out from what is behind it."""
    size = page.viewport_size
    assert size is not None
    page.emulate_media(color_scheme=scheme)
    try:
        for view in (
            "index=digits&example=7&filters=label+!%3D+3",
            "index=read&example=%22text+05%22",
        ):
            page.set_viewport_size({"width": 400, "height": 800})
            opened(page, address, view)
            for width in (400, 1280):
                page.set_viewport_size({"width": width, "height": 800})
                page.wait_for_function(f"innerWidth === {width}", polling=POLL_MS)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                assert not faint(page, ".explorer *")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="to the answer")).to_be_focused()
        page.keyboard.press("Enter")
        page.wait_for_function("document.activeElement.id === 'answer'")
    finally:
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(size)


def test_a_page_of_somebody_else_may_not_ask(address: str) -> None:
    """One whose own name was made to lead to this machine."""
    for host, status in (("evil.example", 400), (urlsplit(address).netloc, 200)):
        connection = http.client.HTTPConnection(urlsplit(address).netloc)
        connection.request("GET", "/", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()


def test_keys_labels_light_and_dark(page: Page, address: str) -> None:
    opened(page, address, "index=digits&example=7")
    for control in ("combobox", "slider", "textbox", "button", "spinbutton"):
        for each in page.get_by_role(control).all():  # type: ignore[arg-type]
            if each.is_visible():
                assert each.evaluate(NAME), each.evaluate("e => e.outerHTML")
    page.locator(".offer").first.focus()
    with shown(page):
        page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Example 0", exact=True)).to_be_visible()
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.get_by_role("button", name="Light or dark").click()
    page.wait_for_function(f"{colour} !== {before!r}")
    page.get_by_role("button", name="Light or dark").click()
    page.wait_for_function(f"{colour} === {before!r}")
