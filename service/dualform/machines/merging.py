"""One answer made of those of several machines: exactly what one machine would give.

Rows are ordered by (score, row id), and scores are exact: the best of all are among the best of
each part. Sums are float64 and added in the order of the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from dualform.engine.api.results import Coverage, Sums, TopK
from dualform.engine.plan.plan import Plan
from dualform.engine.topk.distinct import first_of_each
from dualform.engine.topk.ranking import merit
from dualform.machines.unions import concatenated, union
from dualform.questions import SumsQuestion, TopKQuestion
from dualform.store.grouping import group


@dataclass(frozen=True)
class _Rows:
    """Rows that may be among the best, of all parts; each an entry.

    Attributes:
        cells: int64 [m], group * queries + query.
        ids: int64 [m].
        scores: float32 [m].
        places: int64 [m], where their metadata is among that of all parts.
        codes: int64 [m], equal where `distinct` counts one of them; None without.
    """

    cells: np.ndarray
    ids: np.ndarray
    scores: np.ndarray
    places: np.ndarray
    codes: np.ndarray | None


def top_k(question: TopKQuestion, parts: Sequence[TopK], coverage: Coverage) -> TopK:
    """The best rows of all, at least one part; without `counts`."""
    queries, k = len(question.queries), question.k
    groups, numbers = None, [np.zeros(1, np.int32)] * len(parts)
    if question.group_by is not None:
        groups, numbers = union([part.groups for part in parts])
    columns = {
        name: concatenated([part.columns[name] for part in parts]) for name in parts[0].columns
    }
    rows = _rows(question, parts, numbers, columns)
    merits = merit(torch.from_numpy(rows.scores), question.order).double().numpy()
    order = np.lexsort((rows.ids, -merits, rows.cells))
    if rows.codes is not None:
        order = order[first_of_each(rows.cells[order], rows.codes[order])]
    cells = rows.cells[order]
    rank = np.arange(len(order)) - np.searchsorted(cells, cells, side="left")
    best = rank < k
    order, rank = order[best], rank[best]
    cell_count = queries * (1 if groups is None else len(groups))
    ids, places = np.full((cell_count, k), -1, np.int64), np.full((cell_count, k), -1, np.int64)
    scores = np.full((cell_count, k), np.nan, np.float32)
    where = (rows.cells[order], rank)
    ids[where], places[where], scores[where] = (
        rows.ids[order],
        rows.places[order],
        rows.scores[order],
    )

    def shaped(cells: np.ndarray) -> np.ndarray:
        """From [groups * queries, k], as cells are numbered, to the answer's shape."""
        if groups is None:
            return cells
        return np.ascontiguousarray(cells.reshape(-1, queries, k).swapaxes(0, 1))

    wanted = shaped(places).reshape(-1)
    index = pa.array(wanted, mask=wanted < 0)
    return TopK(
        rows=shaped(ids),
        scores=shaped(scores),
        groups=groups,
        columns={name: column.take(index) for name, column in columns.items()},
        coverage=coverage,
        plan=plan([part.plan for part in parts]),
    )


def _rows(
    question: TopKQuestion,
    parts: Sequence[TopK],
    numbers: Sequence[np.ndarray],
    columns: dict[str, pa.Array],
) -> _Rows:
    """The rows of all parts; `numbers` are those of each part's groups."""
    queries, k = len(question.queries), question.k
    cells, places, offset = [], [], 0
    for part, of_groups in zip(parts, numbers, strict=True):
        flat = np.flatnonzero(part.rows.reshape(-1) >= 0)
        query, inside = np.divmod(flat, k * len(of_groups))
        cells.append(of_groups[inside // k].astype(np.int64) * queries + query)
        places.append(flat + offset)
        offset += part.rows.size
    everywhere = np.concatenate(places)
    ids = np.concatenate([part.rows.reshape(-1) for part in parts])[everywhere]
    scores = np.concatenate([part.scores.reshape(-1) for part in parts])[everywhere]
    codes = None
    if question.distinct is not None:
        grouping = group(columns[question.distinct])
        codes = grouping.codes[everywhere].astype(np.int64)
        if grouping.values.null_count:
            without = codes == len(grouping.values) - 1
            codes[without] = -1 - ids[without]  # each stands for itself
    return _Rows(np.concatenate(cells), ids, scores, everywhere, codes)


def with_counts(
    question: TopKQuestion,
    found: TopK,
    ask: Callable[[pa.Array, pa.Array | None], Sequence[np.ndarray]],
) -> TopK:
    """The answer with how many rows share each hit's value of `distinct`.

    Args:
        question: With `distinct`.
        found: The best rows.
        ask: Gives each part's counts for values and groups, as `asked.sharing` takes them.
    """
    assert question.distinct is not None
    flat = found.rows.reshape(-1)
    counts = (flat >= 0).astype(np.int64)
    column = found.columns[question.distinct]
    known = np.flatnonzero((flat >= 0) & np.asarray(column.is_valid()))
    if len(known):
        groups = None
        if found.groups is not None:
            of_cell = known // question.k % len(found.groups)
            groups = found.groups.take(pa.array(of_cell))
        counts[known] = sum(ask(column.take(pa.array(known)), groups))
    return replace(found, counts=counts.reshape(found.rows.shape))


def sums(question: SumsQuestion, parts: Sequence[Sums], coverage: Coverage) -> Sums:
    """The sums of all, at least one part."""
    if question.bins is not None:
        groups = parts[0].groups
        numbers = [np.arange(len(groups), dtype=np.int32)] * len(parts)
    else:
        groups, numbers = union([part.groups for part in parts])
    return add_up(groups, numbers, parts, coverage)


def add_up(
    groups: pa.Array, numbers: Sequence[np.ndarray], parts: Sequence[Sums], coverage: Coverage
) -> Sums:
    """Sums of several parts.

    Args:
        groups: All groups.
        numbers: The place of each part's groups among them.
        parts: In the order in which they are added.
        coverage: Of all.
    """
    values = np.zeros((len(parts[0].values), len(groups)))
    counts = np.zeros(len(groups), np.int64)
    for place, part in zip(numbers, parts, strict=True):
        values[:, place] += part.values
        counts[place] += part.counts
    return Sums(groups, values, counts, coverage, plan([part.plan for part in parts]))


def coverage(parts: Sequence[Coverage], total: int, dropped: int, missing: int) -> Coverage:
    """How many rows the answers of all parts cover, of `total` of the layer."""
    rows = sum(part.rows for part in parts)
    nonfinite = sum(part.nonfinite for part in parts)
    return Coverage(rows, total, nonfinite, dropped, missing)


def plan(parts: Sequence[Plan]) -> Plan:
    """How several machines found their parts: what most of them did, and the slowest's costs."""
    used = Counter(part.strategy for part in parts)
    strategy = used.most_common(1)[0][0]
    ways = ", ".join(f"{name} on {count}" for name, count in used.most_common())
    first = next(part for part in parts if part.strategy == strategy)
    costs: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.costs.items():
            costs[name] = max(seconds, costs.get(name, 0.0))
    return Plan(strategy, f"{len(parts)} machines, {ways}; {first.reason}", costs)
