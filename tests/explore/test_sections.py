"""The HTML: nothing of an index is taken for markup, and very much of anything stays readable."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from dualform.client import IndexInfo, InexactMark, LayerInfo
from dualform.explore import View, sections, tables
from dualform.explore.answers import Answer, Behind, Group, Groups, Output, Parts, Query, Refused
from dualform.explore.browsing import Offered
from dualform.explore.payloads import Nothing, Picture, Row, Text
from dualform.explore.scene import Scene
from dualform.explore.tokens import marked

EVIL = "<script>alert('x')</script>\"&"
VIEW = View(index="mine", layer="4", example=3)
SCENE = Scene(VIEW, EVIL, [EVIL] * 4, EVIL)


class Tags(HTMLParser):
    """Tags and attributes; all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[dict[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "a":
            self.links.append({name: value or "" for name, value in attrs})
        if tag not in ("img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def behind(payload: object, **more: object) -> Behind:
    given: dict[str, object] = {"text": None, "row": None, "count": 3, **more}
    return Behind(
        EVIL,
        weight=1.5,
        contribution=None,
        columns={"label": EVIL, EVIL: 1},
        payload=payload,  # type: ignore[arg-type]
        **given,  # type: ignore[arg-type]
    )


def an_answer() -> Answer:
    layer = LayerInfo(
        EVIL, EVIL, 3, 2, True, 9, 0, True, {EVIL: "int64"}, (InexactMark(3, EVIL),), {EVIL: 2}
    )
    cards = (
        behind(Text(EVIL)),
        behind(Text(EVIL), text=marked(EVIL, {3: 1.0, 4: -0.5}, len(EVIL))),
        behind(Row(((EVIL, EVIL),), 3)),
        behind(Nothing(EVIL), row=7),
        behind(Picture("image/png", True)),
    )
    query = Query(np.zeros((1, 3), np.float32), None, EVIL, EVIL, {"label": EVIL}, [1], [0])
    output = Output(EVIL, ((1, 2.0), (0, -1.0)), (0.5, 0.6), (1, 0), 2, 1e-7, 5, 9)
    groups = Groups("label", (Group(EVIL, 1.0, -2.0, 3), Group(None, None, 1.0, 1)), True, 1, 0, 2)
    parts = Parts("label", [EVIL, None], [0, 1], np.ones((2, 2), np.float32), np.zeros(2, "f4"))
    return Answer(query, layer, 1, [], "label", output, output, cards, Refused(EVIL), groups, parts)


def test_nothing_of_an_index_becomes_markup() -> None:
    found = an_answer()
    info = IndexInfo(EVIL, "serving", "", 10, EVIL, {EVIL: found.layer})
    some = [Offered(EVIL, EVIL, Text(EVIL)), Offered(3, None, Picture("image/png", False))]
    for html in (
        sections.whole(found, SCENE),
        sections.facts(info, found.layer),
        sections.picker(some, SCENE),
        sections.picker([], Scene(View(after=EVIL), EVIL)),
    ):
        tags = Tags(html)
        assert "script" not in tags.tags
        assert "<script" not in html
        assert all(link.get("href", "").startswith("?") for link in tags.links)


def test_every_table_and_link_can_be_heard() -> None:
    html = sections.whole(an_answer(), SCENE)
    tags = Tags(html)
    assert tags.tags.count("table") == tags.tags.count("caption") == 4
    assert html.count('scope="col"') > 4
    assert all("aria-label" in link for link in tags.links)
    assert all("alt=" in image for image in re.findall("<img[^>]*>", html))
    assert "Prediction" in tags.text


def test_a_great_many_classes_are_a_page_all_the_same() -> None:
    groups = Groups("label", tuple(Group(i, 1.0, 1.0, 1) for i in range(24)), True)
    html = tables.groups(groups, 3, SCENE)
    assert "there are more" in html
    assert len(html) < 20_000
    output = Output("4", tuple((i, 1.0) for i in range(10)), None, (3, 3), 100_000, None, 5, 5)
    assert "10 of 100,000 units" in tables.output(output, "Prediction", SCENE)
