"""What the page shows about one query: plain objects, made of the SDK's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, Union

import numpy as np
import numpy.typing as npt

from dualform.client import LayerInfo
from dualform.explore.payloads import Payload
from dualform.explore.tokens import Marked
from dualform.explore.view import ExampleId


@dataclass(frozen=True)
class Refused:
    """A part that was not answered, and why; the others are there.

    Attributes:
        why: In words.
        residual: It would be with more left unexplained.
    """

    why: str
    residual: bool = False


T = TypeVar("T")
Part: TypeAlias = Union[T, Refused]  # noqa: UP007 (an alias with a parameter)


@dataclass(frozen=True, eq=False)
class Query:
    """What is asked about.

    Attributes:
        vector: float32 [1, d_in], for the layer that is looked at.
        last: The same for the layer whose output is the prediction; None where it is not known.
        said: Where it comes from, in words.
        example: Its id, of a training example.
        columns: Metadata of the training row; empty for an upload.
        steps: In which steps the training example was there.
        places: Its positions in that step, of a sequence.
        payload: To look at.
        text: Its tokens, of a text.
        inputs: What the user's model takes, of this example; None where it is not known, Refused
            where it can't be made.
        made: What makes that input, in Python.
        token: Which of its tokens is meant; None for the last, or where it has none.
    """

    vector: npt.NDArray[np.float32]
    last: npt.NDArray[np.float32] | None
    said: str
    example: ExampleId | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    payload: Payload | None = None
    text: Marked | None = None
    inputs: Any = None
    made: str = ""
    token: int | None = None


@dataclass(frozen=True)
class Output:
    """A layer's output, unit by unit, the largest first.

    Attributes:
        layer: Whose; "" for the whole network.
        whole: Of all rows, by unit: [(unit, value)], the largest values.
        left: Of the rows that pass the filters, for the same units; None without filters.
        winner: The unit with the largest value of all rows, and of the filtered ones.
        units: How many there are in all.
        residual: |what no row explains| / |output|; None where it is not known.
        rows, total: How many rows took part, of how many; 0 of the whole network.
        beside: What `left` is of.
    """

    layer: str
    whole: tuple[tuple[int, float], ...]
    left: tuple[float, ...] | None
    winner: tuple[int, int]
    units: int
    residual: float | None
    rows: int
    total: int
    beside: str = "with the filters"


@dataclass(frozen=True)
class Behind:
    """A training example, or one of its rows, behind an output.

    Attributes:
        example: Its id; None where rows have none.
        row: The row's id; None where an example's rows are added up.
        weight: Attention weight, or their sum; None where it is not known.
        contribution: To the unit; likewise.
        count: How many rows were added up.
        columns: Metadata: of the row, or of the example's first one.
        payload: To look at.
        text: Its tokens with their weights, of a text.
    """

    example: ExampleId | None
    row: int | None
    weight: float | None
    contribution: float | None
    count: int
    columns: dict[str, Any]
    payload: Payload
    text: Marked | None = None


@dataclass(frozen=True)
class Group:
    """A class of training rows: what its weights, and contributions to the unit, add up to."""

    name: Any
    weight: float | None
    contribution: float | None
    rows: int


@dataclass(frozen=True)
class Groups:
    """The classes, with what is beside them.

    Attributes:
        column: Whose values they are.
        groups: In the column's order; of very many those with the largest sums.
        more: There are more than these.
        initial: What the initial weights left in the unit; None where it is not known.
        residual: What no row explains of it; likewise.
        output: The unit's value: initial, all classes and residual add up to it.
        others: What all classes that are not among `groups` added; None where these are all.
    """

    column: str
    groups: tuple[Group, ...]
    more: bool
    initial: float | None = None
    residual: float | None = None
    output: float | None = None
    others: float | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """What each class's rows added to each output unit.

    Attributes:
        column: Whose values the classes are.
        names: Of the classes.
        units: Which units.
        values: float32 [classes, units].
        initial: float32 [units].
    """

    column: str
    names: list[Any]
    units: list[int]
    values: npt.NDArray[np.float32]
    initial: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Answer:
    """All that is shown about a query.

    Attributes:
        query: What was asked about.
        layer: The layer that is looked at.
        unit: The output unit that contributions go to; None where the layer has no output.
        columns: Columns that classes can be made of.
        column: The one that they are made of; "" where there is none.
        output: The layer's output.
        prediction: The last layer's, where that is another one and its query is known.
        by_weight: The training examples (or rows) with the largest weights.
        by_contribution: Those that raised the unit most.
        groups: By class; None where there are no classes.
        parts: Of every unit; None where there are too many to read.
    """

    query: Query
    layer: LayerInfo
    unit: int | None
    columns: list[str]
    column: str
    output: Part[Output]
    prediction: Part[Output] | None
    by_weight: Part[tuple[Behind, ...]]
    by_contribution: Part[tuple[Behind, ...]]
    groups: Part[Groups] | None
    parts: Part[Parts] | None


@dataclass(frozen=True)
class AttributedExample:
    """A training example behind a prediction.

    Attributes:
        example: Its id.
        score: What its rows added to the target, over all layers.
        by_layer: The same by layer.
        count: How many rows that is.
        columns: Metadata of its first row.
        payload: To look at.
    """

    example: ExampleId
    score: float
    by_layer: tuple[float, ...]
    count: int
    columns: dict[str, Any]
    payload: Payload


@dataclass(frozen=True)
class Attributed:
    """A prediction, attributed to training examples over all layers.

    Attributes:
        unit: Of the prediction.
        margin: Its logit less the logsumexp of the others is attributed, not the logit.
        value: That number.
        token: Whose logits they are, of a model of sequences.
        layers: Their names.
        found: Those that raised it most.
        initial, rows, residual: What the layers' outputs along its gradient are made of, added up.
        unrecorded: Its gradient times the parameters that are in none of the layers.
    """

    unit: int
    margin: bool
    value: float
    token: int | None
    layers: tuple[str, ...]
    found: tuple[AttributedExample, ...]
    initial: float
    rows: float
    residual: float
    unrecorded: float


@dataclass(frozen=True, eq=False)
class LogitParts:
    """A logit in parts: by class, and by layer.

    A layer's column is its output times the logit's gradient there, so that the column of the layer
    that gives the logits adds up to the logit; of those before it that is what they did to it, to
    first order.

    Attributes:
        column: Whose values the classes are.
        unit: Whose logit.
        value: The logit.
        layers: Their names.
        names: Of the classes, in the column's order; of very many those with the largest sums.
        values: float64 [classes, layers], what their rows added.
        others: float64 [layers], what the rows of all other classes did; None where there are none.
        initial: float64 [layers], what the initial weights left.
        residual: float64 [layers], what neither explains.
        unrecorded: The gradient times the parameters that are in none of the layers.
    """

    column: str
    unit: int
    value: float
    layers: tuple[str, ...]
    names: list[Any]
    values: npt.NDArray[np.float64]
    others: npt.NDArray[np.float64] | None
    initial: npt.NDArray[np.float64]
    residual: npt.NDArray[np.float64]
    unrecorded: float


@dataclass(frozen=True)
class Network:
    """What the user's model says: its output, the examples behind it, and the classes.

    Attributes:
        output: Its logits.
        attributed: The examples; None while they are not known.
        classes: The logit by class; None where training named no classes, or while it is not known.
    """

    output: Part[Output]
    attributed: Part[Attributed] | None
    classes: Part[LogitParts] | None = None
