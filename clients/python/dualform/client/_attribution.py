"""What `attribute` and `scores` answer: groups, sums by layer, and what is there beside rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.client._answers import best_groups, check_counts, coverage_of
from dualform.client._arrays import array_of
from dualform.client._results import Coverage, pandas_of, plain
from dualform.client.errors import FailedPreconditionError, bad_answer
from dualform.questions import AttributeQuestion
from dualform.v1 import attribution_pb2 as pb

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Beside:
    """What the layers' outputs are made of, along each target's gradient g: float64 [n, layers].

    `initial + rows + residual` is g times the layer's output, `outputs`, where no filter is given.

    Attributes:
        layers: The layers' names, in order.
        targets: float64 [n], each input's number.
        initial: What the initial weights, biases and momentum buffers left behind.
        rows: What all rows that took part add up to.
        residual: What neither explains; NaN where the index does not know the trained weights.
        outputs: The trained layers' outputs along g; likewise.
        unrecorded: float64 [n], the target's gradient times the trained parameters that are in
            none of the layers: what no row can be asked about.
        coverage: How many rows took part, by layer.
        index_version: Which version of the index answered; the same for the same files.
    """

    layers: tuple[str, ...]
    targets: npt.NDArray[np.float64]
    initial: npt.NDArray[np.float64]
    rows: npt.NDArray[np.float64]
    residual: npt.NDArray[np.float64]
    outputs: npt.NDArray[np.float64]
    unrecorded: npt.NDArray[np.float64]
    coverage: Mapping[str, Coverage]
    index_version: str


@dataclass(frozen=True, eq=False)
class AttributionResult(Beside):
    """The k groups per input whose rows, of all layers together, did most to its target.

    Attributes:
        groups: [n, k], as in TopGroupsResult.
        scores: float64 [n, k], what their rows add up to; NaN where fewer groups have rows.
        counts: int64 [n, k], how many rows that is, of all layers; 0 where fewer groups have rows.
        by_layer: float64 [n, k, layers], the scores by layer.
    """

    groups: npt.NDArray[Any]
    scores: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    by_layer: npt.NDArray[np.float64]

    def to_pandas(self) -> pd.DataFrame:
        """One line per group: query (the input), rank (from 0), group, score, count, and the score
        of each layer under its name; without padding.

        Raises:
            FailedPreconditionError: pandas is not installed.
        """
        pandas = pandas_of()
        found = self.counts > 0
        places = np.nonzero(found)
        table: dict[str, Any] = {
            "query": places[0],
            "rank": places[1],
            "group": plain(self.groups[found]),
            "score": self.scores[found],
            "count": self.counts[found],
        }
        for number, name in enumerate(self.layers):
            key = f"{name}_layer" if name in table else name
            table[key] = self.by_layer[found][:, number]
        return pandas.DataFrame(table)


_BY_INPUT = ("targets", "initial", "rows", "residual", "outputs", "unrecorded")
Part = TypeVar("Part", bound=Beside)


def attribution_of(
    message: pb.AttributeResponse,
    question: AttributeQuestion,
    targets: npt.NDArray[np.float64],
    unrecorded: npt.NDArray[np.float64],
) -> AttributionResult:
    """To an AttributeQuestion with k, with what the model said."""
    assert question.k is not None
    shape = (question.inputs, question.k)
    groups, scores, counts = best_groups(message, shape, question.order)
    by_layer = array_of(
        message.by_layer, "scores by layer", np.float64, (*shape, len(question.layers))
    )
    off = np.abs(by_layer.sum(axis=2) - scores) > 1e-9 * np.abs(by_layer).sum(axis=2)
    if off.any() or (np.isnan(by_layer).any(axis=2) & (counts > 0)).any():
        raise bad_answer("scores by layer that do not add up to the scores")
    return AttributionResult(
        **beside_of(message, question, targets, unrecorded, counts),
        groups=groups,
        scores=scores,
        counts=counts,
        by_layer=by_layer,
    )


def beside_of(
    message: pb.AttributeResponse,
    question: AttributeQuestion,
    targets: npt.NDArray[np.float64],
    unrecorded: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
) -> dict[str, Any]:
    """The fields of `Beside`: from the wire, with what the model said.

    Args:
        message: The answer.
        question: To this question.
        targets, unrecorded: The model's.
        counts: The answer's, [n, k] or [groups].
    """
    layers = tuple(layer.layer for layer in question.layers)
    coverage = [coverage_of(each) for each in message.coverage]
    if len(coverage) != len(layers):
        raise bad_answer(f"the coverage of {len(coverage)} layers, not of {len(layers)}")
    for of_input in np.atleast_2d(counts):
        check_counts(of_input.tolist(), sum(each.rows for each in coverage))
    parts = {
        name: array_of(getattr(message, name), name, np.float64, (question.inputs, len(layers)))
        for name in ("initial", "rows", "residual", "outputs")
    }
    return {
        "layers": layers,
        "targets": targets,
        "unrecorded": unrecorded,
        "coverage": dict(zip(layers, coverage, strict=True)),
        "index_version": message.index_version,
        **parts,
    }


def join_attributions(parts: Sequence[AttributionResult]) -> AttributionResult:
    """The answer to all inputs from the answers to some of them, in order."""
    names = ("groups", "scores", "counts", "by_layer")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return join_beside(parts, **joined)


def join_beside(parts: Sequence[Part], **others: Any) -> Part:
    """Likewise of any parts, with what their own fields become."""
    check_same_index(parts)
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_INPUT}
    return replace(parts[0], **{**joined, **others})


def check_same_index(parts: Sequence[Beside]) -> None:
    """Refuse parts of an answer that come from different memories."""
    if any(
        (part.index_version, part.coverage) != (parts[0].index_version, parts[0].coverage)
        for part in parts
    ):
        raise FailedPreconditionError(
            "the index changed while this batch was answered in parts; ask again",
            reason="INDEX_CHANGED",
        )
