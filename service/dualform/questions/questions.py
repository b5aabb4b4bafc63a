"""One class per question. A field here, in the protocol, and where it is used: that is an option.

docs/developing.md shows the way of one. What is checked here holds for every index; what depends
on an index (its layers, columns, units and steps) is checked by what uses the field.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dualform.questions.attributed import AttributedLayer, check_inputs
from dualform.questions.errors import QuestionError
from dualform.questions.question import Question
from dualform.v1 import attribution_pb2 as pb

Order = Literal["largest", "smallest", "absolute"]
RankBy = Literal["weight", "contribution", "cosine"]
TopKStrategy = Literal["auto", "certified", "device", "distinct_keys", "flat", "scan"]
SumsStrategy = Literal["auto", "key_sums", "distinct_keys", "device", "scan"]
OutputStrategy = Literal["auto", "rebuilt", "parts", "device", "scan"]
Queries: TypeAlias = npt.NDArray[np.float32]

MAX_RESIDUAL = 1e-4
"""Of an output, how much no row may explain unless a question says otherwise."""


@dataclass(frozen=True, eq=False)
class IndexesQuestion(Question):
    """What is served, and the limits."""

    message: ClassVar[type[Any]] = pb.ListIndexesRequest


@dataclass(frozen=True, eq=False)
class IndexQuestion(Question):
    """What one index holds."""

    message: ClassVar[type[Any]] = pb.GetIndexRequest

    index: str | None = None


@dataclass(frozen=True, eq=False)
class TopKQuestion(Question):
    """The k rows with the largest, smallest or largest absolute weight or contribution.

    Attributes:
        layer: As in `model.named_modules()`.
        queries: float32 [n, d_in], finite.
        k: Rows per query, and per group; at least 1.
        where: Which rows take part; None for all.
        group_by: A metadata column: the k best rows of each of its values.
        order: "absolute" sorts by |score| descending; scores stay signed.
        rank_by: "weight"; "cosine", of query and key, 0 where either is zero; or "contribution":
            what a row added to one output unit, or along a direction.
        unit: The output unit, 0 to d_out - 1; with "contribution" alone, which needs it or
        direction: float32 [n, d_out], finite: one for each query.
        at_step: Contributions after so many steps; None for the trained layer. Likewise.
        distinct: A metadata column: of rows with the same value only the best counts; rows
            without a value stand for themselves.
        strategy: How rows are proposed; the answer is the same. "certified" prunes by sketches,
            "device" asks GPUs, "distinct_keys" looks at one row of each distinct key, "flat" asks
            FAISS, "scan" multiplies tiles. One that does not apply is refused; "auto" takes the
            cheapest that does, by estimate.
        explain_plan: Say which strategy was chosen, and why.
        max_residual: Contributions to the trained layer: as for OutputQuestion.
        index: Its name; None where one is served.
        partial: Where the rows are on several machines: answer without those that are out of
            reach; the coverage says how many are missing.
    """

    message: ClassVar[type[Any]] = pb.TopKRequest

    layer: str
    queries: Queries
    k: int = 10
    where: pb.Filter | None = None
    group_by: str | None = None
    order: Order = "largest"
    rank_by: RankBy = "weight"
    unit: int | None = None
    at_step: int | None = None
    distinct: str | None = None
    strategy: TopKStrategy = "auto"
    explain_plan: bool = False
    max_residual: float | None = None
    direction: Queries | None = None
    partial: bool = False
    index: str | None = None

    def check(self) -> None:
        check_ranking(self)


@dataclass(frozen=True, eq=False)
class TopGroupsQuestion(Question):
    """The best groups of one layer's rows: by what their weights, cosines or contributions add up
    to.

    Attributes:
        layer, queries, where, unit, direction, at_step, max_residual, explain_plan, index: As for
            TopKQuestion.
        by: The metadata column whose values are the groups; the rows without a value are one too.
        k: Groups per query; at least 1.
        order: "absolute" sorts by |sum| descending; sums stay signed.
        rank_by: What is added up: "weight", "cosine" or "contribution".
        strategy: How weights are added up, as for SumsQuestion; the others know "scan" alone.
        partial: As for TopKQuestion.
    """

    message: ClassVar[type[Any]] = pb.TopGroupsRequest

    layer: str
    queries: Queries
    by: str
    k: int = 10
    where: pb.Filter | None = None
    order: Order = "largest"
    rank_by: RankBy = "weight"
    unit: int | None = None
    direction: Queries | None = None
    at_step: int | None = None
    max_residual: float | None = None
    strategy: SumsStrategy = "auto"
    explain_plan: bool = False
    partial: bool = False
    index: str | None = None

    def check(self) -> None:
        check_ranking(self)


@dataclass(frozen=True, eq=False)
class AttributeQuestion(Question):
    """The groups whose rows, of several layers together, did most to a number that a model gave.

    Attributes:
        layers: What each layer saw, and where the number's gradient points at its output.
        inputs: How many inputs there are.
        by, where, index: As for TopGroupsQuestion.
        k: Groups per input, at least 1; None for the sums of every group.
        order: As for TopGroupsQuestion.
        max_residual: As for OutputQuestion, of every layer.
    """

    message: ClassVar[type[Any]] = pb.AttributeRequest

    layers: tuple[AttributedLayer, ...]
    inputs: int
    by: str = "example"
    k: int | None = 10
    where: pb.Filter | None = None
    order: Order = "largest"
    max_residual: float | None = None
    index: str | None = None

    def check(self) -> None:
        if self.k is not None and self.k < 1:
            raise QuestionError(f"k is {self.k}; it must be an integer, at least 1", field="k")
        check_max_residual(self.max_residual)
        check_inputs(self.layers, self.inputs)


@dataclass(frozen=True, eq=False)
class SelfInfluenceQuestion(Question):
    """What each group's rows did to their own part of the loss, in the steps that they were in.

    Attributes:
        layer, where, index: As for TopKQuestion.
        by: The metadata column whose values are the groups; rows without a value take no part.
        first: Of the groups in ascending order those from this one on, counted from 0.
        count: At most so many; None for all that are left.
    """

    message: ClassVar[type[Any]] = pb.SelfInfluenceRequest

    layer: str
    by: str = "example"
    where: pb.Filter | None = None
    first: int = 0
    count: int | None = None
    index: str | None = None

    def check(self) -> None:
        for name, least in (("first", 0), ("count", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise QuestionError(f"{name} is {value}; it must be {least} or more", field=name)


@dataclass(frozen=True, eq=False)
class SumsQuestion(Question):
    """Total attention weight, signed or absolute, per group.

    Attributes:
        layer, queries, where, explain_plan, index: As for TopKQuestion.
        group_by: The metadata column to sum over.
        absolute: Sum |weight|.
        bins: Ascending edges for a numeric column, as in numpy.histogram: group i holds
            edges[i] <= value < edges[i + 1], the last one its upper edge too. Other rows take no
            part; groups are called by their lower edges.
        strategy: "key_sums" takes the stored sums of the keys of whole runs of rows with the same
            task and label, "distinct_keys" multiplies one row for each distinct key, "device" and
            "scan" every row, on GPUs or on the CPU; refused where it does not apply. "auto" takes
            key sums where there are any, and for the other rows the cheapest of the others, by
            estimate.
        partial: As for TopKQuestion.
    """

    message: ClassVar[type[Any]] = pb.SumsRequest

    layer: str
    queries: Queries
    group_by: str
    absolute: bool = False
    where: pb.Filter | None = None
    bins: tuple[float, ...] | None = None
    strategy: SumsStrategy = "auto"
    explain_plan: bool = False
    partial: bool = False
    index: str | None = None


@dataclass(frozen=True, eq=False)
class OutputQuestion(Question):
    """The layer's output as initial part plus the sum of the rows' contributions.

    Attributes:
        layer, queries, explain_plan, index: As for TopKQuestion.
        where: Which rows take part; the initial part always stays.
        at_step: After so many steps, 0 to all of them; None for the trained layer.
        group_by: A metadata column: the output split by its values, the initial part beside.
        strategy: For the trained layer "scan" adds every row instead of taking what they were
            added up to, all ("rebuilt") or by the values of a column ("parts"); refused where it
            does not apply.
        max_residual: The largest part of a query's output, by Euclidean length, that no row may
            explain for an answer to be given; None for MAX_RESIDUAL.
    """

    message: ClassVar[type[Any]] = pb.DualOutputRequest

    layer: str
    queries: Queries
    where: pb.Filter | None = None
    at_step: int | None = None
    group_by: str | None = None
    strategy: OutputStrategy = "auto"
    explain_plan: bool = False
    max_residual: float | None = None
    index: str | None = None

    def check(self) -> None:
        check_max_residual(self.max_residual)


@dataclass(frozen=True, eq=False)
class ExplainQuestion(Question):
    """Several answers about several layers, the same as asked one by one.

    Attributes:
        layers: Each layer's name with its queries, float32 [n, d_in]; a mapping is taken too.
        k: So many best rows by weight; None for none.
        order, where, index: As for TopKQuestion.
        group_by: Sums over this column, and the output split by it; None for no sums, and the
            output whole.
        absolute: Sum |weight|.
        output: The trained layer's output too.
        max_residual: With output: as for OutputQuestion.
    """

    message: ClassVar[type[Any]] = pb.ExplainRequest

    layers: tuple[tuple[str, Queries], ...]
    k: int | None = 10
    order: Order = "largest"
    where: pb.Filter | None = None
    group_by: str | None = None
    absolute: bool = False
    output: bool = False
    max_residual: float | None = None
    index: str | None = None

    def check(self) -> None:
        if not self.layers:
            raise QuestionError("no layers; name at least one, with queries", field="layers")
        names = [name for name, _ in self.layers]
        if len(set(names)) < len(names):
            again = Counter(names).most_common(1)[0][0]
            raise QuestionError(
                f"layer {again!r} is there twice; send all its queries in one batch",
                field="layers",
            )
        if self.k is not None and self.k < 0:
            raise QuestionError(f"k is {self.k}; it must not be negative", field="k")
        if not (self.k or self.group_by or self.output):
            raise QuestionError(
                "nothing is asked; give k for the best rows, group_by for sums, or output",
                field="k",
            )
        if self.absolute and not self.group_by:
            raise QuestionError("absolute goes with group_by, for sums", field="absolute")
        check_max_residual(self.max_residual)
        if self.max_residual is not None and not self.output:
            raise QuestionError("max_residual goes with output", field="max_residual")


@dataclass(frozen=True, eq=False)
class StreamWeightsQuestion(Question):
    """Every attention weight in row order, the float32 nearest to the exact one.

    Attributes:
        layer, queries, index: As for TopKQuestion.
    """

    message: ClassVar[type[Any]] = pb.StreamWeightsRequest

    layer: str
    queries: Queries
    index: str | None = None


@dataclass(frozen=True, eq=False)
class ExamplesQuestion(Question):
    """Payloads by example id.

    Attributes:
        ids: Ints and strings, at least one.
        index: As for TopKQuestion.
    """

    message: ClassVar[type[Any]] = pb.GetExamplesRequest

    ids: tuple[int | str, ...]
    index: str | None = None

    def check(self) -> None:
        if not self.ids:
            raise QuestionError("no ids; send at least one example id", field="ids")


def check_ranking(question: TopKQuestion | TopGroupsQuestion) -> None:
    """Refuse a k that finds nothing, and what does not go with the score that is ranked by."""
    if question.k < 1:
        raise QuestionError(f"k is {question.k}; it must be an integer, at least 1", field="k")
    if question.rank_by == "contribution":
        check_max_residual(question.max_residual)
        check_direction(question.queries, question.unit, question.direction)
        return
    for name in ("unit", "direction", "at_step", "max_residual"):
        if getattr(question, name) is not None:
            raise QuestionError(
                f"{name} goes with rank_by='contribution', not with {question.rank_by!r}",
                field=name,
            )


def check_max_residual(value: float | None) -> None:
    """Refuse a negative one; infinity allows everything."""
    if value is not None and value < 0:
        raise QuestionError(
            f"max_residual is {value}; it is a part of the output's length, so 0 or more: "
            f"{MAX_RESIDUAL:g} unless given",
            field="max_residual",
        )


def check_direction(queries: Queries, unit: int | None, direction: Queries | None) -> None:
    """Refuse a unit and directions together, and directions that are not one for each query."""
    if direction is None:
        return
    if unit is not None:
        raise QuestionError(
            f"unit is {unit} and there is a direction too; a unit is the direction that is 1 there "
            "and 0 elsewhere: give one of the two",
            field="direction",
        )
    if len(direction) != len(queries):
        raise QuestionError(
            f"directions have shape {list(direction.shape)} and queries {list(queries.shape)}; "
            "send one direction for each query",
            field="direction",
            reason="BAD_DIRECTIONS",
        )


RowsQuestion: TypeAlias = TopKQuestion | TopGroupsQuestion | SumsQuestion | OutputQuestion
"""A question with one batch of queries, each of which has an answer of its own."""

QUESTIONS: tuple[type[Question], ...] = (
    IndexesQuestion,
    IndexQuestion,
    TopKQuestion,
    TopGroupsQuestion,
    AttributeQuestion,
    SelfInfluenceQuestion,
    SumsQuestion,
    OutputQuestion,
    ExplainQuestion,
    StreamWeightsQuestion,
    ExamplesQuestion,
)
