"""The parts of the page, as HTML: each a function of what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from dualform.client import IndexInfo, LayerInfo
from dualform.explore.answers import Answer, Query
from dualform.explore.browsing import PER_PAGE, Offered
from dualform.explore.cards import behind, telling
from dualform.explore.markup import left_out, link, named, passage, payload
from dualform.explore.payloads import NOT_KEPT, Nothing
from dualform.explore.scene import Scene
from dualform.explore.tables import groups, output, parts
from dualform.explore.view import asked_about

_NOTHING_KEPT = (
    '<p class="said">Nothing was kept of them to look at: <code>recorder.add_examples(ids, '
    "payloads)</code> keeps pictures, texts or rows.</p>"
)


def facts(info: IndexInfo, layer: LayerInfo, names: str = "") -> str:
    """What the index and the layer are: sizes, columns, exactness.

    Args:
        info: The index.
        layer: The layer that is looked at.
        names: Why names that were given are not used; "" where they are.
    """
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
    if names:
        lines.append(("Names", escape(names)))
    cells = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
    return f'<dl class="facts">{cells}</dl>'


def picker(found: Sequence[Offered], scene: Scene) -> str:
    """The examples to pick from."""
    view = scene.view
    if not found:
        why = "no examples behind this id" if view.after is not None else "Training named none."
        return f"<p>{why}</p>" + _first_page(scene)
    kept = any(each.payload != NOT_KEPT for each in found)
    items = []
    for each in found:
        label = "" if each.label is None else f", label {named(scene.value('label', each.label))}"
        inner = payload(each.payload, each.example, view.index, scene.version) if kept else ""
        inner += f"<span>{named(each.example)}{label}</span>"
        chosen = asked_about(view, each.example, None, None)
        items.append(
            "<li>"
            + link(
                chosen,
                inner,
                hint=f"ask about example {each.example}",
                kind="offer",
                current=each.example == view.example,
            )
            + "</li>"
        )
    more = ""
    if len(found) == PER_PAGE:
        following = replace(view, after=found[-1].example)
        more = link(following, "more examples", kind="button")
    kind, why = ("offers", "") if kept else ("offers bare", _NOTHING_KEPT)
    return f'<ul class="{kind}">{"".join(items)}</ul>{_first_page(scene)}{more}{why}'


def unasked(layer: LayerInfo) -> str:
    """What stands in the place of an answer while nothing is asked.

    Args:
        layer: That is looked at.
    """
    upload = (
        f"upload a query: a .npy or .csv file, float32 [n, {layer.d_in}], as "
        "<code>capture_queries</code> gives it"
    )
    told = f"Pick an example, or {upload}."
    if "example" not in layer.columns:
        told = (
            f"There are no examples to pick: {upload}. "
            "<code>recorder.annotate(example=ids)</code> says which example a row is of."
        )
    return f'<section class="wide"><p>{told}</p></section>'


def _first_page(scene: Scene) -> str:
    if scene.view.after is None:
        return ""
    return link(replace(scene.view, after=None), "first ones", kind="button")


def title(what: Query) -> str:
    """What the query is called, as text."""
    return "The query" if what.example is None else f"Example {what.example}"


def query(what: Query, scene: Scene) -> str:
    """What is asked about."""
    shown = ""
    if what.text is not None and what.places:
        letters = sum(len(each.text) for each in what.text.tokens)
        shown = passage(_places(what, scene), letters)
    elif what.payload is not None:
        shown = payload(what.payload, what.example, scene.view.index, scene.version, what.text)
    if isinstance(what.payload, Nothing) and what.payload.trouble:
        shown += f'<p class="refused" role="note">{escape(what.payload.trouble)}</p>'
    said = telling(what.columns, scene)
    line = f'<p class="said">{", ".join(said)}</p>' if said else ""
    return f"<h2>{named(title(what))}</h2>{shown}{line}<p class='said'>{escape(what.said)}</p>"


def _places(what: Query, scene: Scene) -> str:
    """A text whose tokens lead to the same question about their own place."""
    assert what.text is not None
    there, here = set(what.places), what.columns.get("position")
    pieces = []
    for each in what.text.tokens:
        if each.place not in there:
            pieces.append(escape(each.text))
            continue
        asked = replace(scene.view, place=each.place, unit=None)
        said = f"ask about position {each.place}"
        pieces.append(link(asked, escape(each.text), said=said, current=each.place == here))
    return left_out(what.text.before) + "".join(pieces) + left_out(what.text.after)


def asked(answer: Answer, scene: Scene) -> str:
    """What is asked about, and the prediction."""
    # Of a key that training recorded, beside a model that runs: its prediction is another thing.
    recorded = answer.query.example is not None and answer.query.inputs is not None
    last = f"Output of layer {named(scene.last)}" if recorded else "Prediction"
    if answer.prediction is None and answer.layer.name == scene.last:
        shown = output(answer.output, last, scene)
    else:
        shown = output(answer.output, f"Output of layer {named(scene.view.layer)}", scene)
    if answer.prediction is not None:
        shown = output(answer.prediction, last, scene) + shown
    return (
        f'<section class="query">{query(answer.query, scene)}</section>'
        f'<section class="prediction">{shown}</section>'
    )


def rows(answer: Answer, scene: Scene) -> str:
    """The training rows behind the layer's output: examples, and classes."""
    unit = answer.unit
    to = "" if unit is None else f" to unit {named(scene.unit(unit, scene.view.layer))}"
    return (
        '<section class="both">'
        f"<div>{behind(answer.by_weight, 'Largest weights', scene, 'weight')}</div>"
        f"<div>{behind(answer.by_contribution, f'Added most{to}', scene, 'contribution')}"
        "</div></section>"
        f'<section class="wide">{groups(answer.groups, unit, scene)}</section>'
        f'<section class="wide">{parts(answer.parts, scene)}</section>'
    )


def whole(answer: Answer, scene: Scene) -> str:
    """All about a query and a layer."""
    return asked(answer, scene) + rows(answer, scene)
