"""Contributions under optimizers whose rows have no coefficients, over machines: bit for bit those
of one machine, which `tests/engine/test_metric_top_k.py` holds to every row's own recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.api.results import TopK
from dualform.engine.errors import CancelledError, DataLossError, ResourceExhaustedError
from dualform.engine.messages.versions import version_at
from dualform.engine.topk import followed_along
from dualform.engine.totals import steps
from dualform.index import build_index
from dualform.machines.following import FollowedUnits
from dualform.machines.spread import Machines, SpreadIndex
from dualform.questions import (
    AttributedLayer,
    AttributeQuestion,
    OutputQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.record import Recorder, recorder

from .near import NearFleet
from .test_answers import same_rows

STEPS, BATCH, D_IN, D_OUT = 9, 8, 6, 5
WHERE = parse_filter("label >= 1 and step != 7 or example = 3")
QUERIES = np.random.default_rng(1).standard_normal((3, D_IN)).astype(np.float32)
DIRECTIONS = np.random.default_rng(2).standard_normal((3, D_OUT)).astype(np.float32)
FEW = DIRECTIONS * np.array([1, 0, 0, 0, 1], np.float32)

Optimizers = Callable[[Any], torch.optim.Optimizer]
CASES: dict[str, Optimizers] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    # The transitions take the weight, which is followed too, and no longer the momentum alone.
    "Adam, coupled": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    # An element's transition depends on the others.
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


@dataclass(frozen=True)
class Case:
    """An index as a whole, and over machines; each query's rows may be on several."""

    whole: Index
    parts: SpreadIndex
    fleet: NearFleet


def record(path: Path, make: Optimizers, count: int = STEPS) -> None:
    """A layer whose steps have 8 rows, some none, and one that takes no part in some."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D_IN, D_OUT), nn.Tanh(), nn.Linear(D_OUT, 3))
    optimizer = make(model.parameters())
    inputs = torch.randn(30, D_IN)
    inputs[7] = inputs[3]
    with Recorder(model, optimizer, path) as recorder:
        for step in range(count):
            ids = torch.randint(0, 30, (BATCH,))
            if step % 6 != 4:
                recorder.annotate(label=ids % 3, example=ids)
                nn.functional.cross_entropy(model(inputs[ids]), ids % 3).backward()
            optimizer.param_groups[0]["lr"] *= 0.98
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 == 0)


SPLITS = [
    *((name, 17, 3) for name in CASES),
    # A machine for 6 rows, so that a step goes over two and three of them.
    ("AdamW", 3, 12),
    ("Adafactor", 3, 12),
]


@pytest.fixture(scope="module", params=SPLITS, ids=lambda split: "-".join(map(str, split)))
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """An optimizer, how many rows a shard has, and on how many machines they are at most."""
    name, rows, machines = request.param
    folder, fleet = tmp_path_factory.mktemp("followed"), NearFleet(machines)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder, "STATE_RATIO", 0)  # a state is kept as often as may be
        record(folder / "recording", CASES[name])
    path = folder / "index"
    build_index(folder / "recording", path, shard_rows=rows)
    with (
        pytest.MonkeyPatch.context() as patched,
        Index.open(path, device="cpu") as whole,
        Machines(fleet, "cpu").open(version_at(path)) as parts,
    ):
        patched.setattr(steps, "PRODUCT_ROWS", 5)  # a step's rows are added up in two pieces
        yield Case(whole, parts, fleet)


ROWS: list[dict[str, Any]] = [
    {"unit": 2, "k": 400},
    {"unit": 4, "k": 9, "at_step": 6, "where": WHERE, "order": "absolute"},
    {"unit": 0, "k": 4, "group_by": "label", "distinct": "example", "order": "smallest"},
    {"direction": DIRECTIONS, "k": 20, "where": WHERE},
    {"direction": FEW, "k": 3, "group_by": "step", "at_step": 8},
]


ONE = pytest.mark.parametrize("case", [("AdamW", 3, 12)], ids=["AdamW"], indirect=True)
"""What is no matter of the optimizer."""


def test_the_best_rows_are_those_of_one_machine(case: Case) -> None:
    for options in ROWS:
        question = TopKQuestion("0", QUERIES, rank_by="contribution", max_residual=1.0, **options)
        same_rows(case.parts.ask(question), case.whole.ask(question))


def test_the_best_groups_are_those_of_one_machine(case: Case) -> None:
    for options in (
        {"by": "example", "k": 9, "unit": 1, "where": WHERE},
        {"by": "label", "direction": DIRECTIONS, "order": "absolute", "at_step": 6},
    ):
        question = TopGroupsQuestion(
            "0", QUERIES, rank_by="contribution", max_residual=1.0, **options
        )  # type: ignore[arg-type]
        ours, theirs = case.parts.ask(question), case.whole.ask(question)
        assert ours.groups.equals(theirs.groups)
        np.testing.assert_array_equal(ours.counts, theirs.counts)
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-12, atol=1e-15)
        assert ours.coverage == theirs.coverage


def test_attributions_are_those_of_one_machine(case: Case) -> None:
    layers = (
        AttributedLayer("0", QUERIES, FEW),
        AttributedLayer("2", DIRECTIONS, QUERIES[:, :3].copy()),
    )
    for k in (4, None):
        question = AttributeQuestion(
            layers, inputs=3, by="example", k=k, where=WHERE, max_residual=1.0
        )
        ours, theirs = case.parts.attribute(question), case.whole.attribute(question)
        assert ours.groups.equals(theirs.groups)
        np.testing.assert_array_equal(ours.counts, theirs.counts)
        assert list(ours.coverage) == list(theirs.coverage)
        for name in ("scores", "by_layer", "initial", "rows", "residual", "outputs"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            if b is not None:
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13, err_msg=name)


def test_outputs_are_those_of_one_machine(case: Case) -> None:
    """Bit for bit; also from a state that was kept on the way."""
    assert any(0 < step <= 6 for step, _ in case.whole.layer("0").manifest.states)
    for options in (
        {"where": WHERE},
        {"at_step": 6},
        {"at_step": 8, "group_by": "label", "where": WHERE},
        {"group_by": "example"},
        {"at_step": 0, "group_by": "label"},
    ):
        question = OutputQuestion("0", QUERIES, max_residual=10.0, **options)  # type: ignore[arg-type]
        ours, theirs = case.parts.ask(question), case.whole.ask(question)
        for name in ("values", "initial", "trained", "residual"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None) == (b is None), name
            assert b is None or a.tobytes() == b.tobytes(), name
        assert (ours.groups is None) == (theirs.groups is None)
        assert ours.groups is None or ours.groups.equals(theirs.groups)
        np.testing.assert_array_equal(ours.counts, theirs.counts)
        assert ours.coverage == theirs.coverage
        before = case.fleet.traffic.sent
        case.parts.ask(replace(question, queries=QUERIES[:1]))
        assert case.fleet.traffic.sent - before < 20_000  # followed once; rows are counted again


ASKED = TopKQuestion("0", QUERIES, k=5, rank_by="contribution", unit=3, max_residual=1.0)


@ONE
def test_a_unit_is_followed_once(case: Case) -> None:
    """And made again by a machine that has it no more, of what the server knows."""
    expected = case.whole.ask(ASKED)
    case.parts._units = FollowedUnits()
    requests = [0]
    ask = case.fleet.ask

    def counted(parts: Any, *arguments: Any, **options: Any) -> list[Any]:
        requests[0] += len(parts)
        return ask(parts, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(case.fleet, "ask", counted)
        same_rows(case.parts.ask(ASKED), expected)
        first, requests[0] = requests[0], 0
        same_rows(case.parts.ask(ASKED), expected)
        machines = len(case.parts._parts)
        assert (first, requests[0]) == (4 * machines, machines)
        case.fleet.forget([part for _, part in case.parts._parts])
        same_rows(case.parts.ask(ASKED), expected)
        assert requests[0] == 2 * machines


@ONE
def test_rows_that_are_nowhere(case: Case) -> None:
    """Before a unit was followed all are needed; then others answer for themselves."""
    question, before = replace(ASKED, unit=1, at_step=7), replace(ASKED, unit=1)
    case.parts._units = FollowedUnits()
    case.parts.ask(before)
    case.fleet.gone = {case.parts._parts[1][0]}
    try:
        for partial in (False, True):
            with pytest.raises(DataLossError, match="rows of layer '0' are nowhere"):
                case.parts.ask(replace(question, partial=partial))
        hits = case.parts.ask(replace(before, partial=True))
    finally:
        case.fleet.gone = set()
    assert isinstance(hits, TopK)
    assert hits.coverage.missing > 0
    every = case.whole.ask(replace(before, k=400))
    for query in range(len(QUERIES)):
        kept = hits.rows[query][hits.rows[query] >= 0]
        left = every.rows[query][np.isin(every.rows[query], kept)]
        np.testing.assert_array_equal(left, kept)


@ONE
def test_who_gives_up_does_not_wait(case: Case) -> None:
    with case.parts._units._making, pytest.raises(CancelledError):
        case.parts.ask(replace(ASKED, at_step=5), stop=lambda: True)


@ONE
def test_what_takes_too_long_is_refused_as_by_one_machine(case: Case) -> None:
    asked = TopKQuestion("0", QUERIES, rank_by="contribution", direction=DIRECTIONS, k=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(followed_along, "MOST_PRODUCTS", 1e3)
        errors = []
        for index in (case.parts, case.whole):
            with pytest.raises(ResourceExhaustedError) as caught:
                index.ask(replace(asked, max_residual=1.0))
            errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_what_moves_does_not_depend_on_how_many_steps_there_were(tmp_path: Path) -> None:
    """Before the first question about a unit, and with each one."""
    moved = []
    for count in (9, 90):
        folder, fleet = tmp_path / f"{count}", NearFleet(3)
        record(folder / "recording", CASES["AdamW"], count)
        build_index(folder / "recording", folder / "index", shard_rows=BATCH * count // 9)
        with Machines(fleet, "cpu").open(version_at(folder / "index")) as parts:
            assert len(parts._parts) == 3
            before = fleet.traffic.sent + fleet.traffic.received
            parts.ask(ASKED)
            first = fleet.traffic.sent + fleet.traffic.received - before
            parts.ask(ASKED)
            moved.append((first, fleet.traffic.sent + fleet.traffic.received - before - first))
    (first, second), (first_of_many, second_of_many) = moved
    assert abs(first_of_many - first) < 500  # a step's rows, and digits
    assert abs(second_of_many - second) < 100
