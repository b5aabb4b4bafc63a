"""Outputs and sums per class, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dualform.explore.answers import Groups, LogitParts, Output, Parts, Refused
from dualform.explore.markup import bar, link, named, number, refused, table
from dualform.explore.scene import Scene
from dualform.explore.view import without

LAYERS_SHOWN = 6
"""So many layers' shares are read at a glance; of more, the largest, and the sum of the others."""


def output(what: Output | Refused, title: str, scene: Scene) -> str:
    """A layer's output, beside what is left of it without the rows that are filtered out."""
    if isinstance(what, Refused):
        return f"<h2>{title}</h2>{refused(what, scene.view)}"
    values = [value for _, value in what.whole] + list(what.left or ())
    largest = max((abs(value) for value in values), default=0.0)
    rows = []
    for place, (unit, value) in enumerate(what.whole):
        cells = [_unit(unit, scene, what.layer), number(value), bar(value, largest)]
        if what.left is not None:
            cells += [number(what.left[place]), bar(what.left[place], largest)]
        rows.append(cells)
    head = ["unit", "all rows" if what.layer else "as trained", ""]
    head += [what.beside, ""] if what.left is not None else []
    caption = f"output of layer {named(what.layer)}" if what.layer else "what the model gives"
    return (
        f"<h2>{title}</h2>{_winner(what, scene)}"
        + table(head, rows, caption=caption, kind="output")
        + f'<p class="said">{_under(what)}</p>'
    )


def _winner(what: Output, scene: Scene) -> str:
    """Which unit is the largest, where there are several."""
    if what.units == 1:
        return ""
    first, left = what.winner
    line = f"unit <b>{named(scene.unit(first, what.layer))}</b> is largest"
    if what.left is not None:
        line += f"; {what.beside} <b>{named(scene.unit(left, what.layer))}</b>"
        line += " still" if left == first else ""
    return f'<p class="winner">{line}</p>'


def _under(what: Output) -> str:
    """How much of the layer, and of its rows, that is."""
    shown = len(what.whole)
    under = f"{shown} of {what.units:,} units" if shown < what.units else "all units"
    if what.total:
        under = f"{what.rows:,} of {what.total:,} rows take part; {under}"
    if what.residual is not None:
        under += f"; no row explains {number(what.residual)} of the output"
    return under


def _unit(unit: int, scene: Scene, layer: str) -> str:
    """A unit that contributions can go to, of the layer that is looked at."""
    called = named(scene.unit(unit, layer))
    if layer != scene.view.layer:
        return called
    said = f"contributions to unit {scene.unit(unit, layer)}"
    view = replace(scene.view, unit=unit)
    return link(view, called, said=said, current=unit == scene.view.unit)


def groups(found: Groups | Refused | None, unit: int | None, scene: Scene) -> str:
    """Sums per class, and what they and the rest add up to."""
    title = "<h2>By class</h2>"
    if found is None:
        return title + "<p>Training named no classes: recorder.annotate(label=…) does.</p>"
    if isinstance(found, Refused):
        return title + refused(found, scene.view)
    heaviest = max((abs(each.weight or 0.0) for each in found.groups), default=0.0)
    most = max((abs(each.contribution or 0.0) for each in found.groups), default=0.0)
    rows = [
        [
            named(scene.value(found.column, each.name)),
            number(each.weight),
            bar(each.weight, heaviest),
            number(each.contribution),
            bar(each.contribution, most),
            f"{each.rows:,}",
            link(
                without(scene.view, found.column, each.name),
                "leave out",
                said=f"the output without {found.column} {each.name}",
                kind="go",
            ),
        ]
        for each in found.groups
    ]
    called = "" if unit is None else f"unit {named(scene.unit(unit, scene.view.layer))}"
    for name, value in (
        (f"every other {named(found.column)}", found.others),
        ("initial weights", found.initial),
        ("no row explains", found.residual),
        (called, found.output),
    ):
        if value is not None:
            rows.append([name, "", "", number(value), bar(value, most), "", ""])
    added = f"added to {called}" if called else "added"
    head = [named(found.column), "sum of weights", "", added, "", "rows", ""]
    more = "; the largest, there are more" if found.more else ""
    return title + table(head, rows, caption=f"sums per {named(found.column)}{more}", kind="groups")


def parts(found: Parts | Refused | None, scene: Scene) -> str:
    """What each class added to each unit: a table as strong as its numbers."""
    if found is None:
        return ""
    title = "<h2>What each class added to each unit</h2>"
    if isinstance(found, Refused):
        return title + refused(found, scene.view)
    largest = float(abs(found.values).max()) if found.values.size else 0.0
    rows = [
        [named(scene.value(found.column, name)), *(_heat(float(value), largest) for value in line)]
        for name, line in zip(found.names, found.values, strict=True)
    ]
    rows.append(["initial", *(number(float(value)) for value in found.initial)])
    units = (_unit(unit, scene, scene.view.layer) for unit in found.units)
    head = [named(found.column), *units]
    return title + table(head, rows, caption="columns are output units", kind="parts")


def logit_parts(found: LogitParts, scene: Scene) -> str:
    """What each class added to a logit, layer by layer, and what all of it adds up to."""
    shown = largest(np.abs(found.values).sum(axis=0))
    names = ["all layers", *(f"layer {named(found.layers[at])}" for at in shown)]
    left = len(found.layers) - len(shown)
    names += [f"{left} other layers"] if left else []

    def cells(values: npt.NDArray[np.float64]) -> list[float]:
        some = [float(values[at]) for at in shown]
        whole = float(values.sum())
        return [whole, *some, whole - sum(some)] if left else [whole, *some]

    lines = [cells(line) for line in found.values]
    most = max((abs(value) for line in lines for value in line), default=0.0)
    rows = [
        [
            named(scene.value(found.column, name)),
            *(_heat(value, most) for value in line),
            link(
                without(scene.view, found.column, name),
                "leave out",
                said=f"the whole network without {found.column} {name}",
                kind="go",
            ),
        ]
        for name, line in zip(found.names, lines, strict=True)
    ]
    whole = found.values.sum(axis=0) + found.initial + found.residual
    beside = [("initial weights", found.initial), ("no row explains", found.residual)]
    if found.others is not None:
        beside.insert(0, (f"every other {named(found.column)}", found.others))
        whole = whole + found.others
    beside.append(("together" if not scene.view.filters else "what is left", whole))
    rows += [[name, *(_heat(value, 0.0) for value in cells(values)), ""] for name, values in beside]
    caption = f"added to unit {named(scene.unit(found.unit, ''))}, per {named(found.column)}"
    return table([named(found.column), *names, ""], rows, caption=caption, kind="parts layers")


def largest(sizes: Sequence[float] | npt.NDArray[np.float64]) -> list[int]:
    """The layers that are read at a glance, in order: of many those with the largest sizes."""
    return sorted(sorted(range(len(sizes)), key=lambda at: -sizes[at])[:LAYERS_SHOWN])


def _heat(value: float, largest: float) -> str:
    share = min(1.0, abs(value) / largest) if largest > 0 else 0.0
    side = "minus" if value < 0 else "plus"
    return f'<span class="heat {side}" style="--s:{share:.2f}">{number(value)}</span>'
