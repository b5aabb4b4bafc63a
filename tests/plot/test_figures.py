"""What figures draw is what the memory holds: artists against float64, images against pixels."""

from __future__ import annotations

import re
import sys
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch

from dualform import plot
from dualform._install import pip_install
from dualform.client import (
    Client,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from dualform.plot.style import TASK_COLOURS

from .memory import STEPS, TEXT_PAYLOAD, WITHOUT_PAYLOAD, Pictures, png


def ticks(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def legend(figure: Any) -> dict[str, str]:
    return {
        text.get_text(): to_hex(handle.get_facecolor()).upper()
        for text, handle in zip(
            figure.legends[0].get_texts(), figure.legends[0].legend_handles, strict=True
        )
    }


@pytest.mark.parametrize("absolute", [True, False])
def test_attention_draws_the_largest_of_each_class_and_task(
    client: Client, pictures: Pictures, absolute: bool
) -> None:
    figure = plot.attention(
        client,
        pictures.one(1, "0", "4"),
        per_group=30,
        absolute=absolute,
        tasks=["later", "early"],
    )
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["layer 0", "layer 4"]
    assert legend(figure) == {"later": TASK_COLOURS[0], "early": TASK_COLOURS[1]}
    axes = figure.axes[0]
    weights = np.abs(pictures.weights(1)) if absolute else pictures.weights(1)
    blocks = [
        (task, label)
        for task in ("later", "early")
        for label in np.unique(pictures.label[pictures.task == task])
    ]
    assert ticks(axes) == [str(label) for _, label in blocks]
    curves = [line for line in axes.lines if line.get_linewidth() == 1.2]
    end = -1.0
    for (task, label), curve, tick in zip(blocks, curves, axes.get_xticks(), strict=True):
        mine = weights[(pictures.task == task) & (pictures.label == label)]
        np.testing.assert_allclose(curve.get_ydata(), np.sort(mine)[::-1][:30], rtol=1e-6)
        places = curve.get_xdata()
        assert places[0] > end  # a gap
        end = places[-1]
        assert tick == places[0] + 29 / 2
        assert curve.get_color() == TASK_COLOURS[task == "early"]
    np.testing.assert_allclose(figure.get_size_inches(), [5, 4.2])


@pytest.mark.parametrize("absolute", [True, False])
def test_sums_draws_the_total_of_each_class(
    client: Client, pictures: Pictures, absolute: bool
) -> None:
    figure = plot.sums(client, pictures.one(2, "0"), absolute=absolute, task_by=None)
    (axes,) = figure.axes
    assert not figure.legends
    weights = np.abs(pictures.weights(2)) if absolute else pictures.weights(2)
    heights = [bar.get_height() for bar in axes.patches]
    expected = [weights[pictures.label == label].sum() for label in range(10)]
    np.testing.assert_allclose(heights, expected, atol=1e-3)
    assert ticks(axes) == [str(label) for label in range(10)]
    assert {to_hex(bar.get_facecolor()).upper() for bar in axes.patches} == {TASK_COLOURS[0]}


def test_sums_of_tasks_and_a_filter(client: Client, pictures: Pictures) -> None:
    figure = plot.sums(client, pictures.one(0, "0"), where="label = 3 or label = 5")
    (axes,) = figure.axes
    weights = np.abs(pictures.weights(0))
    expected = [
        weights[(pictures.task == task) & (pictures.label == label)].sum()
        for task in ("early", "later")
        for label in (3, 5)
    ]
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], expected, atol=1e-3)
    assert ticks(axes) == ["3", "5", "3", "5"]
    # A filter that leaves one task is no reason for two colours.
    alone = plot.sums(client, pictures.one(0, "0"), where="task = 'later'")
    assert not alone.legends


def test_profile_draws_the_weight_over_steps(client: Client, pictures: Pictures) -> None:
    figure = plot.profile(client, pictures.one(0, "0"), bins=5)
    curves = [each for each in figure.axes[0].patches if isinstance(each, StepPatch)]
    edges = np.linspace(0, STEPS, 6)
    for task, curve in zip(("early", "later"), curves, strict=True):
        mine = pictures.task == task
        expected, _ = np.histogram(
            pictures.step[mine], edges, weights=np.abs(pictures.weights(0)[mine])
        )
        data = curve.get_data()
        np.testing.assert_allclose(data.values, expected, atol=1e-3)
        np.testing.assert_allclose(data.edges, edges)


def table(figure: Any) -> tuple[list[str], np.ndarray, list[list[str]]]:
    (axes,) = figure.axes
    (image,) = axes.images
    values = np.asarray(image.get_array())
    names = [label.get_text() for label in axes.get_yticklabels()]
    cells = [text.get_text() for text in axes.texts]
    width = values.shape[1]
    return names, values, [cells[i : i + width] for i in range(0, len(cells), width)]


@pytest.mark.parametrize("task_by", [None, "task"])
def test_contributions_add_up_to_the_networks_output(
    client: Client, pictures: Pictures, task_by: str | None
) -> None:
    query = pictures.queries["4"][1]
    figure = plot.contributions(client, "4", query, task_by=task_by)
    names, values, cells = table(figure)
    assert (names[0], names[-1]) == ("initial", "total")
    if task_by is None:
        assert names[1:-1] == [str(label) for label in range(10)]
        parts = client.dual_output("4", query[None], group_by="label")
        np.testing.assert_array_equal(values[1:-1], parts.values[0])
    else:
        assert {name.split()[0] for name in names[1:-1]} == {"early", "later"}
    np.testing.assert_allclose(values[:-1].sum(0), values[-1], atol=1e-5)
    np.testing.assert_allclose(values[-1], pictures.outputs[1], atol=1e-5)
    assert [len(line) for line in cells] == [10] * len(names)
    assert cells[0][0] == f"{values[0, 0]:.2f}".replace("-", "\N{MINUS SIGN}")
    bold = [t.get_text() for t in figure.axes[0].get_xticklabels() if t.get_weight() == "bold"]
    assert bold == [str(pictures.outputs[1].argmax())]


def test_contributions_at_a_step_and_of_some_units(client: Client, pictures: Pictures) -> None:
    query = pictures.queries["2"][0]
    figure = plot.contributions(client, "2", query, units=[40, 3], at_step=STEPS // 2)
    names, values, _ = table(figure)
    whole = client.dual_output("2", query[None], at_step=STEPS // 2).values[0]
    np.testing.assert_array_equal(values[-1], whole[[40, 3]])
    np.testing.assert_allclose(values[:-1].sum(0), values[-1], atol=1e-5)
    assert not [name for name in names if name.startswith("later")]


@pytest.mark.parametrize("source", ["payloads", "images"])
def test_matches_shows_the_images_seen_most_alike(
    client: Client, pictures: Pictures, source: str
) -> None:
    pixels = pictures.pixels[1701]
    figure = plot.matches(
        client,
        pictures.one(1, "0", "2"),
        image=png(pixels),
        images=None if source == "payloads" else lambda ids: [pictures.pixels[i] for i in ids],
        k=4,
        where=f"example not in ({WITHOUT_PAYLOAD}, {TEXT_PAYLOAD})",
    )
    grid = np.array(figure.axes).reshape(2, 5)
    np.testing.assert_array_equal(grid[0, 0].images[0].get_array(), pixels)
    assert not grid[1, 0].images
    weights = np.abs(pictures.weights(1))
    weights[np.isin(pictures.example, (WITHOUT_PAYLOAD, TEXT_PAYLOAD))] = 0
    # Every row of an image has the same key at layer 0: once each, in descending order.
    order = np.argsort(-weights, kind="stable")
    best = list(dict.fromkeys(pictures.example[order].tolist()))[:4]
    assert grid[0, 1].get_ylabel() == "layer 0"
    for axes, example in zip(grid[0, 1:], best, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), pictures.pixels[example])
        label = pictures.label[pictures.example == example][0]
        lines = axes.get_xlabel().split("\n")
        assert lines[0] == f"label {label}"
        assert lines[2] == "seen 4 \N{MULTIPLICATION SIGN}"
        assert len(axes.get_xticks()) == len(axes.get_yticks()) == 0


def test_matches_says_which_payload_is_missing(client: Client, pictures: Pictures) -> None:
    query = pictures.one(0, "0")
    with pytest.raises(FailedPreconditionError, match=r"no payload of example 7 .*add_examples"):
        plot.matches(client, query, where=f"example = {WITHOUT_PAYLOAD}")
    with pytest.raises(FailedPreconditionError, match="example 8 is text, not an image"):
        plot.matches(client, query, where=f"example = {TEXT_PAYLOAD}")
    with pytest.raises(InvalidArgumentError, match="image is no readable PNG"):
        plot.matches(client, query, image=png(pictures.pixels[0])[:40])
    with pytest.raises(InvalidArgumentError, match=r"float64 \[8\] is no image"):
        plot.matches(client, query, image=np.ones(8))
    with pytest.raises(InvalidArgumentError, match="gave 0 for 3 examples"):
        plot.matches(client, query, images=lambda ids: [])


def test_wrong_questions_say_what_to_do(client: Client, pictures: Pictures) -> None:
    query = pictures.one(0, "0")
    with pytest.raises(NotFoundError, match="'7'"):
        plot.attention(client, {"7": query["0"]})
    with pytest.raises(InvalidArgumentError, match=r"one query; layer '0' got .*\[3, 64\]"):
        plot.sums(client, {"0": pictures.queries["0"]})
    with pytest.raises(InvalidArgumentError, match="queries is a mapping"):
        plot.sums(client, {})
    with pytest.raises(InvalidArgumentError, match="'mnist'; the tasks are 'early', 'later'"):
        plot.attention(client, query, tasks=["mnist"])
    with pytest.raises(InvalidArgumentError, match="none called 'nope'"):
        plot.profile(client, query, task_by="nope", tasks=["early"])
    with pytest.raises(InvalidArgumentError, match="'step' has 12 values, and a figure tells 6"):
        plot.sums(client, query, task_by="step")
    with pytest.raises(InvalidArgumentError, match="'example' has 192 groups"):
        plot.sums(client, query, group_by="example")
    with pytest.raises(InvalidArgumentError, match=r"48 output units.*choose some with units="):
        plot.contributions(client, "0", query["0"])
    with pytest.raises(InvalidArgumentError, match=r"units=\[48\]: 1 to 20 of 0 to 47"):
        plot.contributions(client, "0", query["0"], units=[48])
    with pytest.raises(InvalidArgumentError, match="tasks leaves out 'later'"):
        plot.contributions(client, "4", pictures.queries["4"][0], tasks=["early"])


def test_a_torch_query_is_the_same(client: Client, pictures: Pictures) -> None:
    given = torch.from_numpy(pictures.queries["0"][0]).requires_grad_()
    heights = [
        [bar.get_height() for bar in plot.sums(client, {"0": each}).axes[0].patches]
        for each in (given, pictures.queries["0"][:1])
    ]
    assert heights[0] == heights[1]


def test_the_users_matplotlib_settings_stay(client: Client, pictures: Pictures) -> None:
    with mpl.rc_context({"font.size": 31, "axes.spines.top": True}):
        figure = plot.sums(client, pictures.one(0, "0"))
        assert mpl.rcParams["font.size"] == 31
        assert figure.axes[0].title.get_fontsize() == 8
        assert not figure.axes[0].spines["top"].get_visible()


def test_without_matplotlib_the_extra_is_named(
    client: Client, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plot.attention, plot.sums, plot.profile, plot.matches):
        with pytest.raises(FailedPreconditionError, match=re.escape(pip_install("plot"))):
            draw(client, pictures.one(0, "0"))  # type: ignore[operator]
    with pytest.raises(FailedPreconditionError, match="need matplotlib"):
        plot.contributions(client, "4", pictures.queries["4"][0])
