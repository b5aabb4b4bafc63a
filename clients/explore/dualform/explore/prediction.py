"""The whole network's output and the examples behind it, as HTML."""

from __future__ import annotations

from dualform.explore.answers import Attributed, AttributedExample, LogitParts, Network, Refused
from dualform.explore.cards import called, links
from dualform.explore.markup import bar, named, number, payload, refused
from dualform.explore.scene import Scene
from dualform.explore.tables import largest, logit_parts, output

_TITLE = "Examples behind it, over all layers"
_BY_CLASS = "By class, over all layers"


def network(found: Network | None, scene: Scene) -> str:
    """What the user's model says, and why; where there is none, how to give it.

    Args:
        found: None where no model is given, or this example's input is not known.
        scene: Of the page.
    """
    if found is None:
        return f'<section class="wide"><h2>{_TITLE}</h2><p class="said">{_how(scene)}</p></section>'
    if isinstance(found.output, Refused) and found.output == found.attributed:
        why = refused(found.output, scene.view)
        return f'<section class="wide"><h2>The whole network</h2>{why}</section>'
    parts = [output(found.output, "The whole network", scene)]
    if found.attributed is not None:
        parts.append(_attributed(found.attributed, scene))
    if found.classes is not None and found.classes != found.attributed:  # one refusal says both
        parts.append(_classes(found.classes, scene))
    return "".join(f'<section class="wide">{each}</section>' for each in parts)


def _how(scene: Scene) -> str:
    function = "<code>--model FILE.py:FUNCTION</code>"
    if not scene.model:
        return (
            f"The page asks layer by layer until it has the trained model: with {function}, a "
            "function that returns <code>(model, prepare)</code> or <code>(model, inputs)</code>, "
            "it shows the examples behind the network's prediction, each layer's share, and what "
            "the network would say without the rows that are filtered out."
        )
    return (
        "What the model takes is not known of this: of an example of which a picture or text was "
        "kept, <code>prepare</code> makes it; numbers for one layer are no input."
    )


def _attributed(found: Attributed | Refused, scene: Scene) -> str:
    if isinstance(found, Refused):
        return f"<h2>{_TITLE}</h2>{refused(found, scene.view)}"
    unit = named(scene.unit(found.unit, ""))
    target = f"the margin of unit {unit}" if found.margin else f"unit {unit}"
    told = f"What raised {target} ({number(found.value)}) most"
    if found.margin:
        told += "; the margin is its logit less the logsumexp of the others"
    if not found.found:
        return f"<h2>{_TITLE}</h2><p>No rows pass the filters.</p>"
    shown = largest(
        [sum(abs(each.by_layer[at]) for each in found.found) for at in range(len(found.layers))]
    )
    items = "".join(f"<li>{_card(each, found, shown, scene)}</li>" for each in found.found)
    beside = (
        f"Of the layers' outputs along its gradient: initial weights {number(found.initial)}, all "
        f"rows {number(found.rows)}, no row explains {number(found.residual)}. Parameters in no "
        f"layer: {number(found.unrecorded)}."
    )
    step = "" if scene.view.step is None else " It is the trained network's, whatever the slider."
    return (
        f'<h2>{_TITLE}</h2><p class="said">{told}.{step}</p><ol class="cards layers">{items}</ol>'
        f'<p class="said">{beside}</p>'
    )


def _classes(found: LogitParts | Refused, scene: Scene) -> str:
    if isinstance(found, Refused):
        return f"<h2>{_BY_CLASS}</h2>{refused(found, scene.view)}"
    left = " The filters leave out rows, and so parts of it." if scene.view.filters else ""
    told = (
        f"The logit is {number(found.value)}. A layer's column adds up to what the layer gives "
        "times the logit's gradient there: of the layer that gives the logits the logit itself, of "
        "those before it what they did to it, to first order. All layers is the sum of these, and "
        f"not the logit.{left} Parameters in no layer: {number(found.unrecorded)}."
    )
    return f'<h2>{_BY_CLASS}</h2>{logit_parts(found, scene)}<p class="said">{told}</p>'


def _card(each: AttributedExample, found: Attributed, shown: list[int], scene: Scene) -> str:
    most = max((abs(share) for other in found.found for share in other.by_layer), default=0.0)
    lines = [(f"layer {named(found.layers[at])}", each.by_layer[at]) for at in shown]
    others = len(found.layers) - len(shown)
    if others:
        rest = sum(each.by_layer) - sum(each.by_layer[at] for at in shown)
        lines.append((f"{others} other layers", rest))
    shares = "".join(
        f"<dt>{name}</dt><dd>{number(share)}</dd><dd>{bar(share, most)}</dd>"
        for name, share in lines
    )
    numbers = (
        f'<dl class="numbers shares"><dt>all layers</dt><dd><b>{number(each.score)}</b></dd>'
        f"<dd></dd>{shares}</dl>"
    )
    picture = payload(each.payload, each.example, scene.view.index, scene.version)
    told = called(each.example, each.columns, [f"{each.count:,} rows"], scene)
    return picture + told + numbers + links(each.example, scene)
