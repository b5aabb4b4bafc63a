"""What a question about several layers at once says of each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dualform.questions import checks
from dualform.questions.errors import QuestionError

Matrix: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class AttributedLayer:
    """What one layer saw for each input, and where the input's target points at its output.

    Attributes:
        layer: As in `model.named_modules()`.
        queries: float32 [m, d_in], one for each place of each input, finite.
        direction: float32 [m, d_out], finite: the gradient of the input's target at the layer's
            output in that place.
        inputs: int64 [m], which input each is of, ascending, from 0; None where query i is of
            input i.

    Raises:
        QuestionError: One is not so.
    """

    layer: str
    queries: Matrix
    direction: Matrix
    inputs: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        checks.name_of_layer(self.layer)
        try:
            queries = checks.queries(self.queries)
            direction = checks.queries(self.direction, "direction")
            if len(direction) != len(queries):
                raise QuestionError(
                    f"directions have shape {list(direction.shape)} and queries "
                    f"{list(queries.shape)}; send one direction for each query",
                    field="direction",
                    reason="BAD_DIRECTIONS",
                )
            inputs = None if self.inputs is None else _inputs(self.inputs, len(queries))
        except QuestionError as error:
            raise QuestionError(
                f"layer {self.layer!r}: {error}", field=error.field, reason=error.reason
            ) from None
        for name, value in (("queries", queries), ("direction", direction), ("inputs", inputs)):
            object.__setattr__(self, name, value)

    def part(self, first: int, last: int) -> AttributedLayer:
        """The same of the inputs from first to last alone, which are counted from 0 again.

        Of an input of which it has nothing there is a query of zeros.
        """
        if self.inputs is None:
            which = slice(first, last)
            return AttributedLayer(self.layer, self.queries[which], self.direction[which])
        low, high = np.searchsorted(self.inputs, [first, last])
        if low == high:
            no_query, none = (np.zeros((1, each.shape[1]), np.float32) for each in self.matrices)
            return AttributedLayer(self.layer, no_query, none, np.zeros(1, np.int64))
        queries, direction = (matrix[low:high] for matrix in self.matrices)
        return AttributedLayer(self.layer, queries, direction, self.inputs[low:high] - first)

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """Queries and directions."""
        return self.queries, self.direction


def attributed_layers(value: object) -> tuple[AttributedLayer, ...]:
    """Layers, each once, at least one."""
    layers = tuple(value) if isinstance(value, Iterable) else ()
    if not layers or not all(isinstance(layer, AttributedLayer) for layer in layers):
        raise QuestionError(
            "no layers; name at least one, with queries and directions", field="layers"
        )
    name, count = Counter(layer.layer for layer in layers).most_common(1)[0]
    if count > 1:
        raise QuestionError(
            f"layer {name!r} is there twice; send all its queries in one batch", field="layers"
        )
    return layers


def check_inputs(layers: Sequence[AttributedLayer], inputs: int) -> None:
    """Refuse queries of inputs that are not there."""
    if inputs < 1:
        raise QuestionError(
            f"inputs is {inputs}; it is how many there are, at least 1", field="inputs"
        )
    for layer in layers:
        last = len(layer.queries) - 1 if layer.inputs is None else int(layer.inputs[-1])
        if last >= inputs or (layer.inputs is None and last != inputs - 1):
            raise QuestionError(
                f"layer {layer.layer!r} has queries up to input {last}, and there are {inputs} "
                "inputs, counted from 0; say in the layer's inputs= which query is of which",
                field="inputs",
            )


def _inputs(value: object, count: int) -> npt.NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise QuestionError(
            f"inputs are {array.dtype} {list(array.shape)}; int64 [{count}] is needed, the input "
            "that each query is of",
            field="inputs",
        )
    array = array.astype(np.int64)
    if array[0] < 0 or (np.diff(array) < 0).any():
        raise QuestionError("inputs must ascend, from 0: send them in order", field="inputs")
    return array
