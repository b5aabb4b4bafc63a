"""The parts of the page, as HTML: each a function of what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from dualform.client import IndexInfo, LayerInfo
from dualform.explore.answers import Answer, Behind, Groups, Output, Parts, Query, Refused
from dualform.explore.browsing import PER_PAGE, Offered
from dualform.explore.markup import bar, left_out, link, named, number, payload, refused, table
from dualform.explore.view import View, asked_about, without


def facts(info: IndexInfo, layer: LayerInfo) -> str:
    """What the index and the layer are: sizes, columns, exactness."""
    columns = ", ".join(f"{escape(name)} ({kind})" for name, kind in layer.columns.items())
    lines = [
        ("Trained by", f"{escape(info.optimizer)}, {info.steps:,} steps"),
        ("Layer", f"{escape(layer.kind)}, {layer.d_in:,} to {layer.d_out:,}"),
        ("Rows", f"{layer.rows:,}"),
        ("Columns", columns),
        ("Exactness", escape(layer.exactness)),
    ]
    if layer.dropped:
        left = ", ".join(f"{count:,} by {escape(why)}" for why, count in layer.dropped.items())
        lines.append(("Not recorded", left))
    cells = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
    return f'<dl class="facts">{cells}</dl>'


def picker(found: Sequence[Offered], view: View, version: str) -> str:
    """The examples to pick from."""
    if not found:
        why = "no examples behind this id" if view.after is not None else "no examples by id here"
        return f"<p>{why}</p>" + _first_page(view)
    items = []
    for each in found:
        label = "" if each.label is None else f", label {named(each.label)}"
        inner = payload(each.payload, each.example, view.index, version)
        inner += f"<span>{named(each.example)}{label}</span>"
        chosen = asked_about(view, each.example, None, None)
        items.append(
            "<li>"
            + link(
                chosen,
                inner,
                said=f"ask about example {each.example}",
                kind="offer",
                current=each.example == view.example,
            )
            + "</li>"
        )
    more = ""
    if len(found) == PER_PAGE:
        behind = replace(view, after=found[-1].example)
        more = link(behind, "more examples", kind="button")
    return f'<ul class="offers">{"".join(items)}</ul>{_first_page(view)}{more}'


def _first_page(view: View) -> str:
    return (
        "" if view.after is None else link(replace(view, after=None), "first ones", kind="button")
    )


def query(what: Query, view: View, version: str) -> str:
    """What is asked about."""
    title = "The query" if what.example is None else f"Example {named(what.example)}"
    shown = ""
    if what.text is not None and what.places:
        shown = f'<p class="text">{_places(what, view)}</p>'
    elif what.payload is not None:
        shown = payload(what.payload, what.example, view.index, version, what.text)
    said = [f"{escape(name)} {named(value)}" for name, value in _telling(what.columns)]
    line = f'<p class="said">{", ".join(said)}</p>' if said else ""
    return f"<h2>{title}</h2>{shown}{line}<p class='said'>{escape(what.said)}</p>"


def _places(what: Query, view: View) -> str:
    """A text whose tokens lead to the same question about their own place."""
    assert what.text is not None
    there, here = set(what.places), what.columns.get("position")
    pieces = []
    for each in what.text.tokens:
        if each.place not in there:
            pieces.append(escape(each.text))
            continue
        asked = replace(view, place=each.place, unit=None)
        said = f"ask about position {each.place}"
        pieces.append(link(asked, escape(each.text), said=said, current=each.place == here))
    return left_out(what.text.before) + "".join(pieces) + left_out(what.text.after)


def output(what: Output | Refused, title: str, view: View) -> str:
    """A layer's output, beside what is left of it without the rows that are filtered out."""
    if isinstance(what, Refused):
        return f"<h2>{title}</h2>{refused(what.why)}"
    first, left = what.winner
    line = f"unit <b>{first}</b> is largest"
    if what.left is not None:
        line += f"; with the filters <b>{left}</b>" + (" still" if left == first else "")
    values = [value for _, value in what.whole] + list(what.left or ())
    largest = max((abs(value) for value in values), default=0.0)
    rows = []
    for place, (unit, value) in enumerate(what.whole):
        cells = [_unit(unit, view, what.layer), number(value), bar(value, largest)]
        if what.left is not None:
            cells += [number(what.left[place]), bar(what.left[place], largest)]
        rows.append(cells)
    head = ["unit", "all rows", ""] + (["filtered", ""] if what.left is not None else [])
    shown = f"{len(rows)} of {what.units:,} units" if len(rows) < what.units else "all units"
    under = f"{what.rows:,} of {what.total:,} rows take part; {shown}"
    if what.residual is not None:
        under += f"; no row explains {number(what.residual)} of the output"
    return (
        f'<h2>{title}</h2><p class="winner" role="status">{line}</p>'
        + table(head, rows, caption=f"output of layer {escape(what.layer)}", kind="output")
        + f'<p class="said">{under}</p>'
    )


def _unit(unit: int, view: View, layer: str) -> str:
    """A unit that contributions can go to, of the layer that is looked at."""
    if layer != view.layer:
        return str(unit)
    said = f"contributions to unit {unit}"
    return link(replace(view, unit=unit), str(unit), said=said, current=unit == view.unit)


def behind(
    found: Sequence[Behind] | Refused, title: str, view: View, version: str, kind: str
) -> str:
    """The training examples behind an output."""
    if isinstance(found, Refused):
        return f"<h2>{title}</h2>{refused(found.why)}"
    if not found:
        return f"<h2>{title}</h2><p>No rows pass the filters.</p>"
    items = "".join(f"<li>{_card(each, view, version, kind)}</li>" for each in found)
    return f'<h2>{title}</h2><ol class="cards {kind}">{items}</ol>'


def _card(each: Behind, view: View, version: str, kind: str) -> str:
    name = "no example id" if each.example is None else f"example {named(each.example)}"
    place, step = each.columns.get("position"), each.columns.get("step")
    said = [f"{escape(column)} {named(value)}" for column, value in _telling(each.columns)]
    if each.row is None:
        said.append(f"{each.count:,} rows")
    else:
        said.append(f"row {each.row:,}, step {step}")
    numbers = (
        f'<dl class="numbers"><dt>weight</dt><dd>{number(each.weight)}</dd>'
        f"<dt>contribution</dt><dd>{number(each.contribution)}</dd></dl>"
    )
    links = ""
    if each.example is not None:
        seen, at = (None, None) if each.row is None else (step, place)
        reverse = asked_about(view, each.example, seen, at)
        links = (
            '<div class="links">'
            + link(reverse, "ask about it", said=f"what else does {each.example} act on", kind="go")
            + link(
                without(view, "example", each.example),
                "leave it out",
                said=f"the output without example {each.example}",
                kind="go",
            )
            + "</div>"
        )
    shown = payload(each.payload, each.example, view.index, version, each.text)
    return f"{shown}<p><b>{name}</b><br>{', '.join(said)}</p>{numbers}{links}"


def groups(found: Groups | Refused | None, unit: int | None, view: View) -> str:
    """Sums per class, and what they and the rest add up to."""
    title = "<h2>By class</h2>"
    if found is None:
        return title + "<p>Training named no classes: recorder.annotate(label=…) does.</p>"
    if isinstance(found, Refused):
        return title + refused(found.why)
    heaviest = max((abs(each.weight or 0.0) for each in found.groups), default=0.0)
    most = max((abs(each.contribution or 0.0) for each in found.groups), default=0.0)
    rows = [
        [
            named(each.name),
            number(each.weight),
            bar(each.weight, heaviest),
            number(each.contribution),
            bar(each.contribution, most),
            f"{each.rows:,}",
            link(
                without(view, found.column, each.name),
                "leave out",
                said=f"the output without {found.column} {each.name}",
                kind="go",
            ),
        ]
        for each in found.groups
    ]
    for name, value in (
        ("initial weights", found.initial),
        ("no row explains", found.residual),
        (f"unit {unit}", found.output),
    ):
        if value is not None:
            rows.append([name, "", "", number(value), bar(value, most), "", ""])
    head = [named(found.column), "sum of weights", "", f"added to unit {unit}", "", "rows", ""]
    more = "; the largest, there are more" if found.more else ""
    return title + table(head, rows, caption=f"sums per {named(found.column)}{more}", kind="groups")


def parts(found: Parts | Refused | None, view: View) -> str:
    """What each class added to each unit: a table as strong as its numbers."""
    if found is None:
        return ""
    title = "<h2>What each class added to each unit</h2>"
    if isinstance(found, Refused):
        return title + refused(found.why)
    largest = float(abs(found.values).max()) if found.values.size else 0.0

    def cell(value: float) -> str:
        share = min(1.0, abs(value) / largest) if largest > 0 else 0.0
        side = "minus" if value < 0 else "plus"
        return f'<span class="heat {side}" style="--s:{share:.2f}">{number(value)}</span>'

    rows = [
        [named(name), *(cell(float(value)) for value in line)]
        for name, line in zip(found.names, found.values, strict=True)
    ]
    rows.append(["initial", *(number(float(value)) for value in found.initial)])
    head = [named(found.column), *(_unit(unit, view, view.layer) for unit in found.units)]
    return title + table(head, rows, caption="columns are output units", kind="parts")


def whole(answer: Answer, view: View, version: str) -> str:
    """All about a query."""
    last = answer.prediction is None
    first = output(answer.output, "Prediction" if last else f"Output of layer {view.layer}", view)
    if answer.prediction is not None:
        first = output(answer.prediction, "Prediction", view) + first
    unit = "" if answer.unit is None else f" to unit {answer.unit}"
    return (
        f'<section class="query">{query(answer.query, view, version)}</section>'
        f'<section class="prediction">{first}</section>'
        '<section class="both">'
        f"<div>{behind(answer.by_weight, 'Largest weights', view, version, 'weight')}</div>"
        f"<div>{behind(answer.by_contribution, f'Added most{unit}', view, version, 'contribution')}"
        "</div></section>"
        f'<section class="wide">{groups(answer.groups, answer.unit, view)}</section>'
        f'<section class="wide">{parts(answer.parts, view)}</section>'
    )


def _telling(columns: dict[str, object]) -> list[tuple[str, object]]:
    """Metadata that says something to people."""
    hidden = ("example", "step", "slot", "position")
    return [
        (name, value) for name, value in columns.items() if name not in hidden and value is not None
    ]
