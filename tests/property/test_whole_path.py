"""From the loop to the answer: trained, recorded, built, opened, asked, over random training runs.

The dual output at random steps is compared with the weights that the loop itself kept; filtered and
grouped outputs with torch.optim.SGD in float64, given the gradients of the selected rows alone,
which is what a masked dual output means.

Where the measures of rule 5 (design: *What exact means*) are well conditioned: weights count once
they are at least 1/8 of the way that they have come from their start, and the start at most 16
times that far from zero, as float32 rounds both; of the queries count those that the layer answers
with at least 1/8 of |W||x| + |b|. Initial weights are halved, so that training soon outweighs them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import digits
import numpy as np
import pytest
import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from soak.counts import count

from dualform.client import parse_filter
from dualform.engine import DualOutput, Index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.record import recorder as recorder_module
from dualform.store.recording import Recording

from .scenarios import CLASSES, EXAMPLES, Run, Scenario, scenarios

TOLERANCE = 1e-5
OF_TERMS = 1e-6
QUERIES = 8
GROUP_BY = ("label", "task", "step", "example")
GROUPS = 3
"""Of many groups, so many are compared with float64."""


# Hypothesis's last phase runs hundreds of trainings to say what varies; its report is read without.
WITHOUT_EXPLAIN = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


@dataclass(frozen=True)
class Memory:
    """A layer's rows as the recording holds them, float64 or int64, and who they are."""

    keys: np.ndarray
    values: np.ndarray
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class Filter:
    """A filter as text, and the rows that it selects."""

    text: str
    selects: Callable[[dict[str, np.ndarray]], np.ndarray]


@st.composite
def filters(draw: st.DrawFn, steps: int) -> Filter:
    label, step = draw(st.integers(0, CLASSES)), draw(st.integers(0, steps))
    example = draw(st.integers(0, EXAMPLES - 1))
    return draw(
        st.sampled_from(
            [
                Filter(f"label = {label}", lambda c: c["label"] == label),
                Filter(f"not (label = {label})", lambda c: c["label"] != label),
                Filter(f"step < {step}", lambda c: c["step"] < step),
                Filter(f"example = {example}", lambda c: c["example"] == example),
                Filter("task != 'even'", lambda c: c["task"] != "even"),
                Filter(
                    f"label in (0, {label}) and step >= {step}",
                    lambda c: np.isin(c["label"], [0, label]) & (c["step"] >= step),
                ),
            ]
        )
    )


@settings(
    max_examples=count(12, 1500),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(scenarios(), st.sampled_from([0, 3, recorder_module.STATE_RATIO]), st.data())
def test_from_the_loop_to_the_answer(
    scenario: Scenario, state_ratio: int, data: st.DataObject
) -> None:
    """With a small `state_ratio` states are stored every step or so, and at_step starts from them;
    such small networks would store none otherwise."""
    run = Run(scenario)
    with (
        mock.patch.object(recorder_module, "STATE_RATIO", state_ratio),
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder)
        with Recorder(run.model, run.optimizer, path / "recording") as recorder:
            run.train(
                lambda step, examples: recorder.annotate(
                    label=run.labels[examples], example=examples, task=("even", "odd")[step % 2]
                )
            )
        build_index(path / "recording", path / "index", shard_rows=64)
        with (
            Index.open(path / "index", device="cpu") as index,
            Recording.open(path / "recording") as recording,
        ):
            steps = data.draw(st.lists(st.integers(0, index.steps), max_size=2), "at_step")
            for name, layer in index.layers.items():
                assert layer.inexact == []
                queries = _queries(scenario, layer.d_in)
                for at_step in {0, index.steps, *steps}:
                    _check_output(run, index, name, queries, at_step)
                    _check_weights(run, index, name, layer.d_in, at_step)
            name = data.draw(st.sampled_from(sorted(index.layers)), "layer")
            where = data.draw(filters(index.steps), "where")
            queries, memory = _queries(scenario, index.layers[name].d_in), _memory(recording, name)
            for at_step in {index.steps, *steps}:
                _check_masked(run, index, name, memory, queries, at_step, where)
                group_by = data.draw(st.sampled_from(GROUP_BY), "group_by")
                _check_parts(run, index, name, memory, queries, at_step, where, group_by)


@pytest.mark.parametrize("count", [2, 40])
def test_parts_add_up_where_a_state_was_stored(tmp_path: Path, count: int) -> None:
    """Few queries are carried through the rows, many multiplied with what these add up to."""
    with mock.patch.object(recorder_module, "STATE_RATIO", 2):
        digits.record(tmp_path / "recording")
    build_index(tmp_path / "recording", tmp_path / "index")
    with Index.open(tmp_path / "index", device="cpu") as index:
        for name, layer in index.layers.items():
            assert len(layer.manifest.states) > 1
            queries = np.random.default_rng(0).standard_normal((count, layer.d_in))
            queries = queries.astype(np.float32)
            whole = index.dual_output(name, queries, at_step=digits.STEPS)
            parts = index.dual_output(name, queries, at_step=digits.STEPS, group_by="label")
            assert whole.residual is None
            assert parts.residual is not None
            _check_total(whole, parts)
            trained = index.dual_output(name, queries, group_by="label")
            assert trained.residual is not None
            _check_total(index.dual_output(name, queries), trained)
            for asked in (
                index.dual_output(name, queries, at_step=0, group_by="label"),
                index.dual_output(
                    name, queries, where=parse_filter("step >= 0"), at_step=30, group_by="label"
                ),
            ):
                assert asked.residual is None


def _queries(scenario: Scenario, d_in: int) -> np.ndarray:
    random = np.random.default_rng(scenario.seed)
    return random.standard_normal((QUERIES, d_in)).astype(np.float32)


def _check_output(run: Run, index: Index, name: str, queries: np.ndarray, at_step: int) -> None:
    """Against the weights that the loop kept."""
    weight, bias = _kept(run, name, at_step)
    layer = queries.astype(np.float64) @ weight.T + bias
    size = np.linalg.norm(weight) * np.linalg.norm(queries, axis=1) + np.linalg.norm(bias)
    expected = np.linalg.norm(layer, axis=1)
    counted = expected >= size / 8
    out = index.dual_output(name, queries, at_step=at_step)
    error = np.linalg.norm(out.values - layer, axis=1)
    assert (error <= TOLERANCE * expected)[counted].all(), (
        name,
        at_step,
        (error / expected)[counted],
    )
    assert out.coverage.total == index.layers[name].rows


def _check_weights(run: Run, index: Index, name: str, d_in: int, at_step: int) -> None:
    """The columns of the weight are what the dual output makes of unit vectors, less the bias."""
    unit = np.concatenate([np.eye(d_in), np.zeros((1, d_in))]).astype(np.float32)
    out = index.dual_output(name, unit, at_step=at_step).values.astype(np.float64)
    dual = {"weight": (out[:-1] - out[-1]).T, "bias": out[-1]}
    for kind, rebuilt in dual.items():
        history = [state.get(f"{name}.{kind}") for state in run.states[: at_step + 1]]
        if history[0] is None:
            assert not rebuilt.any()
            continue
        path = np.stack([state.astype(np.float64) for state in history if state is not None])
        moved = float(np.linalg.norm(path[-1] - path[0]))
        way = float(sum(np.linalg.norm(each) for each in np.diff(path, axis=0)))
        largest = max(float(np.linalg.norm(state)) for state in path)
        if not way or moved < way / 8 or moved < largest / 16:
            event("weights: ill-conditioned")
            continue
        event("weights: compared")
        assert np.linalg.norm(rebuilt - path[-1]) <= TOLERANCE * moved, (name, kind, at_step)


def _check_masked(
    run: Run,
    index: Index,
    name: str,
    memory: Memory,
    queries: np.ndarray,
    at_step: int,
    where: Filter,
) -> None:
    """Against SGD in float64 on the gradients of the selected rows alone."""
    selected = where.selects(memory.columns) & (memory.columns["step"] < at_step)
    weight, bias = _sgd(run, name, memory, selected, at_step)
    expected = queries.astype(np.float64) @ weight.T + bias
    out = index.dual_output(name, queries, where=parse_filter(where.text), at_step=at_step)
    size = _terms(index, name, memory, queries, selected, at_step)
    error = np.linalg.norm(out.values - expected, axis=1)
    assert (error <= OF_TERMS * (size + np.linalg.norm(out.initial, axis=1))).all()
    assert out.coverage.rows == selected.sum()


def _check_parts(
    run: Run,
    index: Index,
    name: str,
    memory: Memory,
    queries: np.ndarray,
    at_step: int,
    where: Filter,
    group_by: str,
) -> None:
    """Each group against float64, and all of them together against the whole."""
    given = parse_filter(where.text)
    whole = index.dual_output(name, queries, where=given, at_step=at_step)
    parts = index.dual_output(name, queries, where=given, at_step=at_step, group_by=group_by)
    assert parts.groups is not None
    selected = where.selects(memory.columns) & (memory.columns["step"] < at_step)
    start, start_bias = _sgd(run, name, memory, np.zeros_like(selected), at_step)
    initial = queries.astype(np.float64) @ start.T + start_bias
    beside = np.linalg.norm(initial, axis=1)
    np.testing.assert_allclose(parts.initial, initial, rtol=0, atol=2 * OF_TERMS * beside.max())
    random = np.random.default_rng(at_step)
    for number in random.permutation(len(parts.groups))[:GROUPS]:
        group = parts.groups[int(number)].as_py()
        members = selected & (memory.columns[group_by] == group)
        weight, bias = _sgd(run, name, memory, members, at_step)
        expected = queries.astype(np.float64) @ weight.T + bias - initial
        size = _terms(index, name, memory, queries, members, at_step)
        error = np.linalg.norm(parts.values[:, number] - expected, axis=1)
        assert (error <= OF_TERMS * size).all(), (name, group_by, group)
    _check_total(whole, parts)
    assert (parts.residual is None) == (whole.residual is None)
    whole = index.dual_output(name, queries, at_step=at_step)
    parts = index.dual_output(name, queries, at_step=at_step, group_by=group_by)
    _check_total(whole, parts)
    _check_residual(run, index, name, memory, queries, at_step, parts)


def _check_residual(
    run: Run,
    index: Index,
    name: str,
    memory: Memory,
    queries: np.ndarray,
    at_step: int,
    parts: DualOutput,
) -> None:
    """What the loop's own weights at the stored state lead to in float64, less what all rows do."""
    start = max((j for j, _ in index.layers[name].manifest.states if j <= at_step), default=0)
    if start == 0:
        assert parts.residual is None
        return
    assert parts.residual is not None
    everything = memory.columns["step"] < at_step
    weight, bias = _sgd(run, name, memory, everything, at_step, start)
    rebuilt, rebuilt_bias = _sgd(run, name, memory, everything, at_step)
    expected = queries.astype(np.float64) @ (weight - rebuilt).T + (bias - rebuilt_bias)
    terms = _terms(index, name, memory, queries, everything, at_step)
    # So many queries are answered in float64. The factors are known to a few roundings only.
    bound = 1e-6 * np.linalg.norm(expected, axis=1)
    bound += 1e-12 * (terms + np.linalg.norm(parts.initial, axis=1))
    if any(factor != 1 for factor in run.factors):
        bound += 2.0**-22 * terms
    error = np.linalg.norm(parts.residual - expected, axis=1)
    assert (error <= bound).all(), (name, at_step, start, error, bound)
    shown = np.linalg.norm(expected, axis=1) > 10 * bound
    event(f"residual: {'far above' if shown.any() else 'near'} what is allowed")


def _check_total(whole: DualOutput, parts: DualOutput) -> None:
    total = parts.initial + parts.values.astype(np.float64).sum(1)
    size = np.abs(parts.initial) + np.abs(parts.values.astype(np.float64)).sum(1)
    if parts.residual is not None:
        total += parts.residual
    expected = whole.values.astype(np.float64)
    if whole.residual is not None and parts.residual is not None:
        expected += whole.residual
        assert whole.trained is not None
        assert (np.abs(expected - whole.trained) <= OF_TERMS * size).all()
    assert (np.abs(total - expected) <= OF_TERMS * size).all(), (total, expected)


def _memory(recording: Recording, name: str) -> Memory:
    spec = recording.manifest.layers[name]
    passes = recording.passes(name)
    keys = [np.empty((record.rows, spec.d_in), np.float32) for record in passes]
    values = [np.empty((record.rows, spec.d_out), np.float32) for record in passes]
    for record, key, value in zip(passes, keys, values, strict=True):
        recording.read_keys(record, key)
        recording.read_values(record, value)
    table = recording.read_rows([record.block for record in passes])
    columns = {"step": np.array(table["step"].to_pylist(), np.int64)}
    for column in ("label", "example", "task"):
        columns[column] = np.array(table[column].to_pylist() if passes else [])
    return Memory(
        np.concatenate([np.empty((0, spec.d_in)), *keys]),
        np.concatenate([np.empty((0, spec.d_out)), *values]),
        columns,
    )


def _kept(run: Run, name: str, at_step: int) -> tuple[np.ndarray, np.ndarray]:
    """The loop's own weight and bias (zeros without one) after so many steps, float64."""
    state = run.states[at_step]
    weight = state[f"{name}.weight"].astype(np.float64)
    bias = state.get(f"{name}.bias")
    return weight, np.zeros(len(weight)) if bias is None else bias.astype(np.float64)


def _sgd(
    run: Run, name: str, memory: Memory, selected: np.ndarray, at_step: int, start: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias after torch.optim.SGD ran in float64 on the selected rows' gradients.

    From what the loop had after `start` steps.
    """
    weight, bias = (torch.from_numpy(each.copy()) for each in _kept(run, name, start))
    has_bias = f"{name}.bias" in run.states[0]
    named = {f"{name}.weight": weight} | ({f"{name}.bias": bias} if has_bias else {})
    optimizer = torch.optim.SGD([{"params": [each]} for each in named.values()], lr=0.1)
    for full, each in named.items():
        buffer = run.buffers[start].get(full)
        if buffer is not None:
            optimizer.state[each]["momentum_buffer"] = torch.from_numpy(buffer).double()
    for t in range(start, at_step):
        rows = selected & (memory.columns["step"] == t)
        e, x = memory.values[rows], memory.keys[rows]
        sums = {"weight": -(e.T @ x), "bias": -e.sum(0)}
        for group, each in zip(
            optimizer.param_groups, run.scenario.steps[t].settings, strict=False
        ):
            group.update(vars(each))
        for full, each in named.items():
            took_part = full in run.took_part[t]
            gradient = torch.from_numpy(sums[full.rpartition(".")[2]]) * run.factors[t]
            each.grad = gradient if took_part else None
        optimizer.step()
    return weight.numpy(), bias.numpy()


def _terms(
    index: Index,
    name: str,
    memory: Memory,
    queries: np.ndarray,
    selected: np.ndarray,
    at_step: int,
) -> np.ndarray:
    """Sum over the selected rows of (|c| |x||q| + |c'|) |e|, float64 [n]: what rounds."""
    coefficients = index.ledger_coefficients(name, at_step)
    steps = memory.columns["step"][selected]
    keys = np.linalg.norm(memory.keys[selected], axis=1)
    values = np.linalg.norm(memory.values[selected], axis=1)
    of_weight = np.abs(coefficients.weight.c[steps]) * keys * values
    size = np.linalg.norm(queries, axis=1) * of_weight.sum()
    if coefficients.bias is not None:
        size = size + (np.abs(coefficients.bias.c[steps]) * values).sum()
    return np.asarray(size)
