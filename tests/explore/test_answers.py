"""What the page shows is what the trained layers and the recorded keys say, in float64."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch

from dualform.client import AsyncClient, Client, InvalidArgumentError, NotFoundError
from dualform.explore import Model, View, load_model, sections
from dualform.explore.answers import Answer, Groups, Output, Parts, Refused
from dualform.explore.asking import GROUPS_SHOWN, Asker, answer
from dualform.explore.browsing import PER_PAGE, offered
from dualform.explore.keys import key_of
from dualform.explore.payloads import MOST_LETTERS, Nothing, Picture, Text
from dualform.explore.queries import Uploads, query_of
from dualform.explore.scene import Scene

from .memory import STEPS, TEXTS, Digits, Many, a_picture, batches, write_model


def ask(client: AsyncClient, view: View, uploads: Uploads | None = None) -> Answer:
    async def steps() -> Answer:
        info = await client.index()
        layer = info.layers[view.layer]
        query = await query_of(client, None, info, layer, view, uploads or Uploads())
        assert query is not None
        return await answer(Asker(client, None, info, layer, view, lambda _: None), query)

    return asyncio.run(steps())


def ask_of(path: Path, view: View) -> Answer:
    client = AsyncClient.local(path)
    try:
        return ask(client, view)
    finally:
        asyncio.run(client.close())


@pytest.mark.parametrize("example", [7, 300])
def test_a_key_is_what_the_layer_saw(client: AsyncClient, digits: Digits, example: int) -> None:
    async def steps() -> None:
        info = await client.index()
        key = await key_of(client, info.layers["0"], example)
        assert np.array_equal(key.query[0], digits.images[example].numpy())
        assert key.steps == [step for step, ids in enumerate(batches()) if example in ids]
        assert key.columns["step"] == key.steps[-1]
        assert key.columns["label"] == int(digits.labels[example])
        earlier = await key_of(client, info.layers["2"], example, seen=key.steps[0])
        assert earlier.columns["step"] == key.steps[0]
        assert earlier.query.shape == (1, 32)

    asyncio.run(steps())


def test_what_has_no_key_is_said(client: AsyncClient) -> None:
    async def steps() -> None:
        info = await client.index()
        with pytest.raises(NotFoundError, match="no row of example 9999"):
            await key_of(client, info.layers["0"], 9999)
        with pytest.raises(InvalidArgumentError, match="up to 8,192 are fetched"):
            await key_of(client, replace(info.layers["0"], d_in=9000), 1)
        with pytest.raises(InvalidArgumentError, match="no column example"):
            await key_of(client, replace(info.layers["0"], columns={"step": "int64"}), 1)

    asyncio.run(steps())


def test_weights_are_those_of_all_rows_of_an_example(client: AsyncClient, digits: Digits) -> None:
    found = ask(client, View(layer="0", example=7, k=5))
    assert not isinstance(found.by_weight, Refused)
    expected = digits.weights(digits.images[7].numpy())
    best = np.argsort(-expected, kind="stable")[:5]
    assert [each.example for each in found.by_weight] == best.tolist()
    for each in found.by_weight:
        assert each.weight == pytest.approx(expected[each.example], rel=1e-6)
        assert each.count == digits.times()[each.example]
        assert each.columns["label"] == int(digits.labels[each.example])
        kind = Picture if int(str(each.example)) % 5 else Nothing
        assert isinstance(each.payload, kind)


def test_the_output_is_the_layers_and_classes_add_up_to_it(
    client: AsyncClient, digits: Digits
) -> None:
    found = ask(client, View(layer="2", example=7))
    with torch.no_grad():
        expected = digits.model[2](torch.from_numpy(found.query.vector))[0].numpy()
    assert isinstance(found.output, Output)
    assert [value for _, value in found.output.whole] == pytest.approx(
        np.sort(expected)[::-1], rel=1e-5
    )
    assert found.unit == found.output.winner[0] == int(expected.argmax())
    groups = found.groups
    assert isinstance(groups, Groups)
    assert groups.output == pytest.approx(expected.max(), rel=1e-5)
    added = sum(each.contribution or 0 for each in groups.groups)
    assert groups.initial is not None
    assert added + groups.initial == pytest.approx(expected.max(), abs=1e-4)
    assert [each.name for each in groups.groups] == list(range(10))
    assert [each.rows for each in groups.groups] == [
        int(digits.times()[digits.labels.numpy() == label].sum()) for label in range(10)
    ]
    parts = found.parts
    assert isinstance(parts, Parts)
    assert (parts.values.sum(axis=0) + parts.initial) == pytest.approx(expected, abs=1e-4)


def test_both_lists_have_both_numbers(client: AsyncClient) -> None:
    """The contribution of an example that the list by weight has is that of the other list."""
    for by in ("example", "row"):
        found = ask(client, View(layer="2", example=7, k=60, by=by))
        assert not isinstance(found.by_weight, Refused)
        assert not isinstance(found.by_contribution, Refused)
        name = "example" if by == "example" else "row"
        others = {getattr(each, name): each for each in found.by_contribution}
        both = [each for each in found.by_weight if getattr(each, name) in others]
        assert both
        for each in both:
            other = others[getattr(each, name)]
            assert each.weight == pytest.approx(other.weight, rel=1e-6)
            assert each.contribution == pytest.approx(other.contribution, rel=1e-6)
        assert all(each.contribution is not None for each in found.by_weight)


def test_a_filter_leaves_the_layer_without_those_rows(client: AsyncClient) -> None:
    view = View(layer="2", example=7)
    whole, masked = ask(client, view), ask(client, replace(view, filters=("label != 3",)))
    assert isinstance(whole.output, Output)
    assert isinstance(masked.output, Output)
    assert isinstance(whole.groups, Groups)
    assert masked.output.left is not None
    assert masked.output.whole == whole.output.whole
    three = next(each for each in whole.groups.groups if each.name == 3)
    place = [unit for unit, _ in whole.output.whole].index(whole.unit or 0)
    without = whole.output.whole[place][1] - (three.contribution or 0)
    assert masked.output.left[place] == pytest.approx(without, abs=1e-4)
    assert masked.output.rows == whole.output.rows - three.rows
    assert isinstance(masked.groups, Groups)
    assert 3 not in [each.name for each in masked.groups.groups]


def test_at_a_step_only_the_rows_before_it_count(client: AsyncClient, digits: Digits) -> None:
    found = ask(client, View(layer="0", example=7, step=20, by="row", k=60))
    assert not isinstance(found.by_weight, Refused)
    assert not isinstance(found.by_contribution, Refused)
    for each in (*found.by_weight, *found.by_contribution):
        assert each.columns["step"] < 20
    first = ask(client, View(layer="0", example=7, step=0))
    assert isinstance(first.output, Output)
    assert first.output.rows == 0
    assert first.by_weight == ()


def test_the_prediction_is_that_of_the_same_row(client: AsyncClient) -> None:
    hidden = ask(client, View(layer="0", example=7))
    last = ask(client, View(layer="2", example=7))
    assert hidden.prediction is not None
    assert last.prediction is None
    assert hidden.prediction == last.output


def test_a_text_has_its_tokens_weighed(reader: AsyncClient, texts: Path) -> None:
    found = ask(reader, View(layer="head", example="text 05", k=3))
    assert isinstance(found.query.payload, Text)
    assert found.query.places == list(range(len(TEXTS[5]) - 1))
    assert not isinstance(found.by_weight, Refused)
    for each in found.by_weight:
        assert each.text is not None
        number = int(str(each.example).removeprefix("text "))
        assert "".join(token.text for token in each.text.tokens) == TEXTS[number]
        scores = [token.score or 0.0 for token in each.text.tokens]
        assert sum(scores) == pytest.approx(each.weight, rel=1e-5)
        assert each.text.tokens[-1].score is None
    assert found.column == ""
    assert found.groups is None


@pytest.mark.parametrize("filters", [(), ("label > 500",)])
def test_a_great_many_classes_and_a_very_long_text(many: Many, filters: tuple[str, ...]) -> None:
    """100,000 classes, 10 MB of text, and examples of which nothing was kept."""
    client = AsyncClient.local(many.path)
    view = View(index="many", layer="0", example=7, filters=filters)
    found = ask(client, view)
    groups = found.groups
    assert isinstance(groups, Groups)
    assert groups.more
    assert len(groups.groups) == GROUPS_SHOWN
    assert found.parts is None
    weights = many.keys.double() @ many.keys[7].double()
    for each in groups.groups:
        assert each.weight == pytest.approx(float(weights[each.name]), rel=1e-6)
    with Client.local(many.path) as other:
        parts = other.dual_output("0", found.query.vector, where=view.where, group_by="label")
    assert parts.groups is not None
    of_classes = dict(zip(parts.groups, parts.values[0, :, found.unit or 0].tolist(), strict=True))
    for each in groups.groups:
        assert each.contribution == pytest.approx(of_classes.pop(each.name), rel=1e-5)
    assert groups.others == pytest.approx(sum(of_classes.values()), abs=1e-5)
    assert not isinstance(found.by_weight, Refused)
    assert found.by_weight[0].example == many.best
    begin = many.text[:MOST_LETTERS]
    assert found.by_weight[0].payload == Text(begin, len(many.text) - MOST_LETTERS)
    assert isinstance(found.by_weight[1].payload, Nothing)
    html = sections.whole(found, Scene(view, "1"))
    assert len(html) < 100_000
    assert f"{len(many.text) - MOST_LETTERS:,} letters" in html
    asyncio.run(client.close())


def test_what_was_kept_and_is_gone_leaves_the_rest(digits: Digits, tmp_path: Path) -> None:
    """The file, or one payload of it that is not as it was written."""
    kept = ask_of(digits.path, View(layer="2", example=7))
    for name in ("gone", "damaged"):
        shutil.copytree(digits.path, tmp_path / name)
        file = tmp_path / name / "examples.bin"
        if name == "gone":
            file.unlink()
        else:
            bytes_ = bytearray(file.read_bytes())
            bytes_[file.read_bytes().index(a_picture(digits, 7)[:60]) + 50] ^= 1
            file.write_bytes(bytes_)
        found = ask_of(tmp_path / name, View(layer="2", example=7))
        assert found.output == kept.output
        assert isinstance(found.query.payload, Nothing)
        assert "examples.bin" in found.query.payload.trouble
        html = sections.whole(found, Scene(View(layer="2", example=7), "1"))
        assert escape(found.query.payload.trouble) in html
        assert not isinstance(found.by_weight, Refused)
        assert not isinstance(kept.by_weight, Refused)
        for each, whole in zip(found.by_weight, kept.by_weight, strict=True):
            assert replace(each, payload=whole.payload) == whole
            assert each.example == 7 or (each.payload == whole.payload) == (name == "damaged")


def test_examples_are_offered_by_pages(
    client: AsyncClient, reader: AsyncClient, digits: Digits
) -> None:
    async def steps() -> None:
        layer = (await client.index()).layers["2"]
        some = await offered(client, None, layer, View())
        assert [each.example for each in some] == list(range(PER_PAGE))
        assert [each.label for each in some] == digits.labels[:PER_PAGE].tolist()
        more = await offered(client, None, layer, View(after=475))
        assert [each.example for each in more] == [476, 477, 478, 479]
        layer = (await reader.index()).layers["head"]
        called = [each.example for each in await offered(reader, None, layer, View())]
        assert called == sorted(map(str, called))
        later = await offered(reader, None, layer, View(after=called[-1]))
        assert all(str(each.example) > str(called[-1]) for each in later)

    asyncio.run(steps())


def test_an_upload_is_a_query(client: AsyncClient, digits: Digits, tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", digits.images[5:8].numpy())
    uploads = Uploads()
    digest = uploads.keep("q.npy", (tmp_path / "q.npy").read_bytes())
    there = ask(client, View(layer="0", upload=digest, number=2), uploads)
    kept = ask(client, View(layer="0", example=7))
    assert there.output == kept.output
    assert not isinstance(there.by_weight, Refused)
    assert there.by_weight == kept.by_weight
    row = ",".join(f"{value:.9g}" for value in digits.images[7].numpy())
    digest = uploads.keep("row.csv", row.encode())
    assert ask(client, View(layer="0", upload=digest), uploads).output == kept.output
    with pytest.raises(InvalidArgumentError, match=r"layer 2 takes 32; it fits layer 0"):
        ask(client, View(layer="2", upload=digest), uploads)
    with pytest.raises(InvalidArgumentError, match="queries 0 to 0; 4 is none"):
        ask(client, View(layer="0", upload=digest, number=4), uploads)
    with pytest.raises(NotFoundError, match="upload it again"):
        ask(client, View(layer="0", upload="gone"), uploads)


def test_a_picture_is_what_the_model_sees_of_it(
    client: AsyncClient, digits: Digits, tmp_path: Path
) -> None:
    model = load_model(write_model(digits, tmp_path))
    uploads = Uploads(model)
    digest = uploads.keep("seven.png", a_picture(digits, 7))
    found = ask(client, View(layer="0", upload=digest), uploads)
    seen = model.prepare(a_picture(digits, 7))
    with torch.no_grad():
        own = digits.model(seen)[0].numpy()
    assert np.array_equal(found.query.vector, seen.numpy())
    assert isinstance(found.prediction, Output)
    for unit, value in found.prediction.whole:
        assert value == pytest.approx(own[unit], abs=1e-5)
    assert found.query.payload == Picture("image/png", True, f"upload?digest={digest}")
    digest = uploads.keep("a.txt", b"not a picture")
    with pytest.raises(InvalidArgumentError, match="the model does not take it: "):
        ask(client, View(layer="0", upload=digest), uploads)
    with pytest.raises(InvalidArgumentError, match="pictures and texts are a model's"):
        Uploads().keep("seven.png", a_picture(digits, 7))
    with pytest.raises(InvalidArgumentError, match="no UTF-8 text"):
        uploads.keep("a.bin", b"\xff\xfe\x00\xd8")


def test_a_text_is_read_by_the_model(reader: AsyncClient) -> None:
    from torch import nn

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 27)

        def forward(self, letters: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(letters)
            return out

    def prepare(payload: bytes | str) -> torch.Tensor:
        return torch.eye(24)[: len(payload)][None]

    uploads = Uploads(Model(Read(), prepare))
    digest = uploads.keep("t.txt", b"a fox")
    last = ask(reader, View(layer="head", upload=digest), uploads)
    assert np.array_equal(last.query.vector, np.eye(24, dtype=np.float32)[4:5])
    assert last.query.text is not None
    assert [each.text for each in last.query.text.tokens] == list("a fox")
    first = ask(reader, View(layer="head", upload=digest, number=0), uploads)
    assert np.array_equal(first.query.vector, np.eye(24, dtype=np.float32)[:1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def trained(): return 3", "(model, prepare) is needed"),
        ("def trained(): 1 / 0", "ZeroDivisionError"),
        ("def other(): pass", "m.py has no function 'trained'"),
        (
            "import numpy as np\ndef trained(): return 1, np.zeros((3, 2)), [0, 1]",
            "returned 3 inputs, and for labels 2",
        ),
        (
            "import numpy as np\ndef trained(): return 1, np.zeros((3, 2)), 7",
            "returned 3 inputs, and for labels int",
        ),
        ("syntax error", "SyntaxError"),
    ],
)
def test_what_is_no_model_is_said(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        load_model(f"{tmp_path / 'm.py'}:trained")
    with pytest.raises(InvalidArgumentError, match=r"is no FILE\.py:FUNCTION"):
        load_model(str(tmp_path / "m.py"))
    with pytest.raises(InvalidArgumentError, match="is not there"):
        load_model(f"{tmp_path / 'n.py'}:trained")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("q.npy", b"nothing", "can't be read"),
        ("q.csv", b"a,b,c", "can't be read"),
        ("q.csv", b"1,inf", "NaN or Inf"),
        ("q.csv", b"1e300,2", "NaN or Inf"),
    ],
)
def test_what_is_no_query_is_refused(name: str, data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Uploads().keep(name, data)


def test_what_no_row_explains_is_shown_where_it_is_asked_for(client: AsyncClient) -> None:
    """Float32 training leaves some; where none may be left, that is refused with a way on."""
    view = View(layer="2", example=7, residual=0.0)
    found = ask(client, view)
    for part in (found.output, found.by_contribution):
        assert isinstance(part, Refused)
        assert part.residual
    assert not isinstance(found.by_weight, Refused)
    html = sections.whole(found, Scene(view, "1"))
    more = replace(view, residual=float("inf"))
    assert f'href="{escape(more.link())}" data-go>Show it all the same' in html
    assert ask(client, more).output == ask(client, replace(view, residual=None)).output


def test_a_part_that_is_refused_leaves_the_others(client: AsyncClient) -> None:
    found = ask(client, View(layer="2", example=7, unit=99, step=STEPS))
    assert isinstance(found.output, Output)
    assert isinstance(found.by_contribution, Refused)
    assert not isinstance(found.by_weight, Refused)
    found = ask(client, View(layer="2", example=7, filters=("colour = 3",)))
    assert isinstance(found.by_weight, Refused)
    assert "colour" in found.by_weight.why
