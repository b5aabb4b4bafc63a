"""Questions to an opened index in keywords, for code that holds one: tests, benchmarks, tools.

A client's questions do not come this way: they are objects already. An option need not be here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from dualform.engine.api.opened import refusals
from dualform.engine.api.results import (
    DualOutput,
    Explanation,
    Sums,
    TopGroups,
    TopK,
    WeightsChunk,
)
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.memory.shards import Stop
from dualform.engine.totals.streams import CHUNK_BYTES
from dualform.questions import (
    ExplainQuestion,
    OutputQuestion,
    RowsQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.questions.questions import (
    Order,
    OutputStrategy,
    RankBy,
    SumsStrategy,
    TopKStrategy,
)
from dualform.v1 import attribution_pb2 as pb


class Keywords:
    """Methods that make a question of their arguments, which are its fields, and ask it."""

    @overload
    def ask(self, question: TopKQuestion, stop: Stop | None = None) -> TopK: ...
    @overload
    def ask(self, question: TopGroupsQuestion, stop: Stop | None = None) -> TopGroups: ...
    @overload
    def ask(self, question: SumsQuestion, stop: Stop | None = None) -> Sums: ...
    @overload
    def ask(self, question: OutputQuestion, stop: Stop | None = None) -> DualOutput: ...
    @abstractmethod
    def ask(
        self, question: RowsQuestion, stop: Stop | None = None
    ) -> TopK | TopGroups | Sums | DualOutput:
        """See Index.ask."""

    @abstractmethod
    def explain_layers(
        self, question: ExplainQuestion, stop: Stop | None = None
    ) -> Iterator[Explanation]:
        """See Index.explain_layers."""

    @abstractmethod
    def chunks(
        self,
        question: StreamWeightsQuestion,
        stop: Stop | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[WeightsChunk]:
        """See Index.chunks."""

    def top_k(
        self,
        layer: str,
        queries: np.ndarray,
        k: int,
        *,
        where: pb.Filter | None = None,
        group_by: str | None = None,
        order: Order = "largest",
        rank_by: RankBy = "weight",
        unit: int | None = None,
        direction: np.ndarray | None = None,
        at_step: int | None = None,
        distinct: str | None = None,
        strategy: TopKStrategy = "auto",
        max_residual: float | None = None,
        stop: Stop | None = None,
    ) -> TopK:
        """See TopKQuestion."""
        with refusals():
            question = TopKQuestion(
                layer,
                queries,
                k=k,
                where=where,
                group_by=group_by,
                order=order,
                rank_by=rank_by,
                unit=unit,
                direction=direction,
                at_step=at_step,
                distinct=distinct,
                strategy=strategy,
                max_residual=max_residual,
            )
        return self.ask(question, stop)

    def top_groups(
        self,
        layer: str,
        queries: np.ndarray,
        by: str,
        k: int,
        *,
        where: pb.Filter | None = None,
        order: Order = "largest",
        rank_by: RankBy = "weight",
        unit: int | None = None,
        direction: np.ndarray | None = None,
        at_step: int | None = None,
        max_residual: float | None = None,
        strategy: SumsStrategy = "auto",
        stop: Stop | None = None,
    ) -> TopGroups:
        """See TopGroupsQuestion."""
        with refusals():
            question = TopGroupsQuestion(
                layer,
                queries,
                by,
                k=k,
                where=where,
                order=order,
                rank_by=rank_by,
                unit=unit,
                direction=direction,
                at_step=at_step,
                max_residual=max_residual,
                strategy=strategy,
            )
        return self.ask(question, stop)

    def sums(
        self,
        layer: str,
        queries: np.ndarray,
        group_by: str,
        *,
        absolute: bool = False,
        where: pb.Filter | None = None,
        bins: Sequence[float] | None = None,
        strategy: SumsStrategy = "auto",
        stop: Stop | None = None,
    ) -> Sums:
        """See SumsQuestion."""
        with refusals():
            question = SumsQuestion(
                layer,
                queries,
                group_by,
                absolute=absolute,
                where=where,
                bins=None if bins is None else tuple(bins),
                strategy=strategy,
            )
        return self.ask(question, stop)

    def dual_output(
        self,
        layer: str,
        queries: np.ndarray,
        *,
        where: pb.Filter | None = None,
        at_step: int | None = None,
        group_by: str | None = None,
        strategy: OutputStrategy = "auto",
        max_residual: float | None = None,
        stop: Stop | None = None,
    ) -> DualOutput:
        """See OutputQuestion."""
        with refusals():
            question = OutputQuestion(
                layer,
                queries,
                where=where,
                at_step=at_step,
                group_by=group_by,
                strategy=strategy,
                max_residual=max_residual,
            )
        return self.ask(question, stop)

    def explain(
        self,
        layer: str,
        queries: np.ndarray,
        *,
        k: int | None = None,
        order: Order = "largest",
        where: pb.Filter | None = None,
        group_by: str | None = None,
        absolute: bool = False,
        dual_output: bool = False,
        max_residual: float | None = None,
        stop: Stop | None = None,
    ) -> Explanation:
        """See ExplainQuestion; of one layer."""
        if k == 0:
            raise InvalidArgumentError("k is 0; None leaves the best rows out", field="k")
        with refusals():
            question = ExplainQuestion(
                ((layer, queries),),
                k=k,
                order=order,
                where=where,
                group_by=group_by,
                absolute=absolute,
                output=dual_output,
                max_residual=max_residual,
            )
        return next(iter(self.explain_layers(question, stop)))

    def stream_weights(
        self,
        layer: str,
        queries: np.ndarray,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        stop: Stop | None = None,
    ) -> Iterator[WeightsChunk]:
        """See StreamWeightsQuestion and Index.chunks."""
        with refusals():
            question = StreamWeightsQuestion(layer, queries)
        return self.chunks(question, stop, chunk_bytes)
