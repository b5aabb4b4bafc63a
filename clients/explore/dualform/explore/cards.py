"""The training examples behind an output, as cards."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dualform.explore.answers import Behind, Refused
from dualform.explore.markup import link, named, number, payload, refused
from dualform.explore.payloads import NOT_KEPT
from dualform.explore.scene import Scene
from dualform.explore.view import ExampleId, asked_about, without


def behind(found: Sequence[Behind] | Refused, title: str, scene: Scene, kind: str) -> str:
    """The training examples behind an output."""
    if isinstance(found, Refused):
        return f"<h2>{title}</h2>{refused(found, scene.view)}"
    if not found:
        return f"<h2>{title}</h2><p>No rows pass the filters.</p>"
    kept = any(each.payload != NOT_KEPT for each in found)
    items = "".join(f"<li>{_card(each, scene, kept)}</li>" for each in found)
    return f'<h2>{title}</h2><ol class="cards {kind}">{items}</ol>'


def _card(each: Behind, scene: Scene, kept: bool) -> str:
    place, step = each.columns.get("position"), each.columns.get("step")
    said = [f"{each.count:,} rows" if each.row is None else f"row {each.row:,}, step {step}"]
    numbers = (
        f'<dl class="numbers"><dt>weight</dt><dd>{number(each.weight)}</dd>'
        f"<dt>contribution</dt><dd>{number(each.contribution)}</dd></dl>"
    )
    seen, at = (None, None) if each.row is None else (step, place)
    shown = ""
    if kept:
        shown = payload(each.payload, each.example, scene.view.index, scene.version, each.text)
    told = called(each.example, each.columns, said, scene)
    return shown + told + numbers + links(each.example, scene, seen, at)


def called(
    example: ExampleId | None, columns: dict[str, object], more: Sequence[str], scene: Scene
) -> str:
    """What a training example is called, and what its columns say."""
    name = "no example id" if example is None else f"example {named(example)}"
    said = [*telling(columns, scene), *more]
    return f"<p><b>{name}</b><br>{', '.join(said)}</p>"


def links(
    example: ExampleId | None, scene: Scene, seen: int | None = None, place: int | None = None
) -> str:
    """What can be asked of a training example next."""
    if example is None:
        return ""
    reverse = asked_about(scene.view, example, seen, place)
    left = without(scene.view, "example", example)
    return (
        '<div class="links">'
        + link(reverse, "ask about it", said=f"what else does {example} act on", kind="go")
        + link(left, "leave it out", said=f"the output without example {example}", kind="go")
        + "</div>"
    )


def telling(columns: dict[str, object], scene: Scene) -> list[str]:
    """Metadata that says something to people, as HTML."""
    hidden = ("example", "step", "slot", "position")
    said = []
    for name, value in columns.items():
        if name not in hidden and value is not None:
            told = number(value) if isinstance(value, float) else named(scene.value(name, value))
            said.append(f"{escape(name)} {told}")
    return said
