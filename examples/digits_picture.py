"""The demo's picture: the query, each layer's best training images, and the sums per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey.
BLUE, VERMILION, GREY = "#56B4E9", "#D55E00", "#555555"


@dataclass(frozen=True)
class Match:
    """A training image that a query attends to.

    Attributes:
        example: Its id.
        weight: Its largest attention weight.
        count: Its rows among those returned.
        pixels: uint8 [8, 8].
    """

    example: int
    label: int
    weight: float
    count: int
    pixels: np.ndarray


@dataclass(frozen=True)
class LayerAnswer:
    """What one layer answered about one query.

    Attributes:
        layer: Name as in `model.named_modules()`.
        rows: Rows of its memory.
        matches: Distinct training images, largest weight first.
        classes: Labels, ascending.
        sums: float64 [classes], total weight per class.
        parts: float32 [classes, d_out], what each class's rows contribute.
        initial: float32 [d_out], what the initial weights and bias contribute.
        dual: float64 [d_out], the dual output.
        layer_output: float64 [d_out], the layer's own output.
    """

    layer: str
    d_in: int
    rows: int
    matches: list[Match]
    classes: list[int]
    sums: np.ndarray
    parts: np.ndarray
    initial: np.ndarray
    dual: np.ndarray
    layer_output: np.ndarray

    @property
    def error(self) -> float:
        """|dual - layer_output| / |layer_output|."""
        return float(
            np.linalg.norm(self.dual - self.layer_output) / np.linalg.norm(self.layer_output)
        )


def draw(query: np.ndarray, label: int, answers: list[LayerAnswer], top: int, path: Path) -> None:
    """Write the picture as PNG, 200 dots per inch.

    Args:
        query: The test image, uint8 [8, 8].
        label: What it shows.
        answers: One per layer, first layer first; the last one's output is the prediction.
        top: How many rows were asked for, per layer.
    """
    predicted = int(answers[-1].dual.argmax())
    height = 1.0 + 1.6 * len(answers)
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(11, height))
        figure.text(0.02, 1 - 0.28 / height, "Which training images made this output?", size=14)
        columns = figure.add_gridspec(
            1,
            3,
            width_ratios=[1.2, 6, 2.75],
            left=0.02,
            right=0.985,
            top=1 - 0.75 / height,
            bottom=0.42 / height,
            wspace=0.13,
        )
        _query(figure.add_subplot(columns[0]), query, label, predicted, answers)
        for number, answer in enumerate(answers):
            first = number == 0
            _matches(figure, _slot(columns[1], number, len(answers)), answer, top, first)
            bars = figure.add_subplot(_slot(columns[2], number, len(answers)))
            _sums(bars, answer, predicted, first, number == len(answers) - 1)
        figure.savefig(path, dpi=200)
        plt.close(figure)


def _slot(column: SubplotSpec, number: int, count: int) -> SubplotSpec:
    return column.subgridspec(count, 1, hspace=0.38)[number]


def _query(
    axes: Axes, query: np.ndarray, label: int, predicted: int, answers: list[LayerAnswer]
) -> None:
    _image(axes, query)
    axes.set_title("query: a test image", loc="left", size=9)
    lines = [f"shows digit {label}", f"the network says {predicted}"]
    lines += ["", "dual output", "against the layer's", "(relative error)"]
    lines += [f"  layer {answer.layer}   {answer.error:.0e}" for answer in answers]
    axes.text(0, -0.08, "\n".join(lines), transform=axes.transAxes, va="top", linespacing=1.4)


def _matches(figure: Figure, slot: SubplotSpec, answer: LayerAnswer, top: int, first: bool) -> None:
    cells = slot.subgridspec(1, len(answer.matches), wspace=0.08)
    for place, match in enumerate(answer.matches):
        axes = figure.add_subplot(cells[place])
        _image(axes, match.pixels)
        said = f"digit {match.label}\nweight {match.weight:.0f}\n{match.count} rows"
        axes.set_xlabel(said, size=8)
        if place == 0:
            axes.set_ylabel(f"layer {answer.layer}", size=10)
            if first:
                title = f"largest weights; rows: how many of the top {top} are of that image"
                axes.set_title(title, loc="left", size=9)


def _sums(axes: Axes, answer: LayerAnswer, predicted: int, first: bool, last: bool) -> None:
    colours = [VERMILION if name == predicted else BLUE for name in answer.classes]
    axes.bar(range(len(answer.classes)), answer.sums / 1000, color=colours, width=0.75)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(answer.classes)), [str(name) for name in answer.classes])
    axes.tick_params(length=0, labelsize=8)
    axes.locator_params(axis="y", nbins=4)
    if first:
        axes.set_title("weight per class, thousands", loc="left", size=9)
    if last:
        axes.set_xlabel(f"class of the training images; {predicted} is the prediction", size=8)


def _image(axes: Axes, pixels: np.ndarray) -> None:
    axes.imshow(pixels, cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    axes.set_anchor("NW")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(GREY)
        side.set_linewidth(0.8)
