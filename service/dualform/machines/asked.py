"""What the server asks of a machine about its part: each function runs there, and its result
travels back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dualform.engine.api.index import answer
from dualform.engine.api.opened import last_step, query_tensor
from dualform.engine.api.results import Coverage, Sums, TopK
from dualform.engine.api.several import prepare_layer
from dualform.engine.api.totals import all_groups
from dualform.engine.groups.attributed import layer_sums
from dualform.engine.groups.self_influence import self_influence
from dualform.engine.memory.exact import ExactWeights
from dualform.engine.messages import needs
from dualform.engine.totals.coefficients import layer_coefficients, step_coefficients
from dualform.engine.totals.followed import Way, follow_on, ledgers_of
from dualform.engine.totals.metric import Head, Passed
from dualform.engine.totals.row_parts import rows_part
from dualform.engine.totals.streams import chunk_weights, in_row_order
from dualform.machines.machine import Here
from dualform.machines.unions import union
from dualform.machines.units import Units, with_units
from dualform.questions import (
    AttributeQuestion,
    OutputQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.v1 import attribution_pb2 as pb

Columns = list[tuple[str, pa.DataType]]
Steps = tuple[int, int, int]


def describe(here: Here) -> dict[int, Columns]:
    """The metadata columns of each row space that the part has rows of."""
    return {layer.row_space: layer.columns for layer in here.index.layers.values() if layer.shards}


def values_of(here: Here, layer: str, column: str, field: str) -> pa.Array:
    """A column's values, [groups], ascending, null last."""
    return here.index.layer(layer).space.grouping(column, field).values


def rows_or_sums(
    here: Here, question: TopKQuestion | SumsQuestion, units: Units | None = None
) -> TopK | Sums:
    """The part's own answer, of which the whole one is made."""
    here.take(needs.of_rows(here.index, question))
    layer = here.index.layer(question.layer)
    with here.index.using(layer) as opened:
        found = answer(with_units(opened, units), layer, question, here.stop)
        assert isinstance(found, (TopK, Sums))
        return found


def sharing(
    here: Here, question: TopKQuestion, values: pa.Array, groups: pa.Array | None
) -> np.ndarray:
    """How many of the part's rows that take part have these values of `distinct`, each in its
    group: int64 [m].

    Args:
        here: The part.
        question: With `distinct`.
        values: [m], not null.
        groups: [m], of `group_by`; None without.
    """
    assert question.distinct is not None
    layer = here.index.layer(question.layer)
    with here.index.using(layer) as opened:
        end = None
        if question.rank_by == "contribution":
            end = last_step(layer, opened.ledger, question.at_step)
        selected = layer.space.select(question.where, end, here.stop)
        asked = [(layer.space.grouping(question.distinct), values)]
        if question.group_by is not None and groups is not None:
            asked.append((layer.space.grouping(question.group_by), groups))
        rows = np.flatnonzero(selected)
        cells, wanted = np.zeros(len(rows), np.int64), np.zeros(len(values), np.int64)
        for grouping, cell in asked:
            joined, (ours, theirs) = union([grouping.values, cell])
            cells = cells * len(joined) + ours[grouping.codes[rows]]
            wanted = wanted * len(joined) + theirs
        found, counts = np.unique(cells, return_counts=True)
        place = np.minimum(np.searchsorted(found, wanted), max(0, len(found) - 1))
        if not len(found):
            return np.zeros(len(wanted), np.int64)
        return np.where(found[place] == wanted, counts[place], 0).astype(np.int64)


def sums_of_groups(here: Here, question: TopGroupsQuestion, units: Units | None = None) -> Sums:
    """Every group's sums, weights or contributions."""
    here.take(needs.of_rows(here.index, question))
    layer = here.index.layer(question.layer)
    with here.index.using(layer) as opened:
        return all_groups(with_units(opened, units), layer, question, here.stop)


def attributed_sums(
    here: Here, question: AttributeQuestion, units: Units | None = None
) -> tuple[pa.Array, np.ndarray]:
    """What the rows of each group added to the inputs' targets through the question's only layer:
    the groups, and float64 [inputs, groups]."""
    here.take(needs.of_attribute(here.index, question))
    (asked,) = question.layers
    layer = here.index.layer(asked.layer)
    with here.index.using(layer) as opened:
        grouping = layer.space.grouping(question.by, "by")
        one = prepare_layer(with_units(opened, units), layer, asked, grouping, question, here.stop)
        return grouping.values, layer_sums(one, 0, question.inputs, here.stop)


def steps_of(here: Here, name: str) -> tuple[int, int]:
    """The first and the last step that the part has rows of a layer of."""
    steps = here.index.layer(name).space.steps
    return int(steps.min()), int(steps.max())


@dataclass(frozen=True)
class Influence:
    """What a part's rows did to their own part of the loss, and the rows of steps of which others
    have rows too.

    Attributes:
        scores: float64 [groups].
        counts: int64 [groups], rows that take part, the others among them.
        coverage: Of all rows that pass the filter.
        keys, values: float32 [m, d_in] and [m, d_out], of the others.
        codes, steps: int64 [m], likewise.
    """

    scores: np.ndarray
    counts: np.ndarray
    coverage: Coverage
    keys: np.ndarray
    values: np.ndarray
    codes: np.ndarray
    steps: np.ndarray


def influence(
    here: Here, question: SelfInfluenceQuestion, groups: pa.Array, shared: Sequence[int]
) -> Influence:
    """Self-influence, of SGD's family.

    Args:
        here: The part.
        question: What is asked.
        groups: Values of `by`, [groups]: those that it is asked of.
        shared: Steps that others have rows of.
    """
    here.take(needs.of_self_influence(here.index, question, len(groups)))
    layer = here.index.layer(question.layer)
    with here.index.using(layer) as opened:
        grouping = layer.space.grouping(question.by, "by")
        selected = layer.space.select(question.where, stop=here.stop)
        _, (ours, theirs) = union([grouping.values, groups])
        place = np.full(max(ours.max(initial=-1), theirs.max(initial=-1)) + 1, -1, np.int64)
        place[theirs] = np.arange(len(groups))
        codes, steps = place[ours][grouping.codes], layer.space.steps
        inside = selected & (codes >= 0)
        elsewhere = inside & np.isin(steps, shared)
        coefficients = step_coefficients(opened.ledger, layer.manifest)
        scores = self_influence(
            layer, codes, inside & ~elsewhere, coefficients, len(groups), here.stop
        )
        rows = np.flatnonzero(elsewhere)
        return Influence(
            scores=scores,
            counts=np.bincount(codes[inside], minlength=len(groups)),
            coverage=Coverage.of(layer, selected),
            keys=layer.keys_at(rows).numpy(),
            values=layer.value_rows(rows).numpy(),
            codes=codes[rows],
            steps=steps[rows],
        )


def forwards(here: Here, name: str, units: Units) -> dict[int, Passed]:
    """Units followed over the part's steps: what the next part has to know of it."""
    layer = here.index.layer(name)
    here.take(needs.of_metric(here.index, layer))
    with here.index.using(layer) as opened:
        return {
            unit: opened.metrics.passed(layer, unit, between, here.stop)
            for unit, between in units.items()
        }


def backwards(here: Here, name: str, units: Units) -> dict[int, Head]:
    """What the part before has to know of units' later steps."""
    layer = here.index.layer(name)
    here.take(needs.of_metric(here.index, layer))
    with here.index.using(layer) as opened:
        return {
            unit: opened.metrics.find(layer, unit, between.last, here.stop, between).head()
            for unit, between in units.items()
        }


def follow_some(
    here: Here, question: OutputQuestion, groups: pa.Array | None, way: Way, steps: Steps
) -> Way:
    """Take a layer through the part's steps, each part of its weights with its own rows.

    Args:
        here: The part.
        question: Which rows take part.
        groups: Values of `group_by`, [groups], that are kept apart; None for one part.
        way: Where the layer is.
        steps: Which steps to take, half-open, and before which it is to arrive.
    """
    here.take(2 * needs.of_rows(here.index, question))
    layer = here.index.layer(question.layer)
    first, end, last = steps
    with here.index.using(layer) as opened:
        before = None if question.at_step is None else last
        selected = layer.space.select(question.where, before, here.stop)
        codes, parts = np.where(selected, 0, -1), 1
        if groups is not None and question.group_by is not None:
            grouping = layer.space.grouping(question.group_by)
            _, (whole, ours) = union([groups, grouping.values])
            place = np.argsort(whole)
            codes, parts = np.where(selected, place[ours][grouping.codes], -1), len(groups)
        way.run.go_on(*ledgers_of(layer.manifest, opened.ledger))
        way = follow_on(layer, way, first, end, last, codes, parts, here.stop)
        way.run.go_on((), ())
        return way


@dataclass(frozen=True)
class Counted:
    """Rows of a part, counted.

    Attributes:
        coverage: Those that take part.
        groups: By column its values, [groups], how many rows take part of each, int64 [groups], and
            how many there are.
    """

    coverage: Coverage
    groups: dict[str, tuple[pa.Array, np.ndarray, np.ndarray]]


def counted(
    here: Here, name: str, where: pb.Filter | None, before: int | None, columns: Sequence[str]
) -> Counted:
    """Count a layer's rows that pass a filter and lie before a step."""
    layer = here.index.layer(name)
    with here.index.using(layer):
        selected = layer.space.select(where, before, here.stop)
        groups = {}
        for column in columns:
            grouping = layer.space.grouping(column)
            taken = layer.space.count(column, selected)
            groups[column] = (grouping.values, taken, grouping.counts)
        return Counted(Coverage.of(layer, selected), groups)


@dataclass(frozen=True)
class Added:
    """What rows of a part add to an output.

    Attributes:
        groups: [groups], ascending, null last; None without groups.
        values: float64 [n, groups, d_out]; without groups, one.
    """

    groups: pa.Array | None
    values: np.ndarray


def added(here: Here, question: OutputQuestion, start: int, grouped: bool) -> Added:
    """What the rows that take part add to the output, from a step on; of SGD's family.

    Args:
        here: The part.
        question: What is asked.
        start: Rows of earlier steps do not count: their sum is in a stored state.
        grouped: Keep the groups of `group_by` apart.
    """
    here.take(needs.of_rows(here.index, question))
    layer = here.index.layer(question.layer)
    with here.index.using(layer) as opened:
        queries = query_tensor(layer, question.queries)
        end = last_step(layer, opened.ledger, question.at_step)
        before = None if question.at_step is None else end
        selected = layer.space.select(question.where, before, here.stop)
        if start:
            selected = selected & (layer.space.steps >= start)
        coefficients = layer_coefficients(opened.ledger, layer.manifest, end, start)
        grouping = None
        if grouped and question.group_by is not None:
            grouping = layer.space.grouping(question.group_by)
        values = rows_part(layer, queries, coefficients, grouping, selected, here.stop)
        return Added(None if grouping is None else grouping.values, values)


def weights(
    here: Here, question: StreamWeightsQuestion, shard: int, first: int, rows: int
) -> tuple[int, np.ndarray]:
    """The weights of some rows of one of the part's shards, in row order: the first row's id, and
    float32 [n, rows].

    Args:
        here: The part.
        question: What is asked.
        shard: Its number among the part's.
        first, rows: Which of its rows, by the order of their ids.
    """
    here.take(needs.of_stream(here.index, question))
    layer = here.index.layer(question.layer)
    with here.index.using(layer):
        found = layer.shards[shard]
        chunk = in_row_order(layer, found)[first : first + rows]
        exact = ExactWeights(query_tensor(layer, question.queries))
        start = int(layer.space.ids[found.start + chunk[0]])
        return start, chunk_weights(layer, found, chunk, exact, here.stop)


def verify(here: Here) -> None:
    """Hash every file of the part."""
    here.index.verify_files(here.stop)


def identities(here: Here) -> dict[str, tuple[int, ...] | None]:
    """What changes of the part's files where they are written again."""
    return here.index.identities()
