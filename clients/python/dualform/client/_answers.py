"""From the wire: what a response says, once it can be the answer to what was asked.

A server of another version, a defect in one, or whoever stands between must not end in a result
that looks right: sizes and dtypes are the question's, rows are the layer's, the best come first,
and counts and coverage add up. What no client can know, such as a score, is the server's word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.client._arrays import array_of, column_of, groups_of
from dualform.client._results import (
    ChosenPlan,
    Coverage,
    DualOutputResult,
    Explanation,
    SumsResult,
    TopGroupsResult,
    TopKResult,
    WeightsChunk,
)
from dualform.client.errors import DualformError, ResourceExhaustedError, bad_answer
from dualform.questions import (
    ExamplesQuestion,
    ExplainQuestion,
    OutputQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
    message_of,
)
from dualform.questions.question import STRATEGIES
from dualform.v1 import attribution_pb2 as pb

T = TypeVar("T")


def read(reader: Callable[[Any, Any], T], response: Any, question: Any) -> T:
    """What `reader` makes of a response.

    Raises:
        InternalError: Nothing: it can't be the answer to this question.
        ResourceExhaustedError: It does not fit into this process's memory.
    """
    if response is None:  # gRPC's word for a message that is missing, or that can't be read
        raise bad_answer("it holds no message, or none that can be read")
    try:
        return reader(response, question)
    except DualformError:
        raise
    except MemoryError:
        raise ResourceExhaustedError(
            "the answer does not fit into this process's memory; ask for less (fewer queries, a "
            "smaller k)",
            reason="OUT_OF_MEMORY",
        ) from None
    except Exception as error:
        raise bad_answer(f"{type(error).__name__}: {error}") from error


def top_k_of(message: pb.TopKResponse, question: TopKQuestion) -> TopKResult:
    """To a TopKQuestion."""
    return _top_k(
        message,
        (len(question.queries), question.k),
        question.order,
        grouped=question.group_by is not None,
        distinct=question.distinct is not None,
        plan=question.explain_plan,
        partial=question.partial,
    )


def top_groups_of(message: pb.TopGroupsResponse, question: TopGroupsQuestion) -> TopGroupsResult:
    """To a TopGroupsQuestion."""
    shape = (len(question.queries), question.k)
    groups, scores, counts = best_groups(message, shape, question.order)
    coverage = coverage_of(message.coverage, question.partial)
    for of_query in counts.tolist():
        check_counts(of_query, coverage.rows)
    return TopGroupsResult(
        groups=groups,
        scores=scores,
        counts=counts,
        coverage=coverage,
        plan=_plan_of(message, question.explain_plan),
        index_version=message.index_version,
    )


def sums_of(message: pb.SumsResponse, question: SumsQuestion) -> SumsResult:
    """To a SumsQuestion."""
    bins = question.bins
    found = _sums(
        message,
        len(question.queries),
        question.absolute,
        plan=question.explain_plan,
        partial=question.partial,
    )
    if bins is not None and found.groups != list(bins[:-1]):
        raise bad_answer(f"ranges {found.groups[:8]}, where edges {list(bins[:9])} were given")
    return found


def dual_output_of(message: pb.DualOutputResponse, question: OutputQuestion) -> DualOutputResult:
    """To an OutputQuestion."""
    grouped = question.group_by is not None
    return _output(message, len(question.queries), grouped, plan=question.explain_plan)


def explanations_of(message: pb.ExplainResponse, question: ExplainQuestion) -> list[Explanation]:
    """To an ExplainQuestion, in the order of its layers."""
    version, grouped = message.index_version, question.group_by is not None
    asked = {"top_k": bool(question.k), "sums": grouped, "output": question.output}
    names = [layer for layer, _ in question.layers]
    if [layer.layer for layer in message.layers] != names:
        raise bad_answer(f"of layers {[layer.layer for layer in message.layers]}, not {names}")
    for layer in message.layers:
        for part, there in asked.items():
            if layer.HasField(part) != there:
                raise bad_answer(f"of layer {layer.layer!r}: {_there(part, there)}")
            if there:
                getattr(layer, part).index_version = version
    return [
        Explanation(
            top_k=_top_k(layer.top_k, (len(queries), question.k), question.order)
            if question.k
            else None,
            sums=_sums(layer.sums, len(queries), question.absolute) if grouped else None,
            output=_output(layer.output, len(queries), grouped) if question.output else None,
            index_version=version,
        )
        for layer, (_, queries) in zip(message.layers, question.layers, strict=True)
    ]


def payloads_of(
    message: pb.GetExamplesResponse, question: ExamplesQuestion
) -> list[bytes | str | None]:
    """To an ExamplesQuestion, in the order of its ids."""
    ids, asked = [example.id for example in message.examples], message_of(question).ids
    if ids != list(asked):
        raise bad_answer(f"of {len(ids)} ids, that are not the {len(asked)} asked for in order")
    payloads: list[bytes | str | None] = []
    for example in message.examples:
        kind = example.WhichOneof("payload")
        payloads.append(None if kind is None else getattr(example, kind))
    return payloads


class WeightsReader:
    """Reads the parts of an answer to a StreamWeightsQuestion, one after the other.

    Args:
        question: What was asked.
        rows: The layer's; None where nobody knows.
        version: The index's with so many rows: another one may have others.
    """

    def __init__(self, question: StreamWeightsQuestion, rows: int | None, version: str) -> None:
        self._question = question
        self._rows = rows
        self._version: str | None = None
        self._of_rows = version
        self._next = 0

    def __call__(self, message: Any) -> WeightsChunk:
        return read(self._chunk, message, self._question)

    def end(self) -> None:
        """No more parts come."""
        if self._rows is not None and self._next != self._rows:
            raise bad_answer(f"the weights of {self._next} rows, where the layer has {self._rows}")

    def _chunk(
        self, message: pb.StreamWeightsResponse, question: StreamWeightsQuestion
    ) -> WeightsChunk:
        weights = array_of(message.weights, "weights", np.float32, (len(question.queries), None))
        if self._version is None:
            self._version = message.index_version
            if self._version != self._of_rows:
                self._rows = None
        end = message.start + weights.shape[1]
        if message.index_version != self._version:
            raise bad_answer("a part of it is of another version of the index than the first one")
        if message.start != self._next or not weights.shape[1]:
            raise bad_answer(
                f"weights of rows {message.start} to {end - 1}, where those from {self._next} on "
                "come next"
            )
        if self._rows is not None and end > self._rows:
            raise bad_answer(f"weights of row {end - 1}, where the layer has {self._rows} rows")
        self._next = end
        return WeightsChunk(message.start, weights, message.index_version)


def coverage_of(message: pb.Coverage, partial: bool = False) -> Coverage:
    """What an answer covers; it adds up, and without `partial` nothing is missing."""
    found = Coverage(
        message.rows, message.total, message.nonfinite, message.dropped, message.missing
    )
    fits = 0 <= found.nonfinite <= found.rows <= found.total and found.dropped >= 0
    if not fits or not 0 <= found.missing <= (found.total if partial else 0):
        raise bad_answer(f"{found} does not add up")
    return found


def best_groups(
    message: pb.TopGroupsResponse | pb.AttributeResponse, shape: tuple[int, int], order: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Groups, scores and counts, [n, k] each, of the k best groups."""
    scores = array_of(message.scores, "sums", np.float64, shape)
    counts = array_of(message.counts, "counts", np.int64, shape)
    groups = column_of(message.groups, shape)
    check_best_first(scores, counts > 0, order)
    for line, count in zip(groups, counts, strict=True):
        named = line[count > 0].tolist()
        if len({(group, str(group)) for group in named}) < len(named):
            raise bad_answer("a group twice among the best of one query")
    return groups, scores, counts


def check_best_first(scores: npt.NDArray[Any], there: npt.NDArray[np.bool_], order: str) -> None:
    """Scores descend by their merit along the last axis; where none is there, NaN ends the line."""
    if (np.isnan(scores) == there).any():
        raise bad_answer("a score where no row is, or none where one is")
    if (there[..., 1:] & ~there[..., :-1]).any():
        raise bad_answer("a gap among the best")
    merit = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
    if (merit[..., 1:] > merit[..., :-1]).any():
        raise bad_answer(f"scores that are not in the order {order!r}")


def check_counts(counts: Sequence[int], rows: int, all_of_them: bool = False) -> None:
    """How many rows each group has: together no more than took part, or just as many."""
    added = sum(counts)
    if min(counts, default=0) < 0 or added > rows or (all_of_them and added < rows):
        raise bad_answer(f"groups of {added} rows, where {rows} took part")


def _top_k(
    message: pb.TopKResponse,
    shape: tuple[int, int],
    order: str,
    grouped: bool = False,
    distinct: bool = False,
    plan: bool = False,
    partial: bool = False,
) -> TopKResult:
    n, k = shape
    _check_there(message, groups=grouped, counts=distinct)
    rows = array_of(message.rows, "rows", np.int64, (n, None, k) if grouped else shape)
    scores = array_of(message.scores, "scores", np.float32, rows.shape)
    there, coverage = rows >= 0, coverage_of(message.coverage, partial)
    _check_rows(rows, coverage)
    check_best_first(scores, there, order)
    counts = array_of(message.counts, "counts", np.int64, rows.shape) if distinct else None
    if counts is not None and ((counts > 0) != there).any():
        raise bad_answer("a count of rows where none is, or none where one is")
    if counts is not None and counts.max(initial=0) > coverage.rows:
        raise bad_answer(f"{counts.max()} rows of a value, where {coverage.rows} took part")
    return TopKResult(
        rows=rows,
        scores=scores,
        columns=_columns(message, there),
        groups=groups_of(message.groups, rows.shape[1]) if grouped else None,
        coverage=coverage,
        counts=counts,
        plan=_plan_of(message, plan),
        index_version=message.index_version,
    )


def _check_rows(rows: npt.NDArray[np.int64], coverage: Coverage) -> None:
    """Rows are the layer's, and each is there once for a query."""
    if ((rows < -1) | (rows >= coverage.total)).any():
        raise bad_answer(f"rows beyond the layer's {coverage.total}")
    ascending = np.sort(rows.reshape(len(rows), -1), axis=1)
    if (ascending >= 0).sum(axis=1).max(initial=0) > coverage.rows - coverage.nonfinite:
        raise bad_answer(f"more rows than took part, by {coverage}")
    if ((ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)).any():
        raise bad_answer("a row twice among the best of one query")


def _columns(message: pb.TopKResponse, there: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
    columns = {column.name: column_of(column, there.shape) for column in message.columns}
    if len(columns) < len(message.columns):
        raise bad_answer("a metadata column twice")
    for name, column in columns.items():
        if any(value is not None for value in column[~there].tolist()):
            raise bad_answer(f"column {name!r} with a value where no row is")
    return columns


def _sums(
    message: pb.SumsResponse, n: int, absolute: bool, plan: bool = False, partial: bool = False
) -> SumsResult:
    values = array_of(message.values, "sums", np.float64, (n, None))
    groups = groups_of(message.groups, values.shape[1])
    counts = array_of(message.counts, "counts", np.int64, (len(groups),))
    coverage = coverage_of(message.coverage, partial)
    check_counts(counts.tolist(), coverage.rows, all_of_them=True)
    if absolute and (values < 0).any():
        raise bad_answer("sums of absolute weights below 0")
    return SumsResult(
        groups=groups,
        values=values,
        counts=counts,
        coverage=coverage,
        plan=_plan_of(message, plan),
        index_version=message.index_version,
    )


def _output(
    message: pb.DualOutputResponse, n: int, grouped: bool, plan: bool = False
) -> DualOutputResult:
    _check_there(message, groups=grouped, counts=grouped)
    shape = (n, None, None) if grouped else (n, None)
    values = array_of(message.values, "outputs", np.float32, shape)
    whole = (n, values.shape[-1])
    groups = groups_of(message.groups, values.shape[1]) if grouped else None
    counts = array_of(message.counts, "counts", np.int64, values.shape[1:2]) if grouped else None
    coverage = coverage_of(message.coverage)
    if counts is not None:
        check_counts(counts.tolist(), coverage.rows, all_of_them=True)

    def perhaps(name: str) -> npt.NDArray[np.float32] | None:
        if not message.HasField(name):
            return None
        return array_of(getattr(message, name), name, np.float32, whole)

    return DualOutputResult(
        values=values,
        initial=array_of(message.initial, "initial", np.float32, whole),
        trained=perhaps("trained"),
        groups=groups,
        counts=counts,
        coverage=coverage,
        residual=perhaps("residual"),
        plan=_plan_of(message, plan),
        index_version=message.index_version,
    )


def _check_there(message: Any, **asked: bool) -> None:
    for part, there in asked.items():
        if message.HasField(part) != there:
            raise bad_answer(_there(part, there))


def _there(part: str, asked: bool) -> str:
    return f"{part} are missing" if asked else f"{part} that were not asked for"


def _plan_of(
    message: pb.TopKResponse | pb.TopGroupsResponse | pb.SumsResponse | pb.DualOutputResponse,
    asked: bool,
) -> ChosenPlan | None:
    _check_there(message, plan=asked)
    if not asked:
        return None
    names: dict[int, str] = {number: name for name, number in STRATEGIES.items()}

    def name(number: int) -> str:
        return names.get(number, str(number))  # a newer server's

    plan = message.plan
    costs = {name(cost.strategy): cost.seconds for cost in plan.costs}
    if not all(seconds >= 0 for seconds in costs.values()):
        raise bad_answer(f"a plan of estimated seconds {costs}")
    return ChosenPlan(name(plan.strategy), plan.reason, costs)
