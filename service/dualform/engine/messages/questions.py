"""The questions about rows: their fields checked, the index asked, the response built.

What is checked here is what is cheap to check before anything is allocated for the answer: sizes
of tensors, k, filters, and how large the answer would be. The index checks the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.engine.api.index import Index, Order, RankBy
from dualform.engine.api.results import Coverage, DualOutput, Sums, TopK
from dualform.engine.errors import InvalidArgumentError, ResourceExhaustedError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.messages import wire
from dualform.engine.messages.limits import Limits
from dualform.engine.plan.plan import Plan
from dualform.v1 import attribution_pb2 as pb

ORDERS: dict[int, Order] = {
    pb.ORDER_UNSPECIFIED: "largest",
    pb.ORDER_LARGEST: "largest",
    pb.ORDER_SMALLEST: "smallest",
    pb.ORDER_ABSOLUTE: "absolute",
}
_RANKS: dict[int, RankBy] = {
    pb.RANK_BY_UNSPECIFIED: "weight",
    pb.RANK_BY_WEIGHT: "weight",
    pb.RANK_BY_CONTRIBUTION: "contribution",
}


_STRATEGIES = {
    pb.STRATEGY_UNSPECIFIED: "auto",
    pb.STRATEGY_SCAN: "scan",
    pb.STRATEGY_FLAT: "flat",
    pb.STRATEGY_CERTIFIED: "certified",
    pb.STRATEGY_KEY_SUMS: "key_sums",
    pb.STRATEGY_DISTINCT_KEYS: "distinct_keys",
    pb.STRATEGY_REBUILT: "rebuilt",
}
_STRATEGY_NUMBERS = {name: number for number, name in _STRATEGIES.items()}


@dataclass(frozen=True)
class Checked:
    """A request whose fields are what they should be, as far as that is cheap to tell.

    Attributes:
        queries: float32 [n, d].
        where: Which rows take part.
        bytes_per_query: What each query adds to the answer.
    """

    queries: npt.NDArray[np.float32]
    where: pb.Filter | None
    bytes_per_query: int


class Question(Protocol):
    """One kind of question, in three steps."""

    def check(self, index: Index, request: Any, limits: Limits) -> Checked:
        """Refuse what is wrong, or what no answer could hold."""

    def ask(self, index: Index, request: Any, checked: Checked, stop: Stop | None) -> Any:
        """Ask the index for the checked queries."""

    def respond(self, request: Any, found: Any) -> Any:
        """The response message."""


class TopKQuestion:
    """TopK."""

    def check(self, index: Index, request: pb.TopKRequest, limits: Limits) -> Checked:
        if request.k < 1:
            raise InvalidArgumentError(f"k is {request.k}; it must be at least 1", field="k")
        check_ranking(request, limits)
        if request.rank_by not in _RANKS:
            raise InvalidArgumentError(
                f"rank_by {int(request.rank_by)} is unknown; allowed are weight, contribution",
                field="rank_by",
            )
        queries, where = _question(request, limits)
        per_row = hit_bytes(index.layer(request.layer)) + (8 if request.distinct else 0)
        groups = group_count(index, request.layer, request.group_by)
        size = groups * request.k * per_row
        limits.check_answers(len(queries), size, "with a smaller k")
        return Checked(queries, where, size)

    def ask(
        self, index: Index, request: pb.TopKRequest, checked: Checked, stop: Stop | None
    ) -> TopK:
        return index.top_k(
            request.layer,
            checked.queries,
            request.k,
            where=checked.where,
            group_by=request.group_by or None,
            order=ORDERS[request.order],
            rank_by=_RANKS[request.rank_by],
            unit=request.unit if request.HasField("unit") else None,
            at_step=request.at_step if request.HasField("at_step") else None,
            distinct=request.distinct or None,
            strategy=_strategy(request),
            stop=stop,
        )

    def respond(self, request: pb.TopKRequest, found: TopK) -> pb.TopKResponse:
        return top_k_response(found, request.group_by, _plan(request, found.plan))


class SumsQuestion:
    """Sums."""

    def check(self, index: Index, request: pb.SumsRequest, limits: Limits) -> Checked:
        if not request.group_by:
            raise InvalidArgumentError(
                "sums need group_by, the metadata column to sum over", field="group_by"
            )
        queries, where = _question(request, limits)
        groups = group_count(index, request.layer, request.group_by)
        remedy = "grouped by a column with fewer values"
        if request.bins:
            groups, remedy = len(request.bins), "with fewer bins"
        limits.check_answers(len(queries), groups * 8, remedy)
        return Checked(queries, where, groups * 8)

    def ask(
        self, index: Index, request: pb.SumsRequest, checked: Checked, stop: Stop | None
    ) -> Sums:
        return index.sums(
            request.layer,
            checked.queries,
            request.group_by,
            absolute=request.absolute,
            where=checked.where,
            bins=list(request.bins) or None,
            strategy=_strategy(request),
            stop=stop,
        )

    def respond(self, request: pb.SumsRequest, found: Sums) -> pb.SumsResponse:
        return sums_response(found, request.group_by, _plan(request, found.plan))


class OutputQuestion:
    """DualOutput."""

    def check(self, index: Index, request: pb.DualOutputRequest, limits: Limits) -> Checked:
        queries, where = _question(request, limits)
        d_out = index.layer(request.layer).d_out
        # Beside the values travel the initial part, and the trained layer's output or the residual.
        tensors = group_count(index, request.layer, request.group_by) + 2
        size = tensors * d_out * 4
        limits.check_answers(len(queries), size, "grouped by a column with fewer values")
        return Checked(queries, where, size)

    def ask(
        self, index: Index, request: pb.DualOutputRequest, checked: Checked, stop: Stop | None
    ) -> DualOutput:
        return index.dual_output(
            request.layer,
            checked.queries,
            where=checked.where,
            at_step=request.at_step if request.HasField("at_step") else None,
            group_by=request.group_by or None,
            strategy=_strategy(request),
            stop=stop,
        )

    def respond(self, request: pb.DualOutputRequest, found: DualOutput) -> pb.DualOutputResponse:
        return output_response(found, request.group_by, _plan(request, found.plan))


QUESTIONS: dict[type[Any], Question] = {
    pb.TopKRequest: TopKQuestion(),
    pb.SumsRequest: SumsQuestion(),
    pb.DualOutputRequest: OutputQuestion(),
}


def top_k_response(found: TopK, group_by: str, plan: pb.Plan | None = None) -> pb.TopKResponse:
    return pb.TopKResponse(
        rows=wire.encode_tensor(found.rows),
        scores=wire.encode_tensor(found.scores),
        columns=[wire.encode_column(name, array) for name, array in found.columns.items()],
        groups=_groups(group_by, found.groups),
        coverage=_coverage(found.coverage),
        counts=None if found.counts is None else wire.encode_tensor(found.counts),
        plan=plan,
    )


def sums_response(found: Sums, group_by: str, plan: pb.Plan | None = None) -> pb.SumsResponse:
    return pb.SumsResponse(
        groups=_groups(group_by, found.groups),
        values=wire.encode_tensor(found.values),
        counts=wire.encode_tensor(found.counts),
        coverage=_coverage(found.coverage),
        plan=plan,
    )


def output_response(
    found: DualOutput, group_by: str, plan: pb.Plan | None = None
) -> pb.DualOutputResponse:
    return pb.DualOutputResponse(
        values=wire.encode_tensor(found.values),
        initial=wire.encode_tensor(found.initial),
        trained=None if found.trained is None else wire.encode_tensor(found.trained),
        groups=_groups(group_by, found.groups),
        counts=None if found.counts is None else wire.encode_tensor(found.counts),
        coverage=_coverage(found.coverage),
        plan=plan,
        residual=None if found.residual is None else wire.encode_tensor(found.residual),
    )


def _question(
    request: pb.TopKRequest | pb.SumsRequest | pb.DualOutputRequest, limits: Limits
) -> tuple[npt.NDArray[np.float32], pb.Filter | None]:
    return wire.decode_queries(request.queries, limits.max_queries), where_of(request)


def where_of(
    request: pb.TopKRequest | pb.SumsRequest | pb.DualOutputRequest | pb.ExplainRequest,
) -> pb.Filter | None:
    if not request.HasField("where"):
        return None
    wire.check_filter(request.where)
    return request.where


def check_ranking(request: pb.TopKRequest | pb.ExplainRequest, limits: Limits) -> None:
    if request.k > limits.max_k:
        raise ResourceExhaustedError(
            f"k is {request.k:,}; at most {limits.max_k:,} rows are returned per query: "
            "ask for fewer, or use sums for totals over all rows",
            field="k",
        )
    if request.order not in ORDERS:
        raise InvalidArgumentError(
            f"order {int(request.order)} is unknown; allowed are largest, smallest, absolute",
            field="order",
        )


def hit_bytes(layer: Layer) -> int:
    """Bytes that a row of a top-k adds to an answer."""
    columns = layer.columns
    return 12 + sum(wire.COLUMN_BYTES[wire.column_type(kind)] for _, kind in columns)


def _strategy(request: pb.TopKRequest | pb.SumsRequest | pb.DualOutputRequest) -> Any:
    if request.strategy not in _STRATEGIES:
        raise InvalidArgumentError(
            f"strategy {int(request.strategy)} is unknown; leave it out, the cheapest is chosen",
            field="strategy",
        )
    return _STRATEGIES[request.strategy]


def _plan(
    request: pb.TopKRequest | pb.SumsRequest | pb.DualOutputRequest, plan: Plan
) -> pb.Plan | None:
    if not request.explain_plan:
        return None
    return pb.Plan(
        strategy=_STRATEGY_NUMBERS[plan.strategy],
        reason=plan.reason,
        costs=[
            pb.PlanCost(strategy=_STRATEGY_NUMBERS[name], seconds=seconds)
            for name, seconds in plan.costs.items()
        ],
    )


def group_count(index: Index, layer: str, group_by: str) -> int:
    return index.group_count(layer, group_by) if group_by else 1


def _groups(name: str, groups: pa.Array | None) -> pb.Column | None:
    return None if groups is None else wire.encode_column(name, groups)


def _coverage(coverage: Coverage) -> pb.Coverage:
    return pb.Coverage(rows=coverage.rows, total=coverage.total, nonfinite=coverage.nonfinite)
