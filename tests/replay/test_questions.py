"""Filters, steps, contributions and groups: a replay answers as an index of the same training."""

from __future__ import annotations

from pathlib import Path

import digits
import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Filter, capture_queries, parse_filter
from dualform.engine import Index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.replay import FirstRun, Replay, ReplayError
from dualform.replay import tiles as replay_tiles

from . import training

WHERE = [
    None,
    "label in (2, 3, 5) and step < 60",
    "not (example > 700) or step between 80 and 88",
    "label = 3 and label = 4",  # no row
]
AT_STEP = [None, 0, 41, training.STEPS]


@pytest.fixture(scope="module")
def first() -> FirstRun:
    run = FirstRun()
    training.mlp(run)
    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    training.mlp(folder / "recording")
    build_index(folder / "recording", folder / "index", shard_rows=700)
    return folder / "index"


@pytest.fixture(scope="module")
def queries() -> dict[str, np.ndarray]:
    model = training.mlp(FirstRun())
    images = torch.cat([digits.load().images[-6:], torch.zeros(1, 64)])
    return capture_queries(model, images)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a group's values, and rows that a filter leaves, come in some tiles alone."""
    monkeypatch.setattr(replay_tiles, "TILE_ROWS", 100)


def parsed(where: str | None) -> Filter | None:
    return None if where is None else parse_filter(where)


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_best_rows_bit_for_bit(
    first: FirstRun, stored: Path, queries: dict[str, np.ndarray], order: str
) -> None:
    layer, k = "2", 4
    asks = [
        {"where": where, "group_by": group_by, "distinct": distinct, **by}
        for where in WHERE
        for group_by in (None, "label")
        for distinct in (None, "example")
        for by in (
            {},
            {"rank_by": "contribution", "unit": 5},
            {"rank_by": "contribution", "unit": 5, "at_step": 41},
        )
    ]
    replay = Replay(first)
    answers = [replay.top_k(layer, queries[layer], k, order=order, **ask) for ask in asks]  # type: ignore[arg-type]
    training.mlp(replay)
    with Index.open(stored) as index:
        for ask, answer in zip(asks, answers, strict=True):
            ours = answer.result()
            ask["where"] = parsed(ask["where"])  # type: ignore[arg-type]
            theirs = index.top_k(layer, queries[layer], k, order=order, **ask)  # type: ignore[arg-type]
            np.testing.assert_array_equal(ours.rows, theirs.rows)
            np.testing.assert_array_equal(ours.scores.view(np.int32), theirs.scores.view(np.int32))
            assert ours.groups == (None if theirs.groups is None else theirs.groups.to_pylist())
            labels = theirs.columns["label"].to_pylist()
            for row, label in zip(theirs.rows.ravel().tolist(), labels, strict=True):
                assert row < 0 or ours.columns[row]["label"] == label
            assert sorted(ours.columns) == np.unique(theirs.rows[theirs.rows >= 0]).tolist()


def test_sums_of_filtered_rows(
    first: FirstRun, stored: Path, queries: dict[str, np.ndarray]
) -> None:
    layer = "0"
    asks = [(where, way) for where in WHERE for way in (False, True)]
    replay = Replay(first)
    answers = [
        replay.sums(layer, queries[layer], "label", absolute=way, where=where)
        for where, way in asks
    ]
    training.mlp(replay)
    with Index.open(stored) as index:
        for (where, way), answer in zip(asks, answers, strict=True):
            ours, given = answer.result(), parsed(where)
            ask = {"where": given, "strategy": "scan"}
            theirs = index.sums(layer, queries[layer], "label", absolute=way, **ask)  # type: ignore[arg-type]
            size = index.sums(layer, queries[layer], "label", absolute=True, **ask)  # type: ignore[arg-type]
            assert ours.groups == theirs.groups.to_pylist()
            np.testing.assert_array_equal(ours.counts, theirs.counts)
            # Rule 4: at most 1e-6 of the sum of |q_i x_i|, which is at least that of |q.x|.
            assert np.all(np.abs(ours.values - theirs.values) <= 1e-6 * size.values + 1e-30)


def test_outputs_at_any_step_of_filtered_rows_by_group(
    first: FirstRun, stored: Path, queries: dict[str, np.ndarray]
) -> None:
    layer = "2"
    asks = [(where, at_step) for where in WHERE for at_step in AT_STEP]
    replay = Replay(first)
    wholes = [
        replay.dual_output(layer, queries[layer], where=where, at_step=at_step)
        for where, at_step in asks
    ]
    grouped = [
        replay.dual_output(layer, queries[layer], where=where, at_step=at_step, group_by="label")
        for where, at_step in asks
    ]
    training.mlp(replay)
    with Index.open(stored) as index:
        for (where, at_step), whole, split in zip(asks, wholes, grouped, strict=True):
            ask = {"where": parsed(where), "at_step": at_step, "strategy": "scan"}
            theirs = index.dual_output(layer, queries[layer], **ask)  # type: ignore[arg-type]
            scale = np.linalg.norm(theirs.values, axis=1) + 1e-6
            for answer in (whole, split):
                error = np.linalg.norm(answer.result() - theirs.values, axis=1)
                assert np.max(error / scale) < 1e-6
            parts = index.dual_output(layer, queries[layer], group_by="label", **ask)  # type: ignore[arg-type]
            ours = split.parts()
            assert parts.groups is not None
            assert ours.groups == parts.groups.to_pylist()
            np.testing.assert_array_equal(ours.counts, parts.counts)
            np.testing.assert_array_equal(ours.initial, parts.initial)
            error = np.linalg.norm(ours.values - parts.values, axis=2)
            assert np.max(error / scale[:, None]) < 1e-6


def test_the_output_at_a_step_is_the_layer_then(queries: dict[str, np.ndarray]) -> None:
    """Another training, of half as many steps, is the first half of this one."""
    first = FirstRun()
    training.mlp(first)
    replay = Replay(first)
    half = replay.dual_output("2", queries["2"], at_step=training.STEPS // 2)
    training.mlp(replay)
    model = training.mlp(FirstRun(), steps=training.STEPS // 2)
    with torch.no_grad():
        layer = model.get_submodule("2")(torch.from_numpy(queries["2"])).numpy()
    error = np.linalg.norm(half.result() - layer, axis=1) / np.linalg.norm(layer, axis=1)
    assert error.max() < 1e-4


def annotated_late(where: object) -> None:
    """A training whose first steps alone are annotated with `kind`."""
    torch.manual_seed(0)
    data, model = digits.load(), nn.Sequential(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, where) as recorder:  # type: ignore[arg-type]
        for step in range(20):
            rows = slice(16 * step, 16 * step + 16)
            kind = {"kind": "early"} if step < 5 else {}
            recorder.annotate(label=data.labels[rows], **kind)
            loss = nn.functional.cross_entropy(model(data.images[rows]), data.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_a_column_that_is_annotated_no_more_is_null(tmp_path: Path) -> None:
    first = FirstRun()
    annotated_late(first)
    replay = Replay(first)
    query = np.ones((1, 64), np.float32)
    sums = replay.sums("0", query, "kind")
    missing = replay.sums("0", query, "label", where="kind is null")
    annotated_late(replay)
    annotated_late(tmp_path / "recording")
    build_index(tmp_path / "recording", tmp_path / "index")
    with Index.open(tmp_path / "index") as index:
        theirs = index.sums("0", query, "kind", strategy="scan")
        assert sums.result().groups == theirs.groups.to_pylist() == ["early", None]
        np.testing.assert_array_equal(sums.result().counts, theirs.counts)
        np.testing.assert_allclose(sums.result().values, theirs.values, rtol=1e-6)
        rest = index.sums("0", query, "label", where=parse_filter("kind is null"))
        np.testing.assert_array_equal(missing.result().counts, rest.counts)


def test_what_is_wrong_is_said_before_or_at_the_first_step(
    first: FirstRun, queries: dict[str, np.ndarray]
) -> None:
    replay = Replay(first)
    ask = {"layer": "2", "queries": queries["2"]}
    for wrong, message in (
        ({"rank_by": "contribution"}, "output units 0 to 47"),
        ({"rank_by": "contribution", "unit": 48}, "output units 0 to 47"),
        ({"rank_by": "contribution", "unit": 0, "at_step": 91}, "0 to 90"),
        ({"rank_by": "gradient"}, "'weight', 'contribution'"),
        ({"rank_by": "cosine"}, "'weight' or 'contribution'"),
        ({"k": 10**9}, "at most 16,384 rows"),
        ({"k": 2.5}, "an int is needed"),
        ({"layer": []}, "there are '0', '2', '4'"),
        ({"queries": ["a"]}, "do not form a tensor"),
        ({"rank_by": "contribution", "unit": 0, "at_step": 2.5}, "an int is needed"),
        ({"unit": 3}, "unit goes with"),
        ({"at_step": 3}, "at_step goes with"),
        ({"where": "label =="}, "where"),
        ({"where": 3}, "where is of type int"),
    ):
        with pytest.raises(ReplayError, match=message):
            replay.top_k(**{"k": 3, **ask, **wrong})  # type: ignore[arg-type]
    replay.top_k(k=np.int64(3), rank_by="contribution", unit=np.int64(1), **ask)  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="True or False"):
        replay.sums(**ask, group_by="label", absolute="no")  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="an int is needed"):
        replay.dual_output(**ask, at_step=2.5)  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="0 to 90"):
        replay.dual_output(**ask, at_step=-1)  # type: ignore[arg-type]
    for where, message in (("lable = 3", "unknown column 'lable'"), ("label = 'x'", "int64")):
        replay = Replay(first)
        replay.sums(**ask, group_by="label", where=where)  # type: ignore[arg-type]
        with pytest.raises(ReplayError, match=message):
            training.mlp(replay)
        assert replay._steps == 1
    for ask_more in ({"group_by": "lable"}, {"distinct": "lable"}):
        replay = Replay(first)
        replay.top_k(k=3, **ask, **ask_more)  # type: ignore[arg-type]
        with pytest.raises(ReplayError, match="no column 'lable'; there are step, slot"):
            training.mlp(replay)
    whole = Replay(first).dual_output("2", queries["2"])
    whole.finish()
    with pytest.raises(ReplayError, match="group_by="):
        whole.parts()


def test_a_training_without_a_step_is_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    run = FirstRun()
    with Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), run):
        pass
    with pytest.raises(ReplayError, match="had no step"):
        run.save(tmp_path / "first.safetensors")
    assert list(tmp_path.iterdir()) == []
