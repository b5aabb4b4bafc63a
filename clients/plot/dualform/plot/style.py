"""How all figures look: colours, sizes, and what a panel has; the one place for each.

For figures of your own too, that are to stand beside these.

The colours are Okabe and Ito's palette: told apart by colour-blind readers, and in grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dualform._install import pip_install
from dualform.client import FailedPreconditionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One per task, in this order: the paper's blue and orange first.
TASK_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"]
# Of contributions: what lowers an output unit, nothing, what raises it.
DIVERGING = ["#0072B2", "#F7F7F7", "#D55E00"]
SEPARATOR = "#BBBBBB"  # Between classes; between tasks it is the frame's.
FRAME = "#555555"
# Around a passage's token, in HTML: black on it has a contrast of 16.
MARK = "#F0E442"

# Inches: the paper's wide panels.
WIDTH, HEIGHT = 5.0, 2.0
# Points: read in print at a column's width, and on a screen.
TEXT, SMALL = 8, 7
DOTS_PER_INCH = 200
_DIGIT = 0.066  # Inches that a digit of size SMALL takes.


def need_matplotlib() -> None:
    """Says at once what is missing, before anything is asked.

    Raises:
        FailedPreconditionError: matplotlib is not installed, or refuses the environment's settings.
    """
    try:
        import matplotlib  # noqa: F401
    except ValueError as error:  # MPLBACKEND, which matplotlib reads when it is imported
        raise FailedPreconditionError(
            f"matplotlib does not start ({error}); unset MPLBACKEND, or set it to agg",
            reason="MATPLOTLIB_MISSING",
        ) from None
    except ImportError:
        raise FailedPreconditionError(
            f"figures need matplotlib: {pip_install('plot')}", reason="MATPLOTLIB_MISSING"
        ) from None


@contextmanager
def look() -> Iterator[None]:
    """The settings under which figures are made and written; the user's own come back after it."""
    from matplotlib import style

    settings: dict[str, Any] = {
        "font.size": TEXT,
        "axes.titlesize": TEXT,
        "axes.labelsize": TEXT,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.fontsize": SMALL,
        "pdf.fonttype": 42,  # Text stays text.
        "svg.hashsalt": "dualform",  # The same figure gives the same bytes.
    }
    # A figure looks alike whatever style the user has set.
    with style.context(["default", settings]):
        yield


def new_figure(width: float, height: float, *, images: bool = False) -> Figure:
    """An empty figure of this size in inches, whose parts keep clear of each other.

    Args:
        images: It will hold panels of fixed shapes, which move together.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, compress=images)
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=layout)


def panels(
    layers: Sequence[str], tasks: Sequence[str], colours: Sequence[str]
) -> tuple[Figure, list[Axes]]:
    """A wide panel per layer, one below the other, and above them what colour each task has."""
    figure = new_figure(WIDTH, HEIGHT * len(layers) + (0.2 if len(tasks) > 1 else 0.0))
    axes = list(figure.subplots(len(layers), 1, squeeze=False)[:, 0])
    for name, each in zip(layers, axes, strict=True):
        each.set_title(f"layer {name}", loc="left")
        dress(each)
    legend(figure, tasks, colours)
    return figure, axes


def dress(axes: Axes) -> None:
    """Small ticks; amounts on the y axis as 12k, 3M."""
    axes.tick_params(labelsize=SMALL, length=2, width=0.6)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value))


def legend(figure: Figure, names: Sequence[str], colours: Sequence[str]) -> None:
    """The tasks' colours, above the panels; nothing where there is one."""
    if len(names) < 2:
        return
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=len(handles),
        frameon=False,
        handlelength=1.2,
    )


def group_ticks(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """A tick per group, upright where the names would run into each other."""
    room = (WIDTH - 0.6) / max(len(names), 1)
    crowded = max(map(len, names), default=0) * _DIGIT + 0.05 > room
    axes.set_xticks(list(places), list(names), rotation=90 if crowded else 0)
    axes.tick_params(axis="x", length=0)


def amount(value: float) -> str:
    """A number in little room: 0.25, 12, 3.5k, 120M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")
