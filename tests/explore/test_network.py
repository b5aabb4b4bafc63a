"""The user's model on the page: the whole network, without rows too, and the examples behind it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dualform.client import AsyncClient, Client, InvalidArgumentError, NotFoundError
from dualform.explore import Model, View, load_model
from dualform.explore.answers import Attributed, LogitParts, Network, Output, Refused
from dualform.explore.asking import GROUPS_SHOWN, Asker
from dualform.explore.curve import _curve, curves_of
from dualform.explore.markup import number
from dualform.explore.network import network_of
from dualform.explore.prediction import network as drawn
from dualform.explore.queries import Uploads, query_of
from dualform.explore.scene import Scene, names_for, read_names, unused
from dualform.explore.tables import logit_parts

from .memory import STEPS, Digits, kept, write_model


@pytest.fixture(scope="module")
def prepared(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_model(digits, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def brought(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_model(digits, tmp_path_factory.mktemp("model"), "own"))


def ask(digits: Digits, client: AsyncClient, view: View, model: Model, column: str = "") -> Network:
    async def steps() -> Network:
        info = await client.index()
        layer = info.layers[view.layer]
        query = await query_of(client, None, info, layer, view, Uploads(model))
        assert query is not None
        asker = Asker(client, None, info, layer, view, lambda _: None)
        opens = lambda: Client.local(digits.path)  # noqa: E731
        return await network_of(asker, model, opens, query, column)

    return asyncio.run(steps())


def test_it_says_what_the_model_says(
    client: AsyncClient, digits: Digits, prepared: Model, brought: Model
) -> None:
    for view, model, seen in (
        (View(layer="2", example=7), prepared, kept(digits, 7)),
        (View(layer="0", input=7), brought, digits.images[7:8]),
    ):
        with torch.no_grad():
            expected = digits.model(seen)[0].numpy()
        found = ask(digits, client, view, model).output
        assert isinstance(found, Output)
        assert [value for _, value in found.whole] == pytest.approx(np.sort(expected)[::-1])
        assert found.left is None


def test_without_rows_and_at_a_step_it_is_the_whole_network_in_dual_form(
    client: AsyncClient, digits: Digits, brought: Model
) -> None:
    """Layer by layer through the client: the second sees what the first gives without the rows."""
    view = View(layer="2", input=7, filters=("label != 3", "step > 4"), step=40)
    found = ask(digits, client, view, brought).output
    assert isinstance(found, Output)
    assert found.left is not None
    with Client.local(digits.path) as other:
        some = {"where": view.where, "at_step": 40}
        hidden = other.dual_output("0", digits.images[7:8].numpy(), **some)
        last = other.dual_output("2", np.maximum(hidden.values, 0), **some).values[0]
    assert list(found.left) == pytest.approx([last[unit] for unit, _ in found.whole], rel=1e-5)
    assert found.winner[1] == int(last.argmax())
    assert found.beside == "filtered, after 40 steps"


@pytest.mark.parametrize("unit", [None, 4])
def test_the_examples_behind_it_are_those_of_attribute(
    client: AsyncClient, digits: Digits, brought: Model, unit: int | None
) -> None:
    view = View(layer="2", input=7, k=4, unit=unit, filters=("label != 3",))
    found = ask(digits, client, view, brought).attributed
    assert isinstance(found, Attributed)
    target = "margin" if unit is None else unit
    with Client.local(digits.path) as other:
        expected = other.attribute(
            digits.model, digits.images[7:8], target=target, k=4, where="label != 3"
        )
    assert [each.example for each in found.found] == expected.groups[0].tolist()
    assert [each.score for each in found.found] == pytest.approx(expected.scores[0])
    assert [each.by_layer for each in found.found] == [
        pytest.approx(shares) for shares in expected.by_layer[0]
    ]
    for each in found.found:
        assert each.columns["label"] == int(digits.labels[int(each.example)])
    logits = digits.model(digits.images[7:8])[0].detach()
    value = logits[4] if unit == 4 else torch.logit(logits.softmax(0).max())
    assert found.value == pytest.approx(float(value), rel=1e-4)
    html = drawn(Network(Refused("x"), found), Scene(view, "1", ["a"] * 10, "2", True))
    assert ("the margin of unit" in html) == (unit is None)


@pytest.mark.parametrize("column", ["label", "example"])
@pytest.mark.parametrize("unit", [None, 4])
def test_the_classes_are_parts_of_the_logit(
    client: AsyncClient, digits: Digits, brought: Model, unit: int | None, column: str
) -> None:
    """Each layer's parts, times torch's gradient of the logit at the layer's output."""
    view = View(layer="2", input=7, unit=unit)
    found = ask(digits, client, view, brought, column).classes
    assert isinstance(found, LogitParts)
    x = digits.images[7:8]
    hidden = digits.model[0](x).detach().requires_grad_()
    logits = digits.model[2](hidden.relu())[0]
    meant = int(logits.argmax()) if unit is None else unit
    (gradient,) = torch.autograd.grad(logits[meant], hidden)
    along = {"0": gradient[0].numpy(), "2": np.eye(10)[meant]}
    logit = logits[meant].item()
    assert (found.unit, found.layers) == (meant, ("0", "2"))
    assert found.value == pytest.approx(logit, rel=1e-6)
    seen = {"0": x.numpy(), "2": hidden.relu().detach().numpy()}
    with Client.local(digits.path) as other:
        for at, name in enumerate(found.layers):
            parts = other.dual_output(name, seen[name], group_by=column)
            assert parts.groups is not None
            of_groups = dict(zip(parts.groups, parts.values[0] @ along[name], strict=True))
            expected = [of_groups.pop(each) for each in found.names]
            assert found.values[:, at] == pytest.approx(expected, abs=1e-4)
            assert (found.others is None) == (not of_groups)
            if found.others is not None:
                assert found.others[at] == pytest.approx(sum(of_groups.values()), abs=1e-4)
    assert found.names == sorted(found.names)
    assert len(found.names) == (10 if column == "label" else GROUPS_SHOWN)
    whole = found.values.sum(axis=0) + found.initial + found.residual
    whole += 0 if found.others is None else found.others
    assert whole[1] == pytest.approx(logit, rel=1e-5)
    with torch.no_grad():
        assert whole[0] == pytest.approx(float((gradient * digits.model[0](x)).sum()), rel=1e-4)
    html = drawn(Network(Refused("x"), None, found), Scene(view, "1", ["a"] * 10, "2", True))
    rows = re.findall(r"<tr><th scope=.row.>(.*?)</th>(.*?)</tr>", html)
    assert len(rows) == len(found.names) + (3 if found.others is None else 4)
    assert rows[-1][0] == "together"
    said = re.findall(r">([^<>]+)</span>", rows[-1][1])
    assert said == [number(value) for value in (whole.sum(), *whole)]
    assert f"The logit is {number(logit)}" in html


def test_of_many_layers_the_largest_are_shown() -> None:
    values = np.arange(18.0).reshape(2, 9) - 4
    none = np.zeros(9)
    found = LogitParts("label", 0, 1.0, tuple("abcdefghi"), [3, None], values, none, none, none, 0)
    rows = re.findall("<tr>.*?</tr>", logit_parts(found, Scene(View())))
    for row, line in zip(rows[1:], values, strict=False):
        cells = [
            float(cell.replace("\N{MINUS SIGN}", "-")) for cell in re.findall(r">(\S+)</s", row)
        ]
        assert len(cells) == 8
        assert cells[0] == sum(cells[1:]) == line.sum()
    assert "3 other layers" in rows[0]
    assert "every other label" in rows[3]


def test_what_is_known_is_shown_before_the_rest(
    client: AsyncClient, digits: Digits, brought: Model
) -> None:
    shown: list[Network] = []

    async def steps() -> Network:
        info = await client.index()
        view = View(layer="2", input=7, k=2)
        query = await query_of(client, None, info, info.layers["2"], view, Uploads(brought))
        assert query is not None
        asker = Asker(client, None, info, info.layers["2"], view, lambda _: None)
        opens = lambda: Client.local(digits.path)  # noqa: E731
        return await network_of(asker, brought, opens, query, "label", shown.append)

    whole = asyncio.run(steps())
    assert [each.attributed is None for each in shown] == [True, False]
    assert all(each.output == whole.output for each in shown)
    scene = Scene(View(), "1", (), "2", True)
    titles = [drawn(each, scene).count("<h2>") for each in (*shown, whole)]
    assert titles == [1, 2, 3]
    refused = replace(whole, attributed=Refused("why"), classes=Refused("why"))
    assert drawn(refused, scene).count("why") == 1


def test_what_the_model_can_not_be_asked_is_said(
    client: AsyncClient, digits: Digits, prepared: Model, brought: Model
) -> None:
    with pytest.raises(NotFoundError, match=r"no input 20 of .*it has 0 to 19"):
        ask(digits, client, View(layer="2", input=20), brought)
    assert brought.labelled(3) == ""
    assert replace(brought, labels=torch.arange(9)).labelled(3) == ", label 3"
    with pytest.raises(NotFoundError, match="it brings none of its own"):
        ask(digits, client, View(layer="2", input=0), prepared)
    with pytest.raises(InvalidArgumentError, match="brings inputs of its own"):
        brought.prepared(b"")
    other = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    found = ask(digits, client, View(layer="2", input=3), replace(brought, module=other))
    assert isinstance(found.output, Output)
    assert isinstance(found.attributed, Refused)
    assert "is not what the index was trained to" in found.attributed.why
    strange = replace(brought, module=torch.nn.Sequential(*other, torch.nn.Unflatten(1, (1, 2, 5))))
    found = ask(digits, client, View(layer="2", input=3), strange)
    assert isinstance(found.output, Refused)
    assert "logits [1, classes]" in found.output.why
    assert "the model gives [1, 1, 2, 5]" in found.output.why


def test_inputs_of_several_parts_are_cut_alike() -> None:
    tensor = torch.arange(12).reshape(4, 3)
    for inputs in (tensor, (tensor, tensor.numpy()), {"ids": tensor, "mask": tensor}):
        model = Model(None, None, inputs, spec="m.py:f")
        assert model.count == 4
        one = model.numbered(2)
        again = eval(model.slicing(2), {"inputs": inputs})
        for given in (one, again):
            parts = given.values() if isinstance(given, dict) else given
            parts = parts if isinstance(inputs, (tuple, dict)) else [given]
            assert all(np.array_equal(part, tensor[2:3]) for part in parts)


def test_the_curve_is_the_recorded_loss(client: AsyncClient, digits: Digits) -> None:
    async def steps() -> None:
        (curve,) = await curves_of(client, None, (await client.index()).layers["0"])
        assert curve.column == "loss"
        assert curve.steps == tuple(range(STEPS))
        assert curve.values == pytest.approx(digits.losses)

    asyncio.run(steps())


def test_names_are_those_of_as_many_units(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("cat\ndog\n")
    names = [read_names(tmp_path / "two"), ("a", "b", "c")]
    assert names_for(2, names) == ("cat", "dog")
    assert names_for(4, names) == ()
    assert unused({"head": 3}, names) == ""
    assert unused({"head": 4}, names) == "2, 3 are given; layer head has 4 units"
    scene = Scene(View(layer="head"), "1", ("cat", "dog"), "head")
    assert scene.unit(1, "head") == "1 dog"
    assert scene.unit(1, "hidden") == scene.unit(1, "hidden") == "1"
    assert scene.value("label", 0) == "0 cat"
    assert scene.value("label", 7) == "7"
    assert scene.value("task", 0) == "0"
    for name, data in (("empty", b""), ("odd", b"\xff\xfe\xff"), ("gone", None)):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidArgumentError, match=re.escape(str(tmp_path / name))):
            read_names(tmp_path / name)


def test_only_columns_with_one_value_per_step_are_curves() -> None:
    steps = np.array([[0, 0, None], [1, 1, 1], [2, None, None]], object)
    same = np.array([[0.5, 0.5, None], [0.25, 0.25, 0.25], [float("nan"), None, None]], object)
    curve = _curve("loss", steps, same)
    assert curve is not None
    assert (curve.steps, curve.values) == ((0, 1), (0.5, 0.25))
    other = np.array([[0.5, 0.5, None], [0.25, 0.25, 0.75], [1.0, None, None]], object)
    assert _curve("age", steps, other) is None
