"""Reducers, however the memory is split over them and in whatever order they are merged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.groups.contribution_sum import ContributionSum
from dualform.engine.memory.fold import Fold, Reducer
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.bins import binned
from dualform.engine.rows.groups import Groups
from dualform.engine.rows.table import Table
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.ranking import Ranking
from dualform.engine.topk.top_k import Hits, TopK
from dualform.engine.totals.coefficients import LayerCoefficients
from dualform.engine.totals.distinct_keys import DistinctSum, Pairs
from dualform.engine.totals.group_sums import GroupCount, GroupSum, KeySum
from dualform.engine.totals.row_parts import WeightedValues
from dualform.store.grouping import Grouping
from dualform.store.ledger import Coefficients

LABELS = ["a", "b", "c", None]
STEPS = 5
ORDERS = ("largest", "smallest", "absolute")


@dataclass(frozen=True)
class Memory:
    """Rows that come again, tie, and are sometimes not finite; and queries."""

    keys: np.ndarray
    values: np.ndarray
    ids: np.ndarray
    columns: dict[str, list[object]]
    steps: np.ndarray
    queries: np.ndarray
    rng: np.random.Generator

    @property
    def finite(self) -> np.ndarray:
        return np.isfinite(self.keys).all(axis=1)

    def table(self, rows: np.ndarray) -> Table:
        """What is known of some rows."""
        columns = {
            name: pa.array([column[row] for row in rows], arrow_type(column))
            for name, column in self.columns.items()
        }
        return Table(self.ids[rows], self.steps[rows], lambda: columns)

    def tiles(self, live: bool) -> list[Tile]:
        """Every row in one tile: each with a table of its own, or all of them with the same."""
        rows = self.rng.permutation(len(self.keys))
        cuts = np.sort(self.rng.integers(0, len(rows) + 1, self.rng.integers(0, 9)))
        whole = self.table(np.arange(len(self.keys)))
        norms = np.linalg.norm(np.where(self.finite[:, None], self.keys, 0).astype(float), axis=1)
        tiles = []
        for some in np.split(rows, cuts):
            some = np.sort(some)
            finite = self.finite[some]
            tiles.append(
                Tile(
                    self.table(some) if live else whole,
                    np.arange(len(some)) if live else some,
                    torch.from_numpy(self.keys[some]),
                    torch.from_numpy(self.values[some]),
                    float(norms[some].max(initial=0)) * (1 + 1e-9),
                    None if finite.all() else finite,
                )
            )
        return tiles

    def merged(self, make: Callable[[], Reducer], live: bool) -> object:
        """The answer of one to four reducers that took some tiles each, merged in any order."""
        reducers = [make() for _ in range(self.rng.integers(1, 5))]
        folds = [Fold(torch.from_numpy(self.queries), [each]) for each in reducers]
        for tile in self.tiles(live):
            folds[self.rng.integers(len(folds))].take(tile)
        while len(reducers) > 1:
            self.rng.shuffle(reducers)
            other = reducers.pop()
            reducers[0].merge(other)
        return reducers[0].result()


def arrow_type(column: list[object]) -> pa.DataType:
    """A column's type, whichever of its rows a tile has."""
    return pa.string() if any(isinstance(value, str) for value in column) else pa.int64()


@st.composite
def memories(draw: st.DrawFn, nonfinite: bool = False) -> Memory:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, d = draw(st.integers(1, 70)), draw(st.integers(1, 4))
    keys = rng.integers(-2, 3, (rows, d)).astype(np.float32)
    if draw(st.booleans()):
        distinct = draw(st.integers(1, rows))
        keys = rng.standard_normal((distinct, d)).astype(np.float32)[
            rng.integers(0, distinct, rows)
        ]
    if nonfinite:
        keys[rng.random(rows) < 0.1] = np.nan
    queries = np.concatenate(
        [np.nan_to_num(keys[:2]), np.zeros((1, d)), rng.standard_normal((1, d))]
    )
    example = rng.integers(0, draw(st.sampled_from([1, 4, 30])), rows)
    return Memory(
        keys,
        rng.standard_normal((rows, 3)).astype(np.float32),
        rng.permutation(3 * rows)[:rows].astype(np.int64),
        {
            "label": [LABELS[i] for i in rng.integers(0, 4, rows)],
            "example": [None if i % 5 == 4 else int(i) for i in example],
            "noise": rng.integers(0, 12, rows).tolist(),
        },
        rng.integers(0, STEPS, rows),
        queries.astype(np.float32),
        rng,
    )


def grouping(memory: Memory, column: str) -> Grouping:
    return memory.table(np.arange(len(memory.keys))).grouping(column)


def names(column: list[object]) -> list[object]:
    """A column's values, ascending, null last."""
    values = sorted({value for value in column if value is not None})  # type: ignore[type-var]
    return [*values, *([None] if None in column else [])]


def expected(
    scores: np.ndarray, memory: Memory, k: int, order: str, allowed: np.ndarray, distinct: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and scores [k] of one query, by sorting all rows."""
    merit = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
    rows = sorted(np.flatnonzero(allowed), key=lambda t: (-float(merit[t]), memory.ids[t]))
    if distinct:
        seen, kept = set(), []
        for row in rows:
            value = memory.columns["example"][row]
            if value is None or value not in seen:
                seen.add(value)
                kept.append(row)
        rows = kept
    ids, best = np.full(k, -1), np.full(k, np.nan, np.float32)
    ids[: len(rows)], best[: len(rows)] = memory.ids[rows[:k]], scores[rows[:k]]
    return ids, best


def check_hits(
    hits: Hits, scores: np.ndarray, memory: Memory, ranking: Ranking, grouped: bool
) -> None:
    labels = memory.columns["label"]
    groups = names(labels) if grouped else [None]
    assert hits.groups.to_pylist() == groups
    for g, value in enumerate(groups):
        allowed = memory.finite & np.array([not grouped or label == value for label in labels])
        for i in range(len(memory.queries)):
            distinct = ranking.distinct is not None
            ids, best = expected(scores[i], memory, ranking.k, ranking.order, allowed, distinct)
            np.testing.assert_array_equal(hits.ids[i, g], ids)
            np.testing.assert_array_equal(hits.scores[i, g].view(np.int32), best.view(np.int32))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=count(15, 1000), deadline=None)
@given(memory=memories(nonfinite=True), data=st.data())
def test_top_k(order: str, memory: Memory, data: st.DataObject) -> None:
    k = data.draw(st.sampled_from([1, 3, 100]), "k")
    grouped, distinct = data.draw(st.booleans(), "grouped"), data.draw(st.booleans(), "distinct")
    live = data.draw(st.booleans(), "live")
    by: Grouping | str | None = None
    of: Grouping | str | None = None
    if grouped:
        by = "label" if live else grouping(memory, "label")
    if distinct:
        of = "example" if live else grouping(memory, "example")
    ranking = Ranking(k, order, by, None, of)
    hits = memory.merged(lambda: TopK(torch.from_numpy(memory.queries), ranking), live)
    scores = reference.exact_scores(np.nan_to_num(memory.keys), memory.queries)
    assert isinstance(hits, Hits)
    check_hits(hits, scores, memory, ranking, grouped)
    place = {int(row): place for place, row in enumerate(memory.ids)}
    found = sorted({int(row) for row in hits.ids.ravel() if row >= 0})
    assert list(hits.columns) == found
    for name in ("label", "noise"):
        kept = [hits.columns[row][name] for row in found]
        assert kept == [memory.columns[name][place[row]] for row in found]


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=count(8, 300), deadline=None)
@given(memory=memories(), data=st.data())
def test_top_k_by_contribution(order: str, memory: Memory, data: st.DataObject) -> None:
    rng = memory.rng
    weight, bias = (Coefficients(1.0, 0.0, rng.standard_normal(STEPS)) for _ in range(2))
    ranking = Ranking(
        data.draw(st.sampled_from([1, 3, 100]), "k"),
        order,
        "label" if data.draw(st.booleans(), "grouped") else None,
        Contribution(LayerCoefficients(weight, bias), 1),
    )
    hits = memory.merged(lambda: TopK(torch.from_numpy(memory.queries), ranking), True)
    dots = reference.exact_dots(memory.keys, memory.queries)
    scores = weight.c[memory.steps] * dots + bias.c[memory.steps]
    scores = (scores * memory.values[:, 1].astype(np.float64)).astype(np.float32) + np.float32(0)
    assert isinstance(hits, Hits)
    check_hits(hits, scores, memory, ranking, ranking.grouping is not None)


@settings(max_examples=count(25, 2000), deadline=None)
@given(memory=memories(), data=st.data())
def test_sums_counts_and_key_sums(memory: Memory, data: st.DataObject) -> None:
    column = data.draw(st.sampled_from(["label", "example", "noise"]), "column")
    kind = data.draw(st.sampled_from(["live", "known", "binned"]), "kind")
    absolute = data.draw(st.booleans(), "absolute")
    queries = torch.from_numpy(memory.queries)
    cells = [memory.columns[column]]
    values = names(cells[0])
    by: Grouping | str = column
    if kind == "known":
        by = grouping(memory, column)
    elif kind == "binned":
        whole = memory.table(np.arange(len(memory.keys)))
        by = binned("noise", whole.columns["noise"], [0, 3, 12])
        cells = [[0.0 if value < 3 else 3.0 for value in memory.columns["noise"]]]  # type: ignore
        values = [0.0, 3.0]
    live = kind == "live"
    sums = memory.merged(lambda: GroupSum(len(queries), Groups(by), absolute), live)
    counts = memory.merged(lambda: GroupCount(Groups(by)), live)
    key_sums = memory.merged(lambda: KeySum(queries.shape[1], Groups(by)), live)
    weights = memory.queries.astype(np.float64) @ memory.keys.T.astype(np.float64)
    terms = np.abs(memory.queries).astype(np.float64) @ np.abs(memory.keys).T
    for g, value in enumerate(values):
        members = np.array([cell == value for cell in cells[0]])
        total = (np.abs(weights) if absolute else weights)[:, members].sum(axis=1)
        assert np.all(np.abs(sums[:, g] - total) <= 1e-6 * terms[:, members].sum(axis=1))  # type: ignore
        assert counts[g] == members.sum()  # type: ignore[index]
        signed = memory.queries.astype(np.float64) @ key_sums[g]  # type: ignore[index]
        difference = np.abs(signed - weights[:, members].sum(axis=1))
        assert np.all(difference <= 1e-12 * terms[:, members].sum(axis=1))
    assert len(values) == sums.shape[1] == len(counts) == len(key_sums)  # type: ignore


@settings(max_examples=count(20, 1000), deadline=None)
@given(memory=memories(), data=st.data())
def test_outputs(memory: Memory, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["whole", "live", "known"]), "kind")
    bias = data.draw(st.booleans(), "bias")
    c, of_bias = memory.rng.standard_normal((2, STEPS))
    coefficients = LayerCoefficients(
        Coefficients(1.0, 0.0, c), Coefficients(1.0, 0.0, of_bias) if bias else None
    )
    by: Grouping | str | None = {"whole": None, "live": "noise"}.get(kind)
    if kind == "known":
        by = grouping(memory, "noise")
    found = memory.merged(
        lambda: WeightedValues(len(memory.queries), 3, coefficients, Groups(by)),
        kind != "known",
    )
    assert isinstance(found, np.ndarray)
    noise = memory.columns["noise"]
    for g, value in enumerate([None] if kind == "whole" else names(noise)):
        members = np.array([kind == "whole" or cell == value for cell in noise])
        keys, values = (
            memory.keys[members].astype(np.float64),
            memory.values[members].astype(np.float64),
        )
        wide, steps = memory.queries.astype(np.float64), memory.steps[members]
        added = of_bias[steps] if bias else np.zeros(len(steps))
        total = (c[steps] * (wide @ keys.T) + added) @ values
        size = np.abs(c[steps]) * (np.abs(wide) @ np.abs(keys.T)) + np.abs(added)
        assert np.all(np.abs(found[:, g] - total) <= 1e-6 * (size @ np.abs(values)))


@settings(max_examples=count(20, 1000), deadline=None)
@given(memory=memories(), data=st.data())
def test_sums_of_contributions(memory: Memory, data: st.DataObject) -> None:
    bias, live = data.draw(st.booleans(), "bias"), data.draw(st.booleans(), "live")
    c, of_bias = memory.rng.standard_normal((2, STEPS))
    coefficients = LayerCoefficients(
        Coefficients(1.0, 0.0, c), Coefficients(1.0, 0.0, of_bias) if bias else None
    )
    direction = memory.rng.standard_normal((len(memory.queries), 3)).astype(np.float32)
    along = data.draw(st.booleans(), "along")
    contribution = (
        Contribution(coefficients, directions=torch.from_numpy(direction))
        if along
        else Contribution(coefficients, 1)
    )
    by: Grouping | str = "example" if live else grouping(memory, "example")
    found = memory.merged(
        lambda: ContributionSum(len(memory.queries), Groups(by), contribution), live
    )
    assert isinstance(found, np.ndarray)
    g = direction.astype(np.float64) if along else np.eye(3)[[1] * len(memory.queries)]
    example = memory.columns["example"]
    for number, value in enumerate(names(example)):
        members = np.array([cell == value for cell in example])
        keys, values = (
            memory.keys[members].astype(np.float64),
            memory.values[members].astype(np.float64),
        )
        wide, steps = memory.queries.astype(np.float64), memory.steps[members]
        added = of_bias[steps] if bias else np.zeros(len(steps))
        total = ((c[steps] * (wide @ keys.T) + added) * (g @ values.T)).sum(axis=1)
        size = np.abs(c[steps]) * (np.abs(wide) @ np.abs(keys.T)) + np.abs(added)
        size = (size * (np.abs(g) @ np.abs(values.T))).sum(axis=1)
        assert np.all(np.abs(found[:, number] - total) <= 1e-6 * size)


@settings(max_examples=count(12, 600), deadline=None)
@given(memory=memories(), data=st.data())
def test_sums_over_distinct_keys(memory: Memory, data: st.DataObject) -> None:
    """Two parts of a memory, each of which knows which of its own keys are equal."""
    absolute = data.draw(st.booleans(), "absolute")
    queries = torch.from_numpy(memory.queries)
    cut = data.draw(st.integers(0, len(memory.keys)), "cut")
    found: list[DistinctSum] = []
    for rows in np.split(np.arange(len(memory.keys)), [cut]):
        table, keys = memory.table(rows), memory.keys[rows]
        _, first, equal = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        by = table.grouping("label")
        standing = first[equal.reshape(-1)] if len(rows) else np.zeros(0, np.int64)
        pairs = Pairs.count(standing, np.ones(len(rows), bool), by)
        found.append(DistinctSum(len(queries), by, pairs, absolute))
        if len(rows):
            first_of_keys = np.unique(first)
            tile = Tile(table, first_of_keys, torch.from_numpy(keys[first_of_keys]), None, 1e3)
            Fold(queries, [found[-1]]).take(tile)
    found[0].merge(found[1])
    weights = memory.queries.astype(np.float64) @ memory.keys.T.astype(np.float64)
    terms = np.abs(memory.queries).astype(np.float64) @ np.abs(memory.keys).T
    labels = memory.columns["label"]
    for g, value in enumerate(names(labels)):
        first_of_keys = np.array([label == value for label in labels])
        total = (np.abs(weights) if absolute else weights)[:, first_of_keys].sum(axis=1)
        error = np.abs(found[0].result()[:, g] - total)
        assert np.all(error <= 1e-6 * terms[:, first_of_keys].sum(axis=1))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=count(8, 300), deadline=None)
@given(memory=memories(), data=st.data())
def test_an_index_its_shards_and_what_is_not_in_it(
    order: str, memory: Memory, data: st.DataObject
) -> None:
    """Part of the rows in an index, which is read shard by shard; part of them seen once."""
    k = data.draw(st.sampled_from([1, 3, 100]), "k")
    rows = len(memory.keys)
    part = data.draw(st.integers(1, rows), "in the index")
    grouped, distinct = data.draw(st.booleans(), "grouped"), data.draw(st.booleans(), "distinct")
    # In an index, a row's id is its place.
    memory = Memory(**{**memory.__dict__, "ids": np.arange(rows)})
    columns = {name: [str(cell) for cell in memory.columns[name]] for name in ("label", "example")}
    memory = Memory(**{**memory.__dict__, "columns": {**memory.columns, **columns}})
    queries = torch.from_numpy(memory.queries)
    with tempfile.TemporaryDirectory() as folder:
        path = make_index(
            Path(folder),
            memory.keys[:part],
            None,
            shard_rows=data.draw(st.integers(1, 30), "shard rows"),
            label=columns["label"][:part],
            example=columns["example"][:part],
        )
        with Index.open(path, device="cpu") as index:
            layer = index.layers["fc"]
            known = Ranking(
                k,
                order,
                layer.space.grouping("label") if grouped else None,
                None,
                layer.space.grouping("example") if distinct else None,
            )
            by_column = Ranking(k, order, "label" if grouped else None, None,
                                "example" if distinct else None)  # fmt: skip
            reducers: list[TopK] = []
            for shard in layer.shards:
                reducers.append(TopK(queries, known, layer))
                for tile in shard.tiles(np.ones(shard.rows, bool), len(queries)):
                    Fold(queries, [reducers[-1]]).take(tile)
            rest = np.arange(part, rows)
            if len(rest):
                reducers.append(TopK(queries, by_column))
                keys = torch.from_numpy(memory.keys[rest])
                tile = Tile(memory.table(rest), np.arange(len(rest)), keys, None, 1e3)
                Fold(queries, [reducers[-1]]).take(tile)
            memory.rng.shuffle(reducers)  # type: ignore[arg-type]
            for other in reducers[1:]:
                reducers[0].merge(other)
            hits = reducers[0].result()
    scores = reference.exact_scores(memory.keys, memory.queries)
    labels = columns["label"]
    for g, value in enumerate(hits.groups.to_pylist()):
        allowed = np.array([not grouped or label == value for label in labels])
        for i in range(len(queries)):
            merit = {"largest": 1, "smallest": -1, "absolute": 0}[order]
            ranked = np.abs(scores[i]) if merit == 0 else merit * scores[i]
            best = sorted(np.flatnonzero(allowed), key=lambda t: (-float(ranked[t]), t))
            if distinct:
                seen: set[object] = set()
                best = [
                    t
                    for t in best
                    if columns["example"][t] not in seen and not seen.add(columns["example"][t])  # type: ignore
                ]
            got = hits.ids[i, g]
            assert got[got >= 0].tolist() == best[:k]
            np.testing.assert_array_equal(hits.scores[i, g, : len(best[:k])], scores[i][best[:k]])


def test_other_questions_are_not_merged() -> None:
    queries = torch.ones(1, 2)
    best = TopK(queries, Ranking(3, "largest"))
    others = [
        TopK(queries, Ranking(4, "largest")),
        TopK(queries, Ranking(3, "smallest")),
        TopK(2 * queries, Ranking(3, "largest")),
        TopK(queries, Ranking(3, "largest", distinct="example")),
    ]
    for other in others:
        with pytest.raises(ValueError, match="same question"):
            best.merge(other)
    with pytest.raises(ValueError, match="the other does not"):
        best.merge(TopK(queries, Ranking(3, "largest", "label")))
    some = LayerCoefficients(Coefficients(1.0, 0.0, np.ones(STEPS)), None)
    ours, theirs = (ContributionSum(1, Groups("a"), Contribution(some, unit)) for unit in (0, 1))
    with pytest.raises(ValueError, match="same question"):
        ours.merge(theirs)
    with pytest.raises(ValueError, match="signed and absolute"):
        GroupSum(1, Groups("a"), True).merge(GroupSum(1, Groups("a"), False))
