"""Every question to an index in parts, in this process, against the same index as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.api.results import Attribution, DualOutput, Sums, TopGroups, TopK
from dualform.engine.errors import EngineError
from dualform.engine.messages.versions import version_at
from dualform.machines.spread import Machines, SpreadIndex
from dualform.questions import (
    AttributedLayer,
    AttributeQuestion,
    ExplainQuestion,
    OutputQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)

from .near import NearFleet

LAYER, D_IN, D_OUT = "2", 48, 48
WHERE = parse_filter("label >= 3 and step != 7 or example is null")
QUERIES = np.random.default_rng(1).standard_normal((4, D_IN)).astype(np.float32)
DIRECTIONS = np.random.default_rng(2).standard_normal((4, D_OUT)).astype(np.float32)


def spread(path: Path, machines: int) -> SpreadIndex:
    return Machines(NearFleet(machines), "cpu").open(version_at(path))


@pytest.fixture(scope="module")
def whole(sharded_index: Path) -> Iterator[Index]:
    with Index.open(sharded_index, device="cpu") as index:
        yield index


@pytest.fixture(scope="module", params=[1, 2, 3, 5, 9])
def parts(request: Any, sharded_index: Path) -> Iterator[SpreadIndex]:
    """Nine machines are more than there are shards."""
    with spread(sharded_index, request.param) as index:
        yield index


def same_rows(ours: TopK, theirs: TopK) -> None:
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    assert ours.scores.tobytes() == theirs.scores.tobytes()
    assert list(ours.columns) == list(theirs.columns)
    for name, column in theirs.columns.items():
        assert ours.columns[name].equals(column), name
    assert (ours.groups is None) == (theirs.groups is None)
    assert theirs.groups is None or ours.groups.equals(theirs.groups)
    np.testing.assert_array_equal(ours.counts, theirs.counts)  # type: ignore[arg-type]
    assert ours.coverage == theirs.coverage


@pytest.mark.parametrize("where", [None, WHERE], ids=["all", "some"])
@pytest.mark.parametrize(
    "options",
    [
        {"k": 2000},
        {"order": "absolute", "strategy": "scan"},
        {"order": "smallest", "group_by": "task"},
        {"group_by": "step", "k": 2},
        {"distinct": "example"},
        {"distinct": "label", "group_by": "task", "order": "absolute"},
        {"rank_by": "contribution", "unit": 5},
        {"rank_by": "contribution", "direction": DIRECTIONS, "at_step": 31, "distinct": "label"},
    ],
    ids=str,
)
def test_top_k(whole: Index, parts: SpreadIndex, options: dict[str, Any], where: Any) -> None:
    question = TopKQuestion(LAYER, QUERIES, where=where, **options)
    same_rows(parts.ask(question), whole.ask(question))


def terms(index: Index, where: Any) -> np.ndarray:
    """Of each query, the sum of |key| . |query| over all rows that take part: the rule's measure
    of sums, float64 [n]."""
    layer = index.layer(LAYER)
    chosen = np.flatnonzero(layer.space.select(where))
    keys = layer.keys_at(chosen).double().abs().numpy()
    return np.asarray((np.abs(QUERIES.astype(np.float64)) @ keys.T).sum(axis=1))


@pytest.mark.parametrize("where", [None, WHERE], ids=["all", "some"])
@pytest.mark.parametrize(
    "options",
    [
        {"group_by": "label"},
        {"group_by": "example", "absolute": True},
        {"group_by": "step", "bins": (0.0, 7.0, 11.5, 60.0)},
        {"group_by": "task", "strategy": "scan"},
    ],
    ids=str,
)
def test_sums(whole: Index, parts: SpreadIndex, options: dict[str, Any], where: Any) -> None:
    question = SumsQuestion(LAYER, QUERIES, where=where, **options)
    ours, theirs = parts.ask(question), whole.ask(question)
    assert isinstance(ours, Sums)
    assert ours.groups.equals(theirs.groups)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    assert ours.coverage == theirs.coverage
    assert np.all(np.abs(ours.values - theirs.values) <= 1e-6 * terms(whole, where)[:, None])


@pytest.mark.parametrize(
    "options",
    [
        {"by": "example", "k": 20},
        {"by": "label", "order": "absolute", "where": WHERE},
        {"by": "example", "rank_by": "contribution", "direction": DIRECTIONS},
        {"by": "task", "rank_by": "contribution", "unit": 1, "at_step": 40, "where": WHERE},
    ],
    ids=str,
)
def test_best_groups(whole: Index, parts: SpreadIndex, options: dict[str, Any]) -> None:
    question = TopGroupsQuestion(LAYER, QUERIES, **options)
    ours, theirs = parts.ask(question), whole.ask(question)
    assert isinstance(ours, TopGroups)
    assert ours.groups.equals(theirs.groups)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-5, atol=1e-6)
    assert ours.coverage == theirs.coverage


def same_output(ours: DualOutput, theirs: DualOutput) -> None:
    """Outputs of this network are of the order of 1, and float32."""
    for name in ("values", "initial", "trained", "residual"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if b is not None:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
    assert (ours.groups is None) == (theirs.groups is None)
    assert theirs.groups is None or ours.groups.equals(theirs.groups)
    np.testing.assert_array_equal(ours.counts, theirs.counts)  # type: ignore[arg-type]
    assert ours.coverage == theirs.coverage


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "scan"},
        {"at_step": 23},
        {"group_by": "label"},
        {"where": WHERE},
        {"where": WHERE, "at_step": 50, "group_by": "task"},
    ],
    ids=str,
)
def test_outputs(whole: Index, parts: SpreadIndex, options: dict[str, Any]) -> None:
    question = OutputQuestion(LAYER, QUERIES, **options)
    ours = parts.ask(question)
    assert isinstance(ours, DualOutput)
    same_output(ours, whole.ask(question))
    assert ours.plan.strategy == whole.ask(question).plan.strategy


def test_an_output_that_is_stored_asks_no_machine(parts: SpreadIndex) -> None:
    before = parts._fleet.traffic.sent
    parts.ask(OutputQuestion(LAYER, QUERIES))
    assert parts._fleet.traffic.sent == before


def test_explain(whole: Index, parts: SpreadIndex) -> None:
    first = np.random.default_rng(3).random((3, 64), np.float32)
    layers = (("0", first), (LAYER, QUERIES))
    question = ExplainQuestion(layers, k=5, group_by="label", output=True, where=WHERE)
    pairs = zip(parts.explain_layers(question), whole.explain_layers(question), strict=True)
    for ours, theirs in pairs:
        assert ours.top_k is not None
        assert theirs.top_k is not None
        same_rows(ours.top_k, theirs.top_k)
        assert ours.output is not None
        assert theirs.output is not None
        same_output(ours.output, theirs.output)
        assert ours.sums is not None
        assert theirs.sums is not None
        assert ours.sums.groups.equals(theirs.sums.groups)
        np.testing.assert_allclose(ours.sums.values, theirs.sums.values, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("k", [7, None])
def test_attribute(whole: Index, parts: SpreadIndex, k: int | None) -> None:
    rng = np.random.default_rng(4)
    places = np.array([0, 0, 1, 3, 3, 3])
    layers = (
        AttributedLayer(LAYER, QUERIES[[0, 1, 2, 3, 0, 1]], DIRECTIONS[[0, 1, 2, 3, 0, 1]], places),
        AttributedLayer(
            "4",
            rng.standard_normal((4, 48)).astype(np.float32),
            rng.standard_normal((4, 10)).astype(np.float32),
        ),
    )
    question = AttributeQuestion(layers, inputs=4, by="example", k=k, where=WHERE)
    ours, theirs = parts.attribute(question), whole.attribute(question)
    assert isinstance(ours, Attribution)
    assert ours.groups.equals(theirs.groups)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    assert list(ours.coverage) == list(theirs.coverage)
    for name in ("scores", "by_layer", "initial", "rows", "residual", "outputs"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None)
        if b is not None:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def test_weights_in_row_order(whole: Index, parts: SpreadIndex) -> None:
    question = StreamWeightsQuestion(LAYER, QUERIES)
    pairs = zip(
        parts.chunks(question, chunk_bytes=1600),
        whole.chunks(question, chunk_bytes=1600),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.start == theirs.start
        assert ours.weights.tobytes() == theirs.weights.tobytes()


def test_what_is_known_without_asking(whole: Index, parts: SpreadIndex) -> None:
    assert list(parts.layers) == list(whole.layers)
    for name, theirs in whole.layers.items():
        ours = parts.layers[name]
        assert ours.columns == theirs.columns
        assert (ours.rows, ours.nonfinite) == (theirs.rows, theirs.nonfinite)
    parts.verify_files()
    assert parts.identities() == whole.identities()


@pytest.mark.parametrize(
    "question",
    [
        TopKQuestion("9", QUERIES),
        TopKQuestion(LAYER, QUERIES[:, :5]),
        TopKQuestion(LAYER, QUERIES, group_by="colour"),
        TopKQuestion(LAYER, QUERIES, distinct="colour"),
        TopKQuestion(LAYER, QUERIES, strategy="certified"),
        TopKQuestion(LAYER, QUERIES, rank_by="contribution", unit=48),
        TopKQuestion(LAYER, QUERIES, where=parse_filter("colour = 3")),
        TopKQuestion(LAYER, QUERIES, where=parse_filter("label = 'red'")),
        SumsQuestion(LAYER, QUERIES, "task", bins=(0.0, 1.0)),
        TopGroupsQuestion(LAYER, QUERIES, by="position"),
        TopGroupsQuestion(LAYER, QUERIES, by="colour"),
        OutputQuestion(LAYER, QUERIES, at_step=61),
        OutputQuestion(LAYER, QUERIES, strategy="parts"),
        OutputQuestion(LAYER, QUERIES, group_by="colour"),
    ],
    ids=lambda question: str(type(question).__name__),
)
def test_refusals_are_those_of_one_machine(whole: Index, parts: SpreadIndex, question: Any) -> None:
    errors = []
    for index in (parts, whole):
        with pytest.raises(EngineError) as caught:
            index.ask(question)
        errors.append(caught.value)
    ours, theirs = errors
    assert type(ours) is type(theirs)
    assert (str(ours), ours.field, ours.reason) == (str(theirs), theirs.field, theirs.reason)
