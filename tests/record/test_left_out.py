"""Rows that are not recorded: which they are, that they are counted, and what becomes of outputs.

The reference is a recording of the same training that keeps all rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import (
    LSTM,
    AnnotationError,
    DiskSink,
    OptionError,
    Recorder,
    ResumeError,
)
from dualform.record.buffers import Pool
from dualform.replay import DivergedError, FirstRun, Replay
from dualform.store.errors import DamagedError
from dualform.store.files import write_sealed
from dualform.store.recording import Recording

from . import reading

STEPS, BATCH, TIME = 12, 6, 4


class Network(nn.Module):
    """Rows per token, then a row per example."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.tokens(x)).mean(1))  # type: ignore[no-any-return]


def by_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(
    path: Any,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = by_sgd,
    steps: Sequence[int] = range(STEPS),
    rows: Callable[[int], Any] = lambda step: None,
    states: list[Any] | None = None,
    state: Any = None,
    **options: Any,
) -> nn.Module:
    """The same training whatever is recorded of it."""
    torch.manual_seed(0)
    model = Network()
    optimizer = optimizer_of(model)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    with Recorder(model, optimizer, path, **options) as recorder:
        for step in steps:
            data = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, TIME, 5, generator=data)
            labels = torch.arange(BATCH) % 3
            labels[step % BATCH] = -100  # takes no part: its values are zero
            recorder.annotate(
                rows=rows(step), example=torch.arange(BATCH) + 100 * step, label=labels
            )
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            if states is not None:
                saved = {name: t.clone() for name, t in model.state_dict().items()}
                states.append((saved, torch.utils._pytree.tree_map(_copy, optimizer.state_dict())))
    return model


def _copy(item: Any) -> Any:
    return item.clone() if isinstance(item, torch.Tensor) else item


Row = tuple[dict[str, Any], bytes, bytes]


def rows_of(path: Path, layer: str) -> list[Row]:
    """Metadata, key and value of every row."""
    found: list[Row] = []
    recording = Recording.open(path)
    for record in recording.passes(layer):
        keys, values = (read(recording, layer, record) for read in (reading.keys, reading.values))
        for i, row in enumerate(recording.read_rows([record.block]).to_pylist()):
            found.append((row, keys[i].tobytes(), values[i].tobytes()))
    return found


def is_zero(row: Row) -> bool:
    return not np.frombuffer(row[2], np.float32).any()


def mask(step: int) -> torch.Tensor:
    """One example is left out, and the last token of all others."""
    kept = torch.ones(BATCH, TIME, dtype=torch.bool)
    kept[:, -1] = False
    kept[(step + 1) % BATCH] = False
    return kept


def masked(row: dict[str, Any], layer: str) -> bool:
    left_out = row["slot"] == (row["step"] + 1) % BATCH
    return left_out or (layer == "tokens" and row["position"] == TIME - 1)


@pytest.fixture(scope="module", params=[by_sgd, by_adamw], ids=["sgd", "adamw"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The optimizer, a recording of all rows, and the trained model."""
    path = tmp_path_factory.mktemp("whole") / "r"
    return request.param, path, train(path, request.param)


CHOICES: dict[str, tuple[dict[str, Any], Callable[[Row, str], str | None]]] = {
    "every": ({"every": 5}, lambda row, _: "every" if row[0]["step"] % 5 else None),
    "rows": ({"rows": mask}, lambda row, layer: "rows" if masked(row[0], layer) else None),
    "zero": ({"zero_rows": False}, lambda row, _: "zero" if is_zero(row) else None),
    "all": (
        {"every": 2, "rows": mask, "zero_rows": False},
        lambda row, layer: (
            "every"
            if row[0]["step"] % 2
            else "rows"
            if masked(row[0], layer)
            else "zero"
            if is_zero(row)
            else None
        ),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_kept_is_as_it_was_and_what_is_not_is_counted(
    tmp_path: Path, whole: Any, name: str
) -> None:
    optimizer_of, all_rows, trained = whole
    options, why = CHOICES[name]
    model = train(tmp_path / "r", optimizer_of, **options)
    for a, b in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(a, b)
    recording = Recording.open(tmp_path / "r")
    for layer in recording.manifest.layers:
        expected = rows_of(all_rows, layer)
        reasons = [why(row, layer) for row in expected]
        kept = [row for row, reason in zip(expected, reasons, strict=True) if reason is None]
        assert 0 < len(kept) < len(expected)
        assert rows_of(tmp_path / "r", layer) == kept
        counts = {r: reasons.count(r) for r in ("every", "rows", "sample", "zero") if r in reasons}
        assert recording.dropped(layer) == counts
        first = next(
            (
                row[0]["step"]
                for row, reason in zip(expected, reasons, strict=True)
                if reason is not None and not is_zero(row)
            ),
            None,
        )
        marks = recording.marks[layer]
        assert [mark.from_step for mark in marks] == ([] if first is None else [first])
        assert all(mark.reason.startswith("rows are left out by ") for mark in marks)


def outputs(index: Path, recorded: Path, layer: str) -> tuple[Any, np.ndarray]:
    """A layer's answered outputs for some of its own keys, and these."""
    row = rows_of(recorded, layer)
    queries = np.stack([np.frombuffer(key, np.float32) for _, key, _ in row[:: len(row) // 8]])
    with Client.local(index) as client:
        return client.dual_output(layer, queries, max_residual=np.inf), queries


@pytest.mark.parametrize("name", CHOICES)
def test_outputs_stay_true(tmp_path: Path, whole: Any, name: str) -> None:
    """Initial part, rows and remainder are the trained layer. Under SGD rows have the coefficients
    that they had, so the remainder is what the others added, by the recording of all rows."""
    optimizer_of, all_rows, trained = whole
    options, why = CHOICES[name]
    train(tmp_path / "r", optimizer_of, **options)
    build_index(tmp_path / "r", tmp_path / "i")
    report = verify_index(tmp_path / "i")
    assert report.ok
    reference = Recording.open(all_rows)
    for layer, spec in reference.manifest.layers.items():
        found, queries = outputs(tmp_path / "i", all_rows, layer)
        with torch.no_grad():
            output = trained.get_submodule(layer)(torch.from_numpy(queries)).numpy()
        assert found.residual is not None
        together = found.values + found.residual  # the initial part included
        assert reading.relative(together, output) < 1e-6
        if name == "zero":
            assert reading.relative(found.values, output) < 1e-5
        if optimizer_of is not by_sgd:
            continue
        ledger = reference.ledger()
        weight, bias = (ledger.coefficients(p, STEPS).c for p in (spec.weight, spec.bias))
        missing = np.zeros(output.shape)
        for row in rows_of(all_rows, layer):
            if why(row, layer) is not None:
                key, value = (
                    np.frombuffer(data, np.float32).astype(np.float64) for data in row[1:]
                )
                step = row[0]["step"]
                scores = queries.astype(np.float64) @ key * weight[step] + bias[step]
                missing += scores[:, None] * value
        size = np.linalg.norm(output)
        assert np.linalg.norm(found.residual - missing) < 1e-5 * size
        if name != "zero":
            assert np.linalg.norm(missing) > 0.01 * size


def test_a_sample_is_drawn_by_seed_and_step(tmp_path: Path) -> None:
    """Whole examples, the same in all layers; by the seed alone; as many as asked for."""
    kept: dict[tuple[str, int], list[set[int]]] = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tmp_path / name, sample=0.4, seed=seed, steps=range(60))
        for layer in ("tokens", "head"):
            found = [row["example"] for row, _, _ in rows_of(tmp_path / name, layer)]
            per_example = TIME if layer == "tokens" else 1
            assert all(found.count(example) == per_example for example in set(found))
            kept.setdefault((name, seed), []).append(set(found))
        dropped = Recording.open(tmp_path / name).dropped("head")
        assert dropped == {"sample": 60 * BATCH - len(kept[name, seed][0])}
    assert all(tokens == head for tokens, head in kept.values())
    assert kept["a", 3] == kept["b", 3] != kept["c", 4]
    for examples, _ in kept.values():
        assert abs(len(examples) - 0.4 * 60 * BATCH) < 4 * (0.24 * 60 * BATCH) ** 0.5
    of_one_step = [{e % 100 for e in kept["a", 3][0] if e // 100 == step} for step in range(60)]
    assert len({frozenset(examples) for examples in of_one_step}) > 20


def test_a_sample_without_annotation_is_of_places(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Network()
    optimizer = by_sgd(model)
    with Recorder(model, optimizer, tmp_path / "r", sample=0.5, seed=1) as recorder:
        for _ in range(20):
            recorder.annotate(task="t")
            optimizer.zero_grad()
            model(torch.randn(BATCH, TIME, 5)).sum().backward()
            optimizer.step()
    slots = [
        {(row["step"], row["slot"]) for row, _, _ in rows_of(tmp_path / "r", layer)}
        for layer in ("tokens", "head")
    ]
    assert slots[0] == slots[1]
    assert 30 < len(slots[0]) < 90


@pytest.mark.parametrize(
    "options", [{"every": 3}, {"sample": 0.5, "seed": 7, "zero_rows": False}, {"rows": mask}]
)
@pytest.mark.parametrize("step", [1, 7])
def test_a_resumed_run_leaves_out_the_same(
    tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    """Rows, counts and marks are those of training that never stopped; the cut is in a segment."""
    states: list[Any] = []
    train(tmp_path / "whole", states=states, **options)
    train(tmp_path / "r", steps=range(step + 2), **options)
    train(
        tmp_path / "r",
        steps=range(step, STEPS),
        state=states[step - 1],
        resume_at_step=step,
        **options,
    )
    one, two = Recording.open(tmp_path / "whole"), Recording.open(tmp_path / "r")
    assert two.steps == STEPS
    for layer in one.manifest.layers:
        assert rows_of(tmp_path / "whole", layer) == rows_of(tmp_path / "r", layer)
        assert one.dropped(layer) == two.dropped(layer)
        assert one.marks[layer] == two.marks[layer]
        assert len(one.marks[layer]) == 1


def test_a_run_goes_on_with_the_options_that_it_began_with(tmp_path: Path) -> None:
    states: list[Any] = []
    train(tmp_path / "r", states=states, every=3)
    with pytest.raises(ResumeError, match="recorded with every=3, not with all rows"):
        train(tmp_path / "r", steps=[6], state=states[5], resume_at_step=6)
    assert Recording.open(tmp_path / "r").steps == STEPS


def test_a_mask_of_examples_and_of_rows_that_stand_for_several(tmp_path: Path) -> None:
    """[batch] goes for all of an example's tokens; a head's row is kept if any token's is."""
    train(tmp_path / "examples", rows=lambda step: [True] + [False] * (BATCH - 1), steps=[0])
    for layer, count in (("tokens", TIME), ("head", 1)):
        assert [row["slot"] for row, _, _ in rows_of(tmp_path / "examples", layer)] == [0] * count
    last = np.zeros((BATCH, TIME), bool)
    last[1:, -1] = True
    train(tmp_path / "tokens", rows=lambda step: last, steps=[0])
    tokens = [(r["slot"], r["position"]) for r, _, _ in rows_of(tmp_path / "tokens", "tokens")]
    assert tokens == [(slot, TIME - 1) for slot in range(1, BATCH)]
    assert [row["slot"] for row, _, _ in rows_of(tmp_path / "tokens", "head")] == [1, 2, 3, 4, 5]


def test_null_values_stay_with_their_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = by_sgd(model)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(
            rows=[[False, True, True], [True, False, True]],
            number=np.ma.MaskedArray([[1, 2, 3], [4, 5, 6]], [[0, 0, 1], [0, 1, 0]]),
            text=np.ma.MaskedArray(["a", "b"], [True, False]),
            each=np.ma.MaskedArray([7, 8], [False, True]),
            task="t",
        )
        model(torch.randn(2, 3, 5)).sum().backward()
        optimizer.step()
    (record,) = Recording.open(tmp_path / "r").passes("")
    rows = Recording.open(tmp_path / "r").read_rows([record.block]).to_pydict()
    assert rows == {
        "step": [0] * 4,
        "slot": [0, 0, 1, 1],
        "position": [1, 2, 0, 2],
        "number": [2, None, 4, 6],
        "text": [None, None, "b", "b"],
        "each": [7, 7, None, None],
        "task": ["t"] * 4,
    }


def test_an_lstm(tmp_path: Path) -> None:
    """A layer of two products is masked as a whole."""
    kept = torch.tensor([[True, False, True], [False, False, True]])
    x = torch.randn(2, 3, 3)
    for name, rows in (("whole", None), ("r", kept)):
        torch.manual_seed(0)
        model = LSTM(3, 4)
        optimizer = by_sgd(model)
        with Recorder(model, optimizer, tmp_path / name) as recorder:
            recorder.annotate(rows=rows, example=[5, 6])
            model(x)[0].square().sum().backward()
            optimizer.step()
    expected = [
        row for row in rows_of(tmp_path / "whole", "") if kept[row[0]["slot"], row[0]["position"]]
    ]
    assert rows_of(tmp_path / "r", "") == expected
    assert Recording.open(tmp_path / "r").dropped("") == {"rows": 3}


def test_a_mask_that_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; training goes on, and so does the ledger."""
    caplog.set_level(logging.WARNING, "dualform.record")
    train(tmp_path / "r", rows=lambda step: step % 2 == 0)
    said = [e.getMessage() for e in caplog.records if "leaves out every row" in e.getMessage()]
    assert len(said) == 1
    assert "of step 1," in said[0]
    assert "true is for the rows that are kept" in said[0]
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == STEPS
    assert {row["step"] for row, _, _ in rows_of(tmp_path / "r", "head")} == set(range(0, STEPS, 2))
    assert len(recording.ledger().parameters["head.weight"]) == STEPS


def test_nothing_at_all_is_kept(tmp_path: Path) -> None:
    """Even that is a recording, with an index, whose layers are all remainder."""
    train(tmp_path / "r", rows=lambda step: False)
    assert Recording.open(tmp_path / "r").dropped("head") == {"rows": STEPS * BATCH}
    build_index(tmp_path / "r", tmp_path / "i")
    assert verify_index(tmp_path / "i").ok


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every=0: it is a whole number from 1 on"),
        ({"every": 2.0}, "every=2.0"),
        ({"every": True}, "every=True"),
        ({"sample": 0}, "sample=0: the part .* above 0 and at most 1.*; to record nothing"),
        ({"sample": 0.0}, "sample=0.0"),
        ({"sample": -0.5}, "sample=-0.5"),
        ({"sample": 1.5}, "sample=1.5: .* at most 1"),
        ({"sample": float("nan")}, "sample=nan"),
        ({"sample": "half"}, "sample='half': it is a number"),
        ({"seed": -1}, "seed=-1: it is a whole number"),
        ({"seed": None}, "seed=None"),
        ({"zero_rows": 0}, "zero_rows=0: False leaves"),
        ({"values": "no"}, "values='no': True records"),
    ],
)
def test_options_that_are_none(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        train(tmp_path / "r", **options)
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("steps", ["10", 2.5, -1, True])
def test_steps_that_are_none(tmp_path: Path, steps: Any) -> None:
    """Said at once: it ended training at its first step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="how many steps are planned"):
        Recorder(model, optimizer, tmp_path / "r", steps=steps)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (torch.ones(BATCH, dtype=torch.int64), r"is a mask: booleans.*not int64.*\.bool\(\)"),
        (np.ones((BATCH, TIME)), "not float64"),
        ("all", "not string"),
        (np.ma.MaskedArray([True] * BATCH, [True] + [False] * (BATCH - 1)), "missing values"),
        (torch.ones(BATCH - 1, dtype=torch.bool), r"annotate\(rows=...\) was given shape \[5\]"),
        (torch.ones(BATCH, TIME + 1, dtype=torch.bool), r"shape \[6, 4\], one per row"),
        (torch.ones(0, dtype=torch.bool), r"was given shape \[0\]"),
        ([object()], "cannot store"),
    ],
)
def test_masks_that_are_none(tmp_path: Path, rows: Any, said: str) -> None:
    """Refused before the weights move."""
    torch.manual_seed(0)
    before = Network().state_dict()
    states: list[Any] = []
    with pytest.raises(AnnotationError, match=said):
        train(tmp_path / "r", rows=lambda step: rows, states=states)
    assert not states
    recording = Recording.open(tmp_path / "r")
    assert recording.steps == 0
    final = recording.final()
    assert final is not None
    assert all(np.array_equal(before[name].numpy(), final[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_buffers_keep_rows(dtype: torch.dtype) -> None:
    """Cut in place, padded with zeros; and whole again for whoever takes the memory next."""
    pool = Pool(1 << 20)
    buffer = pool.take(600, 5, dtype)
    whole = torch.randn(600, 5)
    whole[::7] = 0.0
    whole[::14] *= -1  # minus zero is zero
    whole[3] = float("nan")
    buffer.copy(whole)
    assert buffer.any_nonzero().tolist() == (whole.to(dtype) != 0).any(1).tolist()
    kept = np.array([1, 3, 5, 599])
    expected = buffer.array[kept]
    buffer.keep(kept)
    assert np.array_equal(buffer.array, expected, equal_nan=True)
    assert len(buffer.memory) == 4096
    assert bytes(buffer.memory[: buffer.stored.nbytes]) == buffer.stored.tobytes()
    assert not any(buffer.memory[buffer.stored.nbytes :])
    del buffer
    again = pool.take(600, 5, dtype)
    again.copy(whole)
    assert np.array_equal(again.array, whole.to(dtype).float().numpy(), equal_nan=True)


def test_an_embedding(tmp_path: Path) -> None:
    """Whose keys are places, and whose rows for padding have a value of zero."""
    ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
    for name, rows, options in (
        ("whole", None, {}),
        ("masked", ids != 0, {}),
        ("zero", None, {"zero_rows": False}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2))
        optimizer = by_sgd(model)
        with Recorder(model, optimizer, tmp_path / name, **options) as recorder:
            recorder.annotate(rows=rows, token=ids)
            (model(ids) * (ids != 0)[..., None]).square().sum().backward()
            optimizer.step()
    for layer in ("0", "1"):
        whole = rows_of(tmp_path / "whole", layer)
        expected = [row for row in whole if row[0]["token"]]
        assert len(expected) == 3 < len(whole)
        for name, reason in (("masked", "rows"), ("zero", "zero")):
            assert rows_of(tmp_path / name, layer) == expected
            assert Recording.open(tmp_path / name).dropped(layer) == {reason: 3}
            assert Recording.open(tmp_path / name).marks[layer] == []


def test_sixteen_bits(tmp_path: Path) -> None:
    """bfloat16 keys and values, cut to some of their rows."""
    for name, options in (("whole", {}), ("r", {"every": 2, "zero_rows": False})):
        torch.manual_seed(0)
        model = Network().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, tmp_path / name, **options) as recorder:
            for step in range(4):
                recorder.annotate(rows=mask(step))
                x = torch.randn(BATCH, TIME, 5, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                model(x.bfloat16())[1:].sum().backward()
                optimizer.step()
    for layer in ("tokens", "head"):
        expected = [
            row
            for row in rows_of(tmp_path / "whole", layer)
            if row[0]["step"] % 2 == 0 and not is_zero(row)
        ]
        assert rows_of(tmp_path / "r", layer) == expected
    (record, *_) = Recording.open(tmp_path / "r").passes("tokens")
    assert record.keys.encoding == record.values.encoding == "bfloat16"  # type: ignore[union-attr]


def test_a_replay_leaves_out_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sample": 0.5, "seed": 2, "rows": mask}
    first = FirstRun()
    train(first, **options)
    first.save(tmp_path / "first")
    first = FirstRun.load(tmp_path / "first")
    train(tmp_path / "r", **options)
    rows = rows_of(tmp_path / "r", "head")
    query = np.array([np.frombuffer(rows[0][1], np.float32)])
    replay = Replay(first)
    asked = replay.sums("head", query, "label")
    train(replay, **options)
    keys = np.stack([np.frombuffer(key, np.float32) for _, key, _ in rows]).astype(np.float64)
    total = float((keys @ query[0].astype(np.float64)).sum())
    assert abs(float(asked.result().values.sum()) - total) < 1e-6 * abs(total)
    again = Replay(first)
    again.sums("head", query, "label")
    with pytest.raises(DivergedError, match="sampling"):
        train(again, **{**options, "seed": 3})


def test_the_first_line_says_what_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And reckons with it, on a resumed run too."""
    caplog.set_level(logging.INFO, "dualform.record.start")
    states: list[Any] = []
    sizes = []
    for options in ({}, {"every": 4}):
        train(tmp_path / f"r{len(options)}", states=states, **options)
        sizes.append(caplog.records[-1].getMessage())
    assert "16.38 kB per step, to" in sizes[0]
    assert "4.10 kB per step (every=4), to" in sizes[1]
    train(tmp_path / "r1", steps=[6], state=states[STEPS + 5], resume_at_step=6, every=4)
    assert "4.10 kB per step (every=4), to" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("reason", "mood", r"dropped\[0\].reason"),
        ("rows", 0, r"dropped\[0\].rows"),
        ("layer", 9, r"dropped\[0\].layer"),
        ("step", 99, r"dropped\[0\].step"),
        ("rows", None, "long"),
    ],
)
def test_a_strange_table_is_refused(tmp_path: Path, field: str, value: Any, said: str) -> None:
    train(DiskSink(tmp_path / "r"), every=2, steps=range(4))
    path = tmp_path / "r" / "segments" / "000000.json"
    table = json.loads(path.read_text())
    del table["xxh3"]
    if value is None:
        table["dropped"][field].pop()
    else:
        table["dropped"][field][0] = value
    write_sealed(path, table)
    with pytest.raises(DamagedError, match=said):
        Recording.open(tmp_path / "r")
