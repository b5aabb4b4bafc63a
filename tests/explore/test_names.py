"""Very long names, an index that says little, and what those who don't look or point are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contrast import faint
from torch import nn

from dualform.index import build_index
from dualform.record import Recorder

from .browser import Page, a_page, expect, exploring, opened, shown, values

pytestmark = pytest.mark.slow


COUNT = 24
LAYER = "a_module_whose_name_is_very_long_as_those_of_large_networks_may_be"
IDS = [f"s3://bucket/{'folder/' * 9}shard-000/example-{at:04}.png" for at in range(COUNT)]
LABELS = ["Lorem_ipsum_dolor_sit_amet_" * 4 + "elit", "<b>bold</b> & 'quoted'", "viele Wörter " * 8]
VIEW = f"index=long&layer={LAYER}&example=%22{IDS[7]}%22&filters=label+is+not+null"

# Controls and links whose name lacks what is seen of them (WCAG 2.5.3), or that have no name.
UNNAMED = """() => {
  const plain = text => text.replace(/\\s+/g, " ").trim().toLowerCase();
  return [...document.querySelectorAll(".explorer :is(a[href], button)")]
    .filter(each => each.checkVisibility())
    .map(each => [each.getAttribute("aria-label") ?? each.innerText, each.innerText])
    .filter(([name, seen]) => !plain(name)
      || !plain(name).includes(plain(seen.replace("\\u00d7", ""))));
}"""
# Text that is wider than what it stands in, and covers what is beside it.
OVERFLOWING = """() => [...document.querySelectorAll(
    ".explorer :is(h2, .said, .offer, .offer span, .cards li, .cards p, dd, tbody th, .filters a)")]
  .filter(each => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1
    && getComputedStyle(each).display !== "inline")
  .map(each => each.outerHTML.slice(0, 120))"""
# What scrolls must be reached by keys: it is in their order, or something in it is.
UNREACHED = """() => [...document.querySelectorAll(".explorer *")]
  .filter(each => ["auto", "scroll"].includes(getComputedStyle(each).overflowY)
    && each.scrollHeight > each.clientHeight + 1 && each.clientHeight
    && !each.matches("[tabindex='0']") && !each.querySelector("a[href], [tabindex='0']"))
  .map(each => each.outerHTML.slice(0, 120))"""


class Named(nn.Module):
    """Two layers, the first with a long name."""

    def __init__(self) -> None:
        super().__init__()
        setattr(self, LAYER, nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(torch.tanh(getattr(self, LAYER)(inputs)))
        return made


def make_long(folder: Path) -> Path:
    """Examples, labels and a layer with long names; texts were kept of half of the examples."""
    torch.manual_seed(0)
    model, inputs, labels = Named(), torch.randn(COUNT, 6), torch.arange(COUNT) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for ids in torch.arange(COUNT).split(8):
            recorder.annotate(
                label=[LABELS[label] for label in labels[ids]],
                example=[IDS[each] for each in ids],
                where_this_example_was_taken_from=["https://example.org/" + "x" * 70] * 8,
            )
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
        texts = ["<i>word</i> " * (9 * at) + "s" * 90 for at in range(COUNT)]
        recorder.add_examples([*IDS[::2], IDS[7]], [*texts[::2], texts[7]])
    build_index(folder / "recording", folder / "long")
    return folder / "long"


def make_bare(folder: Path, **annotations: Any) -> Path:
    """One layer 3-1, without labels or pictures; ids only where `annotations` say so."""
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for _ in range(2):
            recorder.annotate(**annotations)
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
    build_index(folder / "recording", folder / "bare")
    return folder / "bare"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bare, ids = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("ids")
    command: list[object] = [make_long(tmp_path_factory.mktemp("long"))]
    command += [make_bare(bare), f"ids={make_bare(ids, example=torch.arange(8))}", "--port", "0"]
    yield from exploring(command, tmp_path_factory.mktemp("log") / "explore.log")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with a_page() as made:
        yield made


@pytest.mark.parametrize("width", [400, 700, 1280])
def test_long_names_stay_in_their_place(page: Page, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, address, VIEW)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.evaluate(OVERFLOWING)
    assert not faint(page, ".explorer *")
    # Of a path the end tells which it is; all of it is there for those who point at it.
    heading = page.locator(".query h2")
    expect(heading).to_have_text(f"Example {IDS[7][:28]}…{IDS[7][-24:]}")
    assert heading.locator("span").get_attribute("title") == f"Example {IDS[7]}"
    titles = page.locator(".groups tbody th span").evaluate_all("all => all.map(e => e.title)")
    assert sorted(titles) == sorted(each for each in LABELS if len(each) > 60)


def test_who_does_not_look_or_point_is_told_the_same(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    opened(page, address, VIEW)
    assert page.evaluate("document.documentElement.lang") == "en-US"
    assert page.get_by_role("main").count() == 1
    assert not page.evaluate(UNNAMED)
    assert not page.evaluate(UNREACHED)
    assert all(page.get_by_role("columnheader").all_inner_texts())


def test_a_file_is_chosen_by_keys_again_and_again(page: Page, address: str, tmp_path: Path) -> None:
    np.save(tmp_path / "query.npy", np.ones((2, 3), np.float32))
    page.on("filechooser", lambda _: None)  # before the first is asked for, or it may be too late
    opened(page, address, "index=bare")
    file = page.get_by_label("upload a .npy or .csv file")
    file.focus()
    for key in ("Enter", "Space"):
        with shown(page):
            with page.expect_file_chooser() as coming:
                page.keyboard.press(key)
            coming.value.set_files(tmp_path / "query.npy")
        expect(page.get_by_text("query 0 of 2 in query.npy")).to_be_visible()
        expect(file).to_be_focused()  # the library has made it anew
    expect(page.locator(":is(button, [role=button]) input")).to_have_count(0)


def test_an_index_that_says_little_says_what_to_do(page: Page, address: str) -> None:
    opened(page, address, "index=bare")
    expect(page.get_by_text("There are no examples to pick: upload")).to_contain_text("[n, 3]")
    expect(page.locator(".side")).to_contain_text("Training named none.")
    opened(page, address, "index=ids&example=5")
    expect(page.locator(".offer")).to_have_count(8)
    assert page.locator(".offer").all_inner_texts() == [str(each) for each in range(8)]
    expect(page.locator(".side")).to_contain_text("recorder.add_examples")
    expect(page.locator(".nothing")).to_have_count(1)  # said of the query, not of each
    expect(page.locator(".cards.weight li")).to_have_count(6)
    assert values(page, ".output", 0) == ["0"]
