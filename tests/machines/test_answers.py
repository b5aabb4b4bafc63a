"""Every question to an index in parts, in this process, against the same index as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.api.results import Attribution, DualOutput, Sums, TopGroups, TopK
from dualform.engine.errors import (
    DataLossError,
    EngineError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from dualform.engine.messages.versions import version_at
from dualform.index import build_index, pack_index
from dualform.machines.spread import Machines, SpreadIndex
from dualform.questions import (
    AttributedLayer,
    AttributeQuestion,
    ExplainQuestion,
    OutputQuestion,
    SelfInfluenceQuestion,
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


def same_column(ours: pa.Array | None, theirs: pa.Array | None) -> None:
    """Also where some of it is NaN, which Arrow's own comparison finds unequal to itself."""
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.type == theirs.type
        assert repr(ours.to_pylist()) == repr(theirs.to_pylist())


def same_rows(ours: TopK, theirs: TopK) -> None:
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    assert ours.scores.tobytes() == theirs.scores.tobytes()
    assert list(ours.columns) == list(theirs.columns)
    for name, column in theirs.columns.items():
        same_column(ours.columns[name], column)
    same_column(ours.groups, theirs.groups)
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
        {"rank_by": "cosine", "group_by": "label", "k": 3},
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
        {"by": "example", "rank_by": "cosine"},
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
    same_column(ours.groups, theirs.groups)
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


@pytest.mark.parametrize(
    "options",
    [{}, {"by": "label"}, {"by": "label", "where": WHERE, "first": 2, "count": 3}, {"first": 5000}],
    ids=str,
)
def test_self_influence(whole: Index, parts: SpreadIndex, options: dict[str, Any]) -> None:
    """Also of a step whose rows are on two machines: a label has rows of it on both."""
    question = SelfInfluenceQuestion(LAYER, **options)
    ours, theirs = parts.self_influence(question), whole.self_influence(question)
    assert ours.groups.equals(theirs.groups)
    np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-12, atol=0)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    assert (ours.total, ours.coverage) == (theirs.total, theirs.coverage)


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


def test_rows_that_are_out_of_reach(sharded_index: Path, whole: Index) -> None:
    fleet = NearFleet(3)
    with Machines(fleet, "cpu").open(version_at(sharded_index)) as parts:
        spaces = parts._published.spaces
        (_, part) = parts._parts[1]
        space = parts.layer(LAYER).row_space
        shards = [spaces[space].shards[number] for number in part.numbers(space)]
        first, last = shards[0].start, shards[-1].start + shards[-1].rows
        fleet.gone = {1}
        asked = [
            TopKQuestion(LAYER, QUERIES, k=3000),
            SumsQuestion(LAYER, QUERIES, "label"),
            TopGroupsQuestion(LAYER, QUERIES, by="task"),
        ]
        for question in [*asked, OutputQuestion(LAYER, QUERIES, at_step=9)]:
            with pytest.raises(DataLossError, match=f"{last - first:,} of the 1,920 rows") as found:
                parts.ask(question)
            assert found.value.reason == "OUT_OF_REACH"
        hits, sums, groups = [parts.ask(replace(each, partial=True)) for each in asked]
        every = whole.ask(asked[0])
        left = (every.rows < first) | (every.rows >= last)
        left &= every.rows >= 0
        for query in range(len(QUERIES)):
            kept = np.flatnonzero(hits.rows[query] >= 0)
            np.testing.assert_array_equal(hits.rows[query, kept], every.rows[query, left[query]])
        assert sums.counts.sum() == groups.counts[0].sum() == 1920 - (last - first)
        for answer in (hits, sums, groups):
            counts = answer.coverage
            assert (counts.rows, counts.total) == (1920 - (last - first), 1920)
            assert counts.missing == last - first
        # What is stored of all rows needs none of the machines.
        same_output(
            parts.ask(OutputQuestion(LAYER, QUERIES)), whole.ask(OutputQuestion(LAYER, QUERIES))
        )
        fleet.gone = {0, 1, 2}
        with pytest.raises(DataLossError):
            parts.ask(TopKQuestion(LAYER, QUERIES, partial=True))
        fleet.gone = set()
        same_rows(parts.ask(asked[0]), every)


def test_packed_shards_answer_alike(sharded_index: Path, whole: Index, tmp_path: Path) -> None:
    pack_index(sharded_index, tmp_path / "packed")
    with spread(tmp_path / "packed", 3) as parts:
        with pytest.raises(InvalidArgumentError, match="are packed"):
            parts.ask(TopKQuestion(LAYER, QUERIES, strategy="flat"))
        for question in (
            TopKQuestion(LAYER, QUERIES, k=50, where=WHERE),
            TopKQuestion(LAYER, QUERIES, rank_by="contribution", unit=5, strategy="scan"),
        ):
            same_rows(parts.ask(question), whole.ask(question))
        for strategy in ("scan", "auto"):
            sums = SumsQuestion(LAYER, QUERIES, "label", absolute=True, strategy=strategy)
            np.testing.assert_allclose(parts.ask(sums).values, whole.ask(sums).values, rtol=1e-6)
        same_output(
            parts.ask(OutputQuestion(LAYER, QUERIES)), whole.ask(OutputQuestion(LAYER, QUERIES))
        )
        parts.verify_files()


def test_another_version_is_refused(tmp_path: Path) -> None:
    keys = np.eye(8, 4, dtype=np.float32)
    path = make_index(tmp_path, keys, keys, shard_rows=2)
    fleet = NearFleet(2)
    with Machines(fleet, "cpu").open(version_at(path)) as parts:
        fleet.forget([part for _, part in parts._parts])
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace("\n", "\n ", 1))
        with pytest.raises(FailedPreconditionError, match="give every machine the same") as found:
            parts.ask(TopKQuestion("fc", keys[:1]))
        assert found.value.reason == "OTHER_VERSION"


@pytest.fixture(scope="module")
def followed(
    adamw_recording: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Index]]:
    """AdamW, with the parts of each label stored: as a whole, and by three machines."""
    path = tmp_path_factory.mktemp("followed") / "index"
    build_index(adamw_recording, path, shard_rows=300, parts=["label"])
    with Index.open(path, device="cpu") as one, spread(path, 3) as three:
        yield {"one": one, "three": three}


def test_under_adam_what_is_stored_is_answered(followed: Mapping[str, Index]) -> None:
    one, three = followed["one"], followed["three"]
    few = parse_filter("label in (2, 7)")
    for options in ({}, {"group_by": "label"}, {"where": few}, {"where": few, "group_by": "label"}):
        question = OutputQuestion(LAYER, QUERIES, max_residual=1.0, **options)  # type: ignore[arg-type]
        ours = three.ask(question)
        same_output(ours, one.ask(question))
        assert ours.plan.strategy in ("rebuilt", "parts")
    same_rows(
        three.ask(TopKQuestion(LAYER, QUERIES, where=WHERE)),
        one.ask(TopKQuestion(LAYER, QUERIES, where=WHERE)),
    )


def test_under_adam_what_is_not_stored_is_followed(followed: Mapping[str, Index]) -> None:
    one, three = followed["one"], followed["three"]
    for options in ({"at_step": 10}, {"where": parse_filter("step < 9")}, {"group_by": "task"}):
        question = OutputQuestion(LAYER, QUERIES, max_residual=1.0, **options)  # type: ignore[arg-type]
        ours, theirs = three.ask(question), one.ask(question)
        same_output(ours, theirs)
        assert ours.values.tobytes() == theirs.values.tobytes()


def test_what_nobody_distributed_is_refused() -> None:
    """A method that Index gets meets a refusal, not an answer from no rows; these are known."""
    known = {"ask", "attribute", "explain_layers", "chunks", "verify_files", "identities", "close"}
    of_states = {"check_queries", "group_count", "examples", "example_bytes", "ledger", "layer"}
    of_states |= {"ledger_coefficients", "state", "parts_off", "steps", "sampling", "optimizer"}
    of_states |= {"adopt", "closed"}
    known |= {"trouble", "look_again", "self_influence"}
    refused = {"using", "remainder", "top_k", "sums", "top_groups", "dual_output", "explain"}
    of_ask = {"stream_weights", "open", "complete"}
    public = {name for name in dir(Index) if not name.startswith("_")}
    annotations = {"path", "damage", "version", "layers", "machines"}
    assert known <= set(vars(SpreadIndex))
    assert public - annotations - known - of_states - refused - of_ask == set()


def test_ties_nulls_and_keys_that_are_not_finite(tmp_path: Path) -> None:
    """Equal keys, keys that are not finite, columns with nulls and one that a shard lacks values
    of: more machines than shards, and than rows of a value."""
    rng = np.random.default_rng(7)
    keys = rng.integers(-2, 3, (60, 3)).astype(np.float32)
    keys[17] = np.nan
    keys[41, 1] = np.inf
    columns = {
        "label": [int(each) if each < 5 else None for each in rng.integers(0, 6, 60)],
        "task": [7 if t > 50 else None for t in range(60)],
        "noise": [float("nan") if t % 9 == 0 else t % 4 / 2 for t in range(60)],
    }
    path = make_index(tmp_path, keys, rng.standard_normal((60, 2)).astype(np.float32),
                      shard_rows=8, **columns)  # fmt: skip
    queries = rng.integers(-2, 3, (3, 3)).astype(np.float32)
    with Index.open(path, device="cpu") as one:
        for machines in (2, 4, 11):
            with spread(path, machines) as several:
                for options in (
                    {"k": 60},
                    {"k": 4, "group_by": "task"},
                    {"k": 3, "group_by": "noise", "order": "absolute"},
                    {"k": 9, "distinct": "task", "order": "smallest"},
                    {"k": 9, "distinct": "label", "group_by": "noise"},
                    {"k": 60, "strategy": "distinct_keys"},
                ):
                    question = TopKQuestion("fc", queries, **options)  # type: ignore[arg-type]
                    if "strategy" in options and one.layer("fc").manifest.equal_keys is None:
                        continue
                    same_rows(several.ask(question), one.ask(question))
                sums = SumsQuestion("fc", queries, "noise")
                ours, theirs = several.ask(sums), one.ask(sums)
                same_column(ours.groups, theirs.groups)
                np.testing.assert_array_equal(ours.counts, theirs.counts)
                # Small integers: float64 adds them exactly, in whatever order.
                np.testing.assert_array_equal(ours.values, theirs.values)
