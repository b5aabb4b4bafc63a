"""What the engine answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dualform.engine.memory.layer import Layer
from dualform.engine.plan.plan import Plan


@dataclass(frozen=True)
class Coverage:
    """How many rows an answer covers.

    Attributes:
        rows: Rows that passed the filter (and lie before at_step).
        total: Rows of the layer.
        nonfinite: Of `rows`, those whose key is not finite: never ranked.
        dropped: Rows of the layer that training had and that were not recorded.
        missing: Rows of the layer on machines that are out of reach, where the question allowed
            that: they are not in the answer, whether they pass the filter or not.
    """

    rows: int
    total: int
    nonfinite: int
    dropped: int
    missing: int = 0

    @classmethod
    def of(cls, layer: Layer, selected: np.ndarray) -> Coverage:
        """Of an answer about the selected rows of a layer, bool [total]."""
        if selected is layer.space.everything:
            return cls(layer.rows, layer.rows, layer.nonfinite, layer.dropped)
        rows = int(np.count_nonzero(selected))
        nonfinite = rows - int(np.count_nonzero(selected & layer.finite))
        return cls(rows, layer.space.total, nonfinite, layer.dropped)


@dataclass(frozen=True)
class TopK:
    """The best rows, by (score in the order asked for, row id ascending).

    Attributes:
        rows: int64 [n, k] or [n, groups, k]; row ids, -1 where fewer rows match.
        scores: float32, the same shape; NaN where fewer rows match.
        groups: [groups], ascending, null last; None without group_by.
        columns: Every metadata column of the rows, flattened row-major, null where padded.
        counts: int64, the shape of rows: how many rows that took part share the row's value (in
            its group); 0 where padded. None without distinct.
        coverage: Rows taken into account.
        plan: How the answer was found.
    """

    rows: np.ndarray
    scores: np.ndarray
    groups: pa.Array | None
    columns: Mapping[str, pa.Array]
    coverage: Coverage
    plan: Plan
    counts: np.ndarray | None = None


@dataclass(frozen=True)
class TopGroups:
    """The best groups, by (sum in the order asked for, the group's value ascending, null last).

    Attributes:
        groups: [n * k] row-major, the groups' values; null for the rows without one, and where
            fewer groups have rows.
        scores: float64 [n, k], what their rows add up to; NaN where fewer groups have rows.
        counts: int64 [n, k], the rows of them that took part; 0 where fewer groups have rows.
        coverage: Rows taken into account.
        plan: How the answer was found.
    """

    groups: pa.Array
    scores: np.ndarray
    counts: np.ndarray
    coverage: Coverage
    plan: Plan


@dataclass(frozen=True)
class Attribution:
    """The best groups over several layers, or the sums of all, in the order of the layers.

    Attributes:
        groups: [n * k] row-major, as in TopGroups; of all groups [groups].
        scores: float64 [n, k], what the groups' rows of all layers add up to; NaN where fewer
            groups have rows. Of all groups [n, groups].
        counts: int64 [n, k], those rows; 0 where fewer groups have rows. Of all groups [groups].
        by_layer: float64 [n, k, layers], the scores by layer; None of all groups.
        initial: float64 [n, layers], what initial weights, biases and momentum buffers left behind
            along the target's gradient.
        rows: Likewise, what all rows that took part add up to.
        residual: What neither explains of the layers' own outputs; NaN where nobody knows.
        outputs: The layers' own outputs along the gradient; likewise.
        coverage: Rows taken into account, by layer.
    """

    groups: pa.Array
    scores: np.ndarray
    counts: np.ndarray
    by_layer: np.ndarray | None
    initial: np.ndarray
    rows: np.ndarray
    residual: np.ndarray
    outputs: np.ndarray
    coverage: Sequence[Coverage]


@dataclass(frozen=True)
class Sums:
    """Total attention weight per group.

    Attributes:
        groups: [groups], ascending, null last.
        values: float64 [n, groups].
        counts: int64 [groups], rows per group.
        coverage: Rows taken into account.
        plan: How the answer was found.
    """

    groups: pa.Array
    values: np.ndarray
    counts: np.ndarray
    coverage: Coverage
    plan: Plan


@dataclass(frozen=True)
class SelfInfluence:
    """What groups' rows did to their own part of the loss.

    Attributes:
        groups: [m], ascending.
        scores: float64 [m].
        counts: int64 [m], the rows that take part.
        total: How many groups there are in all.
        coverage: Rows taken into account, of all groups.
    """

    groups: pa.Array
    scores: np.ndarray
    counts: np.ndarray
    total: int
    coverage: Coverage


@dataclass(frozen=True)
class WeightsChunk:
    """Attention weights of consecutive rows.

    Attributes:
        start: The first row's id.
        weights: float32 [n, m], of rows start to start + m - 1.
    """

    start: int
    weights: np.ndarray


@dataclass(frozen=True)
class DualOutput:
    """A layer's output in dual form.

    Attributes:
        values: float32 [n, d_out] with the initial part, or the groups' parts [n, groups, d_out].
        initial: float32 [n, d_out], what initial weights, biases and momentum buffers left behind.
        trained: float32 [n, d_out], the output by the stored trained weights; None with at_step, or
            where training did not end in an orderly way.
        groups: [groups], ascending, null last; None without group_by.
        counts: int64 [groups]; None without group_by.
        coverage: Rows taken into account.
        plan: How the answer was found.
        residual: float32 [n, d_out], what neither `initial` nor any row explains of the layer's
            own output. At a step it is known where weights were stored before it and no filter is
            given (of SGD's whole output it is in `values`, and None). None where nobody knows.
    """

    values: np.ndarray
    initial: np.ndarray
    trained: np.ndarray | None
    groups: pa.Array | None
    counts: np.ndarray | None
    coverage: Coverage
    plan: Plan
    residual: np.ndarray | None = None


@dataclass(frozen=True)
class Explanation:
    """Several answers about one layer; None for what was not asked."""

    top_k: TopK | None
    sums: Sums | None
    output: DualOutput | None
