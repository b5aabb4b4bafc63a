"""Answers of a replay are those of an index that stored everything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import digits
import numpy as np
import pytest
import torch

from dualform.client import capture_queries
from dualform.engine import Index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.replay import FirstRun, Replay, ReplayError
from dualform.store.recording import Recording

from . import training

LAYERS = ("0", "2", "4")


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
def queries(first: FirstRun) -> dict[str, np.ndarray]:
    """Of the trained model: 20 images that training did not see, and one black one."""
    model = training.mlp(FirstRun())
    images = torch.cat([digits.load().images[-20:], torch.zeros(1, 64)])
    return capture_queries(model, images)


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("group_by", [None, "label"])
def test_top_k_row_for_row_and_bit_for_bit(
    first: FirstRun,
    stored: Path,
    queries: dict[str, np.ndarray],
    order: str,
    group_by: str | None,
) -> None:
    replay = Replay(first)
    asked = {
        (layer, k): replay.top_k(layer, queries[layer], k, order=order, group_by=group_by)
        for layer in LAYERS
        for k in (1, 7, 400)
    }
    training.mlp(replay)
    with Index.open(stored) as index:
        for (layer, k), answer in asked.items():
            ours, theirs = (
                answer.result(),
                index.top_k(
                    layer,
                    queries[layer],
                    k,
                    order=order,
                    group_by=group_by,  # type: ignore[arg-type]
                ),
            )
            np.testing.assert_array_equal(ours.rows, theirs.rows)
            np.testing.assert_array_equal(ours.scores.view(np.int32), theirs.scores.view(np.int32))
            assert ours.groups == (None if theirs.groups is None else theirs.groups.to_pylist())
            for row, *each in zip(
                theirs.rows.ravel().tolist(),
                *(
                    theirs.columns[name].to_pylist()
                    for name in ("step", "slot", "label", "example")
                ),
                strict=True,
            ):
                if row >= 0:
                    kept = ours.columns[row]
                    assert [kept[name] for name in ("step", "slot", "label", "example")] == each


def test_sums_and_outputs_within_their_bounds(
    first: FirstRun, stored: Path, queries: dict[str, np.ndarray]
) -> None:
    replay = Replay(first)
    signed = {name: replay.sums(name, queries[name], "label") for name in LAYERS}
    absolute = {name: replay.sums(name, queries[name], "label", absolute=True) for name in LAYERS}
    outputs = {name: replay.dual_output(name, queries[name]) for name in LAYERS}
    model = training.mlp(replay)
    with Index.open(stored) as index:
        for name in LAYERS:
            size = index.sums(name, queries[name], "label", absolute=True, strategy="scan")
            for answer, way in ((signed, False), (absolute, True)):
                ours = answer[name].result()
                theirs = index.sums(name, queries[name], "label", absolute=way, strategy="scan")
                assert ours.groups == theirs.groups.to_pylist()
                np.testing.assert_array_equal(ours.counts, theirs.counts)
                # Rule 4: at most 1e-6 of the sum of |q_i x_i|, which is at least that of |q.x|.
                assert np.all(np.abs(ours.values - theirs.values) <= 1e-6 * size.values + 1e-30)
            output = outputs[name].result()
            theirs_output = index.dual_output(name, queries[name], strategy="scan").values
            layer = model.get_submodule(name)(torch.from_numpy(queries[name])).detach().numpy()
            scale = np.linalg.norm(layer, axis=1)
            assert np.max(np.linalg.norm(output - theirs_output, axis=1) / scale) < 1e-6
            assert np.max(np.linalg.norm(output - layer, axis=1) / scale) < 1e-4


def test_lstm_with_positions(tmp_path: Path) -> None:
    first = FirstRun()
    key_sums = first.key_sums("rnn", "offset")
    model = training.language_model(first)
    queries = torch.cat([model["rnn"].gate_keys(torch.randn(2, 3, 5)).reshape(6, 12)]).numpy()
    replay = Replay(first)
    best = replay.top_k("rnn", queries, 5, order="absolute")
    sums = replay.sums("rnn", queries, "offset", absolute=True)
    signed = replay.sums("rnn", queries, "offset")
    output = replay.dual_output("rnn", queries)
    training.language_model(replay)
    training.language_model(tmp_path / "recording")
    build_index(tmp_path / "recording", tmp_path / "index")
    with Index.open(tmp_path / "index") as index:
        theirs = index.top_k("rnn", queries, 5, order="absolute")
        np.testing.assert_array_equal(best.result().rows, theirs.rows)
        np.testing.assert_array_equal(best.result().scores, theirs.scores)
        totals = index.sums("rnn", queries, "offset", absolute=True)
        assert sums.result().groups == totals.groups.to_pylist()
        np.testing.assert_allclose(sums.result().values, totals.values, rtol=1e-6)
        # Rule 4: at most 1e-6 of the sum of |q_i x_i|.
        recording = Recording.open(tmp_path / "recording")
        size = np.zeros_like(totals.values)
        for record, offsets in zip(recording.passes("rnn"), training.offsets(), strict=True):
            keys = np.empty((record.rows, 12), np.float32)
            recording.read_keys(record, keys)
            np.add.at(size.T, offsets.ravel(), np.abs(keys) @ np.abs(queries.T))
        kept = key_sums.result()
        np.testing.assert_array_equal(kept.counts, totals.counts)
        assert np.all(np.abs(kept.sums(queries) - signed.result().values) <= 1e-6 * size)
        whole = index.dual_output("rnn", queries, strategy="scan").values
        np.testing.assert_allclose(output.result(), whole, rtol=1e-5, atol=1e-6)


def test_a_first_run_in_another_process(
    tmp_path: Path, first: FirstRun, queries: dict[str, np.ndarray]
) -> None:
    # On Linux, a path that is no text.
    name = os.fsdecode(b"caf\xe9.safetensors") if sys.platform == "linux" else "first.safetensors"
    first.save(tmp_path / name)
    answers = []
    for run in (first, FirstRun.load(tmp_path / name)):
        replay = Replay(run)
        output = replay.dual_output("2", queries["2"])
        training.mlp(replay)
        answers.append(output.result())
    np.testing.assert_array_equal(*answers)
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ReplayError, match="holds no first run"):
        FirstRun.load(tmp_path / "other")


def test_questions_that_cannot_be_asked(first: FirstRun, queries: dict[str, np.ndarray]) -> None:
    replay = Replay(first)
    with pytest.raises(ReplayError, match="no layer '1' was recorded; there are '0', '2', '4'"):
        replay.top_k("1", queries["0"], 5)
    with pytest.raises(ReplayError, match=r"float32 \[n, 64\]"):
        replay.top_k("0", queries["2"], 5)
    with pytest.raises(ReplayError, match="NaN"):
        replay.top_k("0", np.full((1, 64), np.nan, np.float32), 5)
    with pytest.raises(ReplayError, match="at least 1"):
        replay.top_k("0", queries["0"], 0)
    with pytest.raises(ReplayError, match="'largest', 'smallest', 'absolute'"):
        replay.top_k("0", queries["0"], 1, order="best")
    with pytest.raises(ReplayError, match="ask something"):
        training.mlp(replay)
    best = replay.top_k("0", queries["0"], 5)
    with pytest.raises(ReplayError, match="no answer yet"):
        best.result()
    replay.sums("0", queries["0"], "lable")
    with pytest.raises(ReplayError, match="no column 'lable'; there are step, slot"):
        training.mlp(replay)


def test_adam_has_no_contributions() -> None:
    model = digits.network()
    first = FirstRun()
    with pytest.raises(ReplayError, match="at least one step"):
        Replay(first)
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder(model, optimizer, first):
        model(digits.load().images[:8]).square().sum().backward()
        optimizer.step()
    with pytest.raises(ReplayError, match="Adam"):
        Replay(first).top_k("0", np.zeros((1, 64), np.float32), 1, rank_by="contribution", unit=0)
