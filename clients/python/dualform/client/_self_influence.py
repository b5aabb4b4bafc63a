"""Self-influence: what groups' rows did to their own part of the loss, asked layer by layer, in as
many parts as messages need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client._answers import check_counts, coverage_of
from dualform.client._arrays import array_of, groups_of
from dualform.client._asking import Asking, Steps, halved, located
from dualform.client._info import IndexInfo
from dualform.client._model_layers import layers_asked
from dualform.client._results import Coverage, pandas_of
from dualform.client._retry import Deadline
from dualform.client.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    bad_answer,
)
from dualform.questions import IndexQuestion, SelfInfluenceQuestion
from dualform.v1 import attribution_pb2 as pb

if TYPE_CHECKING:
    import pandas as pd

_GROUP_BYTES = 64
"""Of a group in a message, at first; where its name is longer, fewer are asked for."""


@dataclass(frozen=True, eq=False)
class SelfInfluenceResult:
    """What every group's rows did to their own part of the loss, in the steps that they were in.

    Attributes:
        layers: The layers' names, in order.
        groups: The groups in ascending order; rows without a value take no part.
        scores: float64 [groups], by how much they lowered it, of all layers.
        by_layer: float64 [groups, layers].
        counts: int64 [groups], how many rows that is, of all layers.
        coverage: How many rows took part, by layer.
        index_version: Which version of the index answered.
    """

    layers: tuple[str, ...]
    groups: list[Any]
    scores: npt.NDArray[np.float64]
    by_layer: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    coverage: Mapping[str, Coverage]
    index_version: str

    def to_pandas(self) -> pd.DataFrame:
        """A line per group, the largest score first: group, score, count, and each layer's score.

        Raises:
            FailedPreconditionError: pandas is not installed.
        """
        pandas = pandas_of()
        order = np.argsort(-self.scores, kind="stable")
        table: dict[str, Any] = {
            "group": [self.groups[place] for place in order],
            "score": self.scores[order],
            "count": self.counts[order],
        }
        for number, name in enumerate(self.layers):
            key = f"{name}_layer" if name in table else name
            table[key] = self.by_layer[order, number]
        return pandas.DataFrame(table)


@dataclass(frozen=True)
class _OfLayer:
    groups: list[Any]
    scores: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    total: int
    coverage: Coverage
    version: str


def self_influence(
    asking: Asking,
    question: SelfInfluenceQuestion,
    layers: str | Sequence[str] | None,
    where: str | pb.Filter | None,
    timeout: float | None,
) -> Steps[SelfInfluenceResult]:
    """See Client.self_influence.

    Args:
        asking: Makes steps.
        question: What is asked of each layer.
        layers: Names or patterns; None for all that have values.
        where: What the user gave as filter.
        timeout: Seconds for all.
    """
    deadline = asking.deadline(timeout)
    info: IndexInfo = yield from asking.index(
        IndexQuestion(index=question.index), deadline.remaining()
    )
    found: dict[str, _OfLayer] = {}
    for name in layers_asked(info, layers):
        found[name] = yield from _of_layer(asking, replace(question, layer=name), where, deadline)
    if len({each.version for each in found.values()}) > 1:
        raise FailedPreconditionError(
            "the index was replaced while it was asked; ask again", reason="INDEX_CHANGED"
        )
    return _joined(found)


def _of_layer(
    asking: Asking,
    question: SelfInfluenceQuestion,
    where: str | pb.Filter | None,
    deadline: Deadline,
) -> Steps[_OfLayer]:
    limits = yield from asking.known_limits(deadline)
    size = max(1, limits.max_message_bytes // _GROUP_BYTES)
    parts: list[_OfLayer] = []
    first, total = 0, 1
    while first < total:
        try:
            part = yield from asking.send(
                replace(question, first=first, count=size), deadline, _part_of
            )
        except ResourceExhaustedError as error:
            size = halved(error, size)
            continue
        except InvalidArgumentError as error:
            raise located(error, where) from None
        parts.append(part)
        if any(_memory(part) != _memory(parts[0]) for part in parts):
            raise FailedPreconditionError(
                "the index changed while it was answered in parts; ask again",
                reason="INDEX_CHANGED",
            )
        first, total = first + len(part.groups), part.total
    groups = [group for part in parts for group in part.groups]
    if any(a[-1] >= b[0] for a, b in pairwise([part.groups for part in parts])):
        raise bad_answer(f"parts whose groups of {question.by!r} do not ascend")
    return replace(
        parts[0],
        groups=groups,
        scores=np.concatenate([part.scores for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
    )


def _part_of(message: pb.SelfInfluenceResponse, question: SelfInfluenceQuestion) -> _OfLayer:
    """To a SelfInfluenceQuestion with `count`."""
    coverage, total = coverage_of(message.coverage), message.total
    assert question.count is not None
    if not 0 <= total <= coverage.rows:
        raise bad_answer(f"{total} groups, where {coverage.rows} rows took part")
    m = max(0, min(question.count, total - question.first))
    counts = array_of(message.counts, "counts", np.int64, (m,))
    check_counts(counts.tolist(), coverage.rows)
    groups = groups_of(message.groups, m)
    if None in groups:
        raise bad_answer(f"a group of the rows without a value in {question.by!r}")
    return _OfLayer(
        groups,
        array_of(message.scores, "scores", np.float64, (m,)),
        counts,
        total,
        coverage,
        message.index_version,
    )


def _memory(part: _OfLayer) -> tuple[object, ...]:
    return part.total, part.coverage, part.version


def _joined(found: Mapping[str, _OfLayer]) -> SelfInfluenceResult:
    each = list(found.values())
    groups = each[0].groups
    if any(other.groups != groups for other in each):  # layers need not have the same rows
        together = {group for of_layer in each for group in of_layer.groups}
        groups = sorted(together, key=lambda group: (isinstance(group, str), group))
    place = {group: number for number, group in enumerate(groups)}
    by_layer = np.zeros((len(groups), len(each)))
    counts = np.zeros(len(groups), np.int64)
    for number, of_layer in enumerate(each):
        where = [place[group] for group in of_layer.groups]
        by_layer[where, number] = of_layer.scores
        counts[where] += of_layer.counts
    return SelfInfluenceResult(
        tuple(found),
        groups,
        by_layer.sum(axis=1),
        by_layer,
        counts,
        {name: of_layer.coverage for name, of_layer in found.items()},
        each[0].version,
    )
