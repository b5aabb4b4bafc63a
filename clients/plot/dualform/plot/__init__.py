"""The paper's figures, from any index: answers of the SDK, drawn.

Each function asks a client and returns a matplotlib Figure; `save` writes it. They need the extra
`[plot]`; passages need nothing but Python. What is behind the names:

    attention        the largest weights of each class, in descending order, a panel per layer
    sums             total weight per class
    matches          the query's image, and the training images with the largest weight
    profile          total weight over training steps
    attribute        what each example did to a prediction, by layer
    contributions    what each class's rows added to each output unit
    Passage          a place in a text; `passages_text` and `passages_html` show a list of them
    save             a figure as PNG, SVG or PDF
"""

from dualform.plot._attention import attention
from dualform.plot._attribute import attribute
from dualform.plot._contributions import contributions
from dualform.plot._files import FORMATS, format_of, save
from dualform.plot._matches import matches
from dualform.plot._passages import Passage, passages_html, passages_text, read_passages
from dualform.plot._profile import profile
from dualform.plot._sums import sums

__all__ = [
    "FORMATS",
    "Passage",
    "attention",
    "attribute",
    "contributions",
    "format_of",
    "matches",
    "passages_html",
    "passages_text",
    "profile",
    "read_passages",
    "save",
    "sums",
]
